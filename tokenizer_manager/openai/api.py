"""The bodies and answers of OpenAI's routes as structs: what /openapi.json says of them and what a body may hold.

Sampling values are checked where /generate's are, so that both give the same verdict. Fields beyond OpenAI's are
SGLang's. null means the default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gapless.runtime.core.sampling import MAX_SAMPLES, MAX_STOPS
from gapless.tokenizer_manager.api import (
    MAX_TIMEOUT_SECONDS,
    Bias,
    Count,
    LogprobCount,
    Name,
    Penalty,
    Priority,
    Rid,
    Share,
    TokenId,
)

# Of the API's fields, those that change no answer here, or nothing but who pays for it.
NO_EFFECT = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "verbosity",
)  # fmt: skip


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """What both routes take."""

    model: Annotated[str, Meta(description="the served name, the model path or `default`")] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, description="0 is greedy")] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    logit_bias: dict[str, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = -1
    min_p: Share | None = 0.0
    min_tokens: Count | None = 0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = 1.0
    stop_token_ids: TokenId | Annotated[list[TokenId], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    regex: str | None = None
    ebnf: str | None = None
    rid: Rid | None = None
    priority: Priority | None = None
    extra_key: Name | None = None
    cache_salt: Name | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)] | None = None


class CompletionBody(CommonBody, kw_only=True):
    """A prompt or several: text, or token ids. `echo` puts the prompt before the text, with its log probabilities
    where those are asked for."""

    prompt: (
        str
        | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    )
    echo: bool | None = False
    logprobs: Annotated[LogprobCount, Meta(description="how many of the best tokens, too")] | None = None


class Function(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """`content` may be a list of text parts. Other fields are passed on to the template."""

    role: Annotated[str, Meta(max_length=256)]
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(CommonBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1, description="beats max_tokens")] | None = (
        None
    )
    logprobs: bool | None = False
    top_logprobs: LogprobCount | None = 0
    tools: Annotated[list[Tool], Meta(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Annotated[str, Meta(description="for the template")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="for the template")] | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: int | str | None = None


class CompletionAnswer(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    matched_stop: int | str | None = None


class ChatAnswer(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
