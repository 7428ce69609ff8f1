"""The demo model, whose weights are real."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from transformers_demo import transformers_demo

from gapless.kernels.ops import Ops, choose_ops
from gapless.runtime.core.gguf import read_gguf
from gapless.runtime.core.model_path import resolve_model_path
from gapless.runtime.model.loader import load_model
from gapless.runtime.tokenizer.load import load_tokenizer

from .paged import PagedRun

# Every word is one token of the vocabulary.
TEXT = """
The old house at the end of the street had been empty for many years when a young family came to live in it .
They opened the windows , cleaned the floors and painted the walls in bright colors . In the garden they found a small
stone table under a tree , and on summer evenings they would sit there and talk about the day . The children said that
at night they could hear music from the room above the kitchen , but nobody believed them until the first snow fell .
"""


def text_ids() -> list[int]:
    tokens = read_gguf(resolve_model_path("demo").path).metadata["tokenizer.ggml.tokens"]
    id_of = {token: i for i, token in enumerate(tokens)}
    return [2] + [id_of[f"▁{word}".encode()] for word in TEXT.split()]


@pytest.mark.slow
def test_logits_are_transformers(ops: Ops) -> None:
    ids = text_ids()
    assert len(ids) >= 90
    with torch.inference_mode():
        want = transformers_demo()(torch.tensor([ids])).logits[0]
    model = load_model(resolve_model_path("demo"), torch.float32, ops, lambda _: None)
    run = PagedRun(model, {"text": ids}, page_size=16)
    got = torch.cat([run.step({"text": count})["text"] for count in (50, 1, len(ids) - 51)])
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert got.argmax(-1).equal(want.argmax(-1))
    hits = want[:-1].argmax(-1).eq(torch.tensor(ids[1:])).float().mean()
    assert hits > 0.2, "the reference itself does not predict English"


@functools.cache
def perplexity(dtype: torch.dtype, backend: str) -> float:
    """Of the essay beside this file, computed in chunks as a server would."""
    ids = load_tokenizer("demo").encode((Path(__file__).parent / "essay.txt").read_text())
    model = load_model(
        resolve_model_path("demo"), dtype, choose_ops(backend, torch.device("cpu")), lambda _: None
    )
    run, loss = PagedRun(model, {"text": ids}, page_size=16), 0.0
    for start in range(0, len(ids), 128):
        logits = run.step({"text": min(128, len(ids) - start)})["text"].float()
        following = torch.tensor(ids[start + 1 : start + 129])
        loss += float(torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum"))
    return math.exp(loss / (len(ids) - 1))


@pytest.mark.parametrize("backend", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_bfloat16_is_within_a_hundredth_of_float32_in_perplexity(backend: str) -> None:
    exact, rounded = perplexity(torch.float32, "auto"), perplexity(torch.bfloat16, backend)
    assert 5 < exact < 60, "the essay is plain English"
    assert abs(rounded / exact - 1) < 0.01
