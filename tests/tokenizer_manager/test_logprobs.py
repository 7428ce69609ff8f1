"""The fields that ask for log probabilities, and the answers' shapes, over an engine that the test plays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.logprobs import LogprobParams, Logprobs
from gapless.runtime.core.messages import Finish, Finished, Ready, Submit, TextOutput, column
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.prepare import prepare
from gapless.tokenizer_manager.schema import Prompt, parse_fields
from gapless.tokenizer_manager.states import Registry, RequestState

CONFIG = ServerConfig(model_path="toy")
READY = Ready(
    vocab_size=300, context_length=64, max_total_tokens=500, max_prompt_tokens=60, eos_token_ids=(299,),
    load_seconds=1.5, info={},
)  # fmt: skip
TOKENIZER = ByteTokenizer()


def asked(**fields: Any) -> list[LogprobParams | None]:
    return [prompt.logprobs for prompt in parse_fields(fields, CONFIG).prompts]


def submits(**fields: Any) -> list[Submit]:
    prompts = parse_fields(fields, CONFIG).prompts
    return [prepare(prompt, [(i, 0)], TOKENIZER, READY)[0] for i, prompt in enumerate(prompts)]


def test_nothing_is_asked_for_by_default() -> None:
    for value in (None, False):
        assert asked(text="a", return_logprob=value, top_logprobs_num=5) == [None]


def test_one_value_counts_for_all_prompts_and_a_list_for_each() -> None:
    all_alike = asked(text=["a", "b"], return_logprob=True, token_ids_logprob=[5, 6], top_logprobs_num=2)
    assert all_alike == [LogprobParams(-1, 2, (5, 6))] * 2
    each = asked(
        text=["a", "b", "c"],
        return_logprob=[True, False, True],
        logprob_start_len=[0, 1, None],
        top_logprobs_num=[1, 0, 3],
        token_ids_logprob=[[5], None, []],
        return_text_in_logprobs=True,
    )
    assert each == [LogprobParams(0, 1, (5,), True), None, LogprobParams(-1, 3, (), True)]
    assert asked(text="a", return_logprob=True, token_ids_logprob=[7]) == [LogprobParams(-1, 0, (7,))]


def test_the_start_is_resolved_and_no_more_are_asked_for_than_there_are() -> None:
    first, second = submits(text=["abc", "abcde"], return_logprob=True, logprob_start_len=[-1, 4])
    assert (first.logprobs, second.logprobs) == (LogprobParams(3), LogprobParams(4))
    small = Ready(100, 64, 500, 60, (99,), 1.0, {})
    (prompt,) = parse_fields(
        {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 128}, CONFIG
    ).prompts
    (submit,) = prepare(prompt, [(1, 0)], TOKENIZER, small)
    assert submit.logprobs == LogprobParams(1, 100)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_start_len": 3}, "logprob_start_len"),
        ({"logprob_start_len": 2**31 - 1}, "logprob_start_len"),
        ({"token_ids_logprob": [5, 300]}, "token_ids_logprob"),
    ],
)
def test_what_does_not_fit_the_prompt_or_the_vocabulary_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        submits(text="abc", return_logprob=True, **fields)
    assert caught.value.param == param


def found(first: int, count: int, top: int, chosen: int) -> Logprobs:
    """Made up, and different everywhere: -first for the first token, and so on."""
    values = -np.arange(first, first + count, dtype=np.float32)
    top_ids = np.arange(first, first + count)[:, None] * 10 + np.arange(top)
    best = values[:, None] - np.arange(top) / 8
    picked = values[:, None] - 0.5 - np.arange(chosen) / 8
    columns = (values, best.astype(np.float32), picked.astype(np.float32))
    return Logprobs(columns[0].tobytes(), column(top_ids, "<i4"), columns[1].tobytes(), columns[2].tobytes())


class Playing:
    """A registry with one request of the prompt "abc", and its state."""

    def __init__(self, **fields: Any) -> None:
        self.registry = Registry(lambda _: None, 10)
        self.prompts: list[Prompt] = parse_fields(
            {"text": "abc", "return_logprob": True} | fields, CONFIG
        ).prompts
        self.call = self.registry.open(self.prompts, 1)
        messages = [prepare(self.prompts[0], [(self.state.uid, 0)], TOKENIZER, READY)[0]]
        self.registry.submit(self.call, messages, TOKENIZER.pieces)

    @property
    def state(self) -> RequestState:
        return self.call.states[0]

    def gain(self, ids: list[int], *logprobs: tuple[bool, Logprobs], finish: Finish = Finish.NONE) -> None:
        uid = self.state.uid
        rows = (column([uid] if ids else [], "<i8"), [TOKENIZER.decode(ids)] if ids else [])
        end = [Finished(uid, finish, None, "", "", 3, len(self.state.ids) + len(ids), 0)] if finish else []
        entries = [(uid, *entry) for entry in logprobs]
        counts = column([len(ids)] if ids else [], "<i4")
        self.registry.apply(TextOutput(*rows, counts, column(ids, "<i4"), end, [], entries))


def test_the_shapes_are_sglangs(run: Any) -> None:
    async def test() -> None:
        play = Playing(
            logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[8, 9], return_text_in_logprobs=True
        )
        play.gain([], (True, found(1, 2, 2, 2)))
        play.gain(list(b"x"), (False, found(3, 1, 2, 2)))
        play.gain(list(b"y"), (False, found(4, 1, 2, 2)), finish=Finish.LENGTH)
        meta = whole_answer(play.state)["meta_info"]
        assert meta["input_token_logprobs"] == [(None, 97, "a"), (-1.0, 98, "b"), (-2.0, 99, "c")]
        assert meta["output_token_logprobs"] == [(-3.0, 120, "x"), (-4.0, 121, "y")]
        assert meta["input_top_logprobs"][:2] == [None, [(-1.0, 10, "\n"), (-1.125, 11, "\v")]]
        assert meta["output_top_logprobs"][1] == [(-4.0, 40, "("), (-4.125, 41, ")")]
        assert meta["input_token_ids_logprobs"][0] is None
        assert meta["input_token_ids_logprobs"][2] == [(-2.5, 8, "\b"), (-2.625, 9, "\t")]
        assert meta["output_token_ids_logprobs"] == [
            [(-3.5, 8, "\b"), (-3.625, 9, "\t")],
            [(-4.5, 8, "\b"), (-4.625, 9, "\t")],
        ]

    run(test())


def test_only_what_was_asked_for_is_there(run: Any) -> None:
    async def test() -> None:
        play = Playing(logprob_start_len=1)
        play.gain([], (True, found(1, 2, 0, 0)))
        play.gain(list(b"x"), (False, found(3, 1, 0, 0)), finish=Finish.LENGTH)
        meta = whole_answer(play.state)["meta_info"]
        assert {name: value for name, value in meta.items() if "logprobs" in name} == {
            "input_token_logprobs": [(-1.0, 98, None), (-2.0, 99, None)],
            "output_token_logprobs": [(-3.0, 120, None)],
        }
        output_only = Playing(top_logprobs_num=1)
        output_only.gain(list(b"x"), (False, found(3, 1, 1, 0)), finish=Finish.LENGTH)
        meta = whole_answer(output_only.state)["meta_info"]
        assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])
        assert meta["output_top_logprobs"] == [[(-3.0, 30, None)]]

    run(test())


@pytest.mark.parametrize("incremental", [False, True])
def test_a_chunk_of_several_tokens_has_those_of_each(run: Any, incremental: bool) -> None:
    """Row i has its own alternatives, and the chunks make up the whole answer."""

    async def test() -> None:
        play = Playing(logprob_start_len=0, top_logprobs_num=2)
        play.gain([], (True, found(1, 2, 2, 0)))
        play.gain(list(b"u"), (False, found(3, 1, 2, 0)))
        chunks = [next_chunk(play.state, incremental)]
        for i, char in enumerate(b"vwxyz", 4):
            play.gain(
                [char], (False, found(i, 1, 2, 0)), finish=Finish.LENGTH if char == ord("z") else Finish.NONE
            )
            if char in b"xz":
                chunks.append(next_chunk(play.state, incremental))
        want = whole_answer(play.state)
        assert [len(chunk["output_ids"]) for chunk in chunks] == ([1, 3, 2] if incremental else [1, 4, 6])
        for name, whole in want["meta_info"].items():
            if "logprobs" in name:
                parts = [chunk["meta_info"][name] for chunk in chunks]
                assert (list(itertools.chain(*parts)) if incremental else parts[-1]) == whole
        tops = [row[0][1] for row in want["meta_info"]["output_top_logprobs"]]
        assert tops == [30, 40, 50, 60, 70, 80]
        for chunk in chunks:
            count = len(chunk["output_ids"])
            assert [e[1] for e in chunk["meta_info"]["output_token_logprobs"]] == chunk["output_ids"]
            assert len(chunk["meta_info"]["output_top_logprobs"]) == count

    run(test())
