"""Structured output of a real model: what ends by itself validates, and nearly all of it does end by itself."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from schemas import random_schema

from gapless import Engine

PROMPT = "A JSON object that describes {topic}:\n"
TOPICS = ["a cat", "a house by the sea", "the weather", "an order of three books", "a city"]


@pytest.mark.slow
def test_two_hundred_schemas_on_the_demo_model() -> None:
    """Half greedy, half drawn at temperature 1; unconstrained neighbours are as without them."""
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(200)]
    prompts = [PROMPT.format(topic=TOPICS[i % len(TOPICS)]) for i in range(200)]
    params = [
        {"json_schema": schema, "max_new_tokens": 400, "temperature": float(i % 2), "sampling_seed": i}
        for i, schema in enumerate(schemas)
    ]
    ended = 0
    with Engine("demo", max_running_requests=64, max_total_tokens=40_000) as engine:
        for answer, schema in zip(engine.generate(prompts, params), schemas, strict=True):
            reason = answer["meta_info"]["finish_reason"]["type"]
            assert reason in ("stop", "length"), answer
            if reason == "stop":
                ended += 1
                value = json.loads(answer["text"])
                jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    assert ended >= 190, f"{ended} of 200 ended by themselves"


@pytest.mark.slow
def test_a_grammar_changes_nothing_for_neighbours_of_the_demo_model() -> None:
    """Greedy, in float32: the batch may not change what is chosen here."""
    free = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    kept = {"json_schema": random_schema(random.Random(3)), "max_new_tokens": 60}
    texts = [PROMPT.format(topic=topic) for topic in TOPICS]
    with Engine("demo", dtype="float32", max_total_tokens=8000) as engine:
        alone = [engine.generate(text, free)["output_ids"] for text in texts]
        together = engine.generate([*texts, *texts], [free] * len(texts) + [kept] * len(texts))
    assert [answer["output_ids"] for answer in together[: len(texts)]] == alone
