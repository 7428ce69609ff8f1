"""The native routes' bodies as structs: what /openapi.json says of them, and which fields --strict-fields knows.

/generate checks its fields by hand, for errors in words and for lists of one value a prompt; a test holds the names,
defaults and bounds here to what those checks do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gapless.runtime.core.logprobs import MAX_LOGPROBS
from gapless.runtime.core.sampling import MAX_BIASES, MAX_SAMPLES, MAX_STOPS

MAX_NAME_CHARS = 256  # of a rid, an extra_key, a cache_salt or a group_id
MAX_TIMEOUT_SECONDS = 1_000_000
_MAX_INT = 2**31 - 1

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Rid = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Priority = Annotated[int, Meta(ge=-(2**31), le=_MAX_INT)]
TokenId = Annotated[int, Meta(ge=0)]
LogprobStart = Annotated[int, Meta(ge=-1, le=_MAX_INT, description="-1: none of the prompt's tokens")]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Count = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """How outputs are sampled and where they stop. null means the default."""

    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES, description="samples of each prompt")] | None = 1
    max_new_tokens: Count | None = 128
    min_new_tokens: Count | None = 0
    temperature: Annotated[float, Meta(ge=0, description="0 is greedy")] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT, description="-1: off; 0 is refused")] | None = -1
    min_p: Share | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = 1.0
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES, description="by token id")] | None = (
        None
    )
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenId | Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """One prompt or a batch: `text` or `input_ids`. In a batch the other fields may be lists of one value a prompt."""

    text: str | Annotated[list[str], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None
    rid: Rid | list[Rid] | None = None
    stream: bool | None = False
    priority: Priority | list[Priority] | None = None
    extra_key: Name | list[Name] | None = None
    cache_salt: Name | list[Name] | None = None
    group_id: Annotated[Name | list[Name] | None, Meta(description="of requests that belong together")] = None
    hold_prefix: Annotated[
        bool | list[bool] | None,
        Meta(description="keep the prompt cached until /release_group, unless its room is needed"),
    ] = False
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: LogprobStart | list[LogprobStart] | None = -1
    top_logprobs_num: LogprobCount | list[LogprobCount] | None = 0
    token_ids_logprob: Annotated[list[TokenId | list[TokenId]], Meta(max_length=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = False
    timeout: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=MAX_TIMEOUT_SECONDS,
                description="seconds, then it is ended: 408 without output",
            ),
        ]
        | None
    ) = None


class FinishReason(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


LogprobEntry = tuple[float | None, int, str | None]  # log probability (None: nothing comes before), id, text
LogprobLists = list[list[LogprobEntry] | None]


class MetaInfo(msgspec.Struct):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None
    input_token_logprobs: list[LogprobEntry] | None = None
    output_token_logprobs: list[LogprobEntry] | None = None
    input_top_logprobs: LogprobLists | None = None
    output_top_logprobs: LogprobLists | None = None
    input_token_ids_logprobs: LogprobLists | None = None
    output_token_ids_logprobs: LogprobLists | None = None


class GenerateAnswer(msgspec.Struct):
    """A sample; a batch or `n` above 1 is answered by a list. In a stream each event has one, with its `index`."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class AbortBody(msgspec.Struct, kw_only=True):
    """Whom to abort: the request that has exactly this id, all its samples, or everybody's requests."""

    rid: Name = ""
    abort_all: bool = False


class AbortAnswer(msgspec.Struct):
    aborted: int


class ReleaseGroupBody(msgspec.Struct, kw_only=True):
    """The group_id that requests were sent with. One that nobody has is no error."""

    group_id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class ReleaseGroupAnswer(msgspec.Struct):
    success: bool


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a list of texts, as `prompt` or as `text`."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    add_special_tokens: bool = True
    model: str | None = None


class TokenizeAnswer(msgspec.Struct):
    """For a list: lists, in its order."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids or a list of such lists."""

    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = True
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    """The text under both names that clients read: SGLang's and vLLM's."""

    text: str | list[str]
    prompt: str | list[str]


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    code: str
    param: str | None = None


class Error(msgspec.Struct):
    error: ErrorBody


class Load(msgspec.Struct):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Health(msgspec.Struct):
    status: str
    reason: str | None = None


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """Weights of the same shape as those in use, and how many seconds to wait for open requests to end."""

    model_path: Annotated[str, Meta(min_length=1)]
    timeout: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class UpdateWeightsAnswer(msgspec.Struct):
    success: bool
    message: str


class FlushAnswer(msgspec.Struct):
    success: bool
    message: str
    pages: int


Info = dict[str, Any]
