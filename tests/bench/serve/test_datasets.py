"""The datasets of the serving benchmark: what their items hold, and which options and files are refused."""

import argparse
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.serve.dataset_files import BLOCK
from gapless.bench.serve.datasets import SYNTHETIC, add_arguments, check, make_items, plain_ids
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.tokenizer.load import load_tokenizer

BYTES = load_tokenizer("toy")
SMALL = {
    "random": ["--num-prompts=6", "--random-input-len=9"],
    "generated-shared-prefix": [
        "--gsp-num-groups=3",
        "--gsp-prompts-per-group=4",
        "--gsp-system-prompt-len=20",
    ],
    "multi-turn": ["--multi-turn-num-users=3", "--multi-turn-turns=4"],
}


def options(name, *arguments, seed=1):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([f"--dataset-name={name}", *arguments], argparse.Namespace(seed=seed))


def items_of(name, *arguments, seed=1, tokenizer=BYTES, vocab_size=512):
    parsed = options(name, *arguments, seed=seed)
    check(parsed)
    return make_items(parsed, tokenizer, vocab_size)


@pytest.fixture
def write(tmp_path):
    """Writes a file and gives the option that names it."""

    def file(content):
        (tmp_path / "data").write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"--dataset-path={tmp_path / 'data'}"

    return file


def lines(*entries):
    return "\n".join(json.dumps(entry) for entry in entries)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_synthetic_dataset_depends_on_its_seed_alone(name):
    assert (
        items_of(name, *SMALL[name]) == items_of(name, *SMALL[name]) != items_of(name, *SMALL[name], seed=2)
    )


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_synthetic_prompt_is_of_plain_ids_and_as_long_as_it_says(name):
    allowed = set(plain_ids(BYTES, 300).tolist())
    assert len(allowed) == 299 and not allowed & BYTES.eos_token_ids
    for item in items_of(name, *SMALL[name], vocab_size=300):
        assert len(item.prompt) == item.prompt_len and set(item.prompt) <= allowed


def test_the_demo_models_special_ids_are_never_drawn():
    tokenizer = load_tokenizer("demo")
    allowed = plain_ids(tokenizer, tokenizer.vocab_size + 64)  # a model may have more rows than ids
    assert len(allowed) == tokenizer.vocab_size - len(tokenizer.special_ids | tokenizer.eos_token_ids)
    assert not np.isin(allowed, list(tokenizer.special_ids | tokenizer.eos_token_ids)).any()


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 60), st.floats(0, 1))
def test_random_lengths_stay_in_their_range(seed, input_len, output_len, ratio):
    lengths = ["--random-input-len", str(input_len), "--random-output-len", str(output_len)]
    items = items_of("random", "--num-prompts=5", *lengths, f"--random-range-ratio={ratio}", seed=seed)
    assert len(items) == 5
    for item in items:
        assert max(1, int(input_len * ratio)) <= item.prompt_len <= input_len
        assert max(1, int(output_len * ratio)) <= item.output_len <= output_len
        assert (item.after, item.at, item.group) == (None, None, None)


def test_random_lengths_reach_both_ends():
    items = items_of("random", "--num-prompts=200", "--random-input-len=3", "--random-output-len=2")
    assert {item.prompt_len for item in items} == {1, 2, 3}
    assert {item.output_len for item in items} == {1, 2}


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 8))
def test_a_longer_load_begins_with_the_shorter(seed, few, more):
    for name, option in (("random", "--num-prompts"), ("multi-turn", "--multi-turn-num-users")):
        short, long = (
            items_of(name, *SMALL[name], f"{option}={count}", seed=seed) for count in (few, few + more)
        )
        assert long[: len(short)] == short and len(long) > len(short)


def test_the_prompts_of_a_group_begin_alike_and_no_others_do():
    items = items_of("generated-shared-prefix", *SMALL["generated-shared-prefix"], "--gsp-question-len=5")
    groups = [item.group for item in items]
    assert sorted(groups) == [0] * 4 + [1] * 4 + [2] * 4 != groups
    prefixes = {(item.group, tuple(item.prompt[:20])) for item in items}
    assert len(prefixes) == len({prefix for _, prefix in prefixes}) == 3
    assert len({tuple(item.prompt) for item in items}) == 12
    assert {(item.prompt_len, item.output_len) for item in items} == {(25, 256)}


def test_a_turn_follows_the_one_before_of_the_same_user():
    sizes = ["--multi-turn-system-len=10", "--multi-turn-text-len=3", "--multi-turn-output-len=7"]
    items = items_of("multi-turn", *SMALL["multi-turn"], *sizes, "--multi-turn-delay=2")
    assert [item.group for item in items] == [0] * 4 + [1] * 4 + [2] * 4
    assert [item.after for item in items] == [None, 0, 1, 2, None, 4, 5, 6, None, 8, 9, 10]
    assert [item.prompt_len for item in items] == [13, 3, 3, 3] * 3
    assert len({tuple(item.prompt[:10]) for item in items if item.after is None}) == 1
    assert all((item.delay > 0) == (item.after is not None) for item in items)
    assert {item.output_len for item in items} == {7}


def test_think_times_have_the_mean_asked_for():
    items = items_of("multi-turn", "--multi-turn-num-users=500", "--multi-turn-delay=2")
    delays = [item.delay for item in items if item.after is not None]
    assert np.mean(delays) == pytest.approx(2, rel=0.1)  # six standard errors of 3,500
    assert not any(item.delay for item in items_of("multi-turn", "--multi-turn-delay=0"))


def sharegpt(*pairs):
    """Both spellings in turn."""
    spellings = (("from", "value"), ("role", "content"))
    conversations = []
    for number, pair in enumerate(pairs):
        who, what = spellings[number % 2]
        conversations.append({"id": number, "conversations": [{who: "human", what: text} for text in pair]})
    return json.dumps(conversations)


def test_sharegpt_takes_prompt_and_answer_of_each_conversation(write):
    path = write(sharegpt(("a question", "an answer", "more"), ("other one", "bbbb"), ("alone is no pair",)))
    items = items_of("sharegpt", path)
    found = {BYTES.decode(item.prompt): item.output_len for item in items}
    assert found == {"a question": len(BYTES.encode("an answer")), "other one": 4}
    assert all(item.prompt_len == len(item.prompt) for item in items)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], {4, 10, 1024}),
        (["--sharegpt-context-len=5000"], {4, 7, 10, 1024, 1025, 3000}),
        (["--sharegpt-context-len=14"], {4, 10}),
        (
            ["--sharegpt-output-len=1"],
            {4, 6, 7, 10, 1024},
        ),  # how long the file's answers are no longer counts
    ],
)
def test_sharegpt_leaves_out_what_is_too_short_or_too_long(write, arguments, kept):
    """A prompt is told by its length; the answers have 4 tokens but for those of 6 and 7."""
    lengths = {3: 4, 4: 4, 6: 3, 7: 2042, 10: 4, 1024: 1024, 1025: 4, 3000: 4}
    path = write(sharegpt(*[("b" * prompt, "b" * answer) for prompt, answer in lengths.items()]))
    assert {item.prompt_len for item in items_of("sharegpt", path, *arguments)} == kept


def test_sharegpt_is_shuffled_by_the_seed_and_cut(write):
    path = write(sharegpt(*[(f"question {number}", "answer") for number in range(30)]))
    every, first = items_of("sharegpt", path), items_of("sharegpt", path, "--num-prompts=5")
    assert len(every) == 30 and first == every[:5]
    assert every != items_of("sharegpt", path, seed=2)


def trace(timestamp, input_length, *hash_ids, output_length=3):
    return locals() | {"hash_ids": list(hash_ids)}


def test_a_mooncake_trace_gives_equal_ids_for_equal_hash_ids(write):
    path = write(
        lines(trace(1000, 2 * BLOCK, 0, 7), trace(1500, BLOCK + 9, 0, 8), trace(4000, 2 * BLOCK, 7, 7))
    )
    one, two, three = items_of("mooncake-trace", path)
    assert [item.prompt_len for item in (one, two, three)] == [2 * BLOCK, BLOCK + 9, 2 * BLOCK]
    assert all(len(item.prompt) == item.prompt_len and item.output_len == 3 for item in (one, two, three))
    assert one.prompt[:BLOCK] == two.prompt[:BLOCK] != three.prompt[:BLOCK]
    assert one.prompt[BLOCK:] == three.prompt[:BLOCK] == three.prompt[BLOCK:]
    assert two.prompt[BLOCK:] != one.prompt[BLOCK : BLOCK + 9]
    assert set(one.prompt) <= set(plain_ids(BYTES, 512).tolist())
    assert items_of("mooncake-trace", path, seed=2)[0].prompt != one.prompt


def test_a_mooncake_trace_is_sent_at_its_times(write):
    path = write(lines(trace(1000, 5, 1), trace(1500, 5, 1), trace(4000, 5, 1)))
    assert [item.at for item in items_of("mooncake-trace", path)] == [0, 0.5, 3]
    slow = items_of("mooncake-trace", path, "--mooncake-slowdown-factor=2", "--num-prompts=2")
    assert [item.at for item in slow] == [0, 1]


def test_custom_lines_of_every_kind(write):
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "brief"}], "name": "x"},
    ]
    path = write(
        lines(
            {"prompt": "a text", "output_len": 3},
            {"prompt": [5, 6, 7], "max_tokens": 4},
            {"text": "other", "unknown": None},
            {"messages": messages},
            {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "said"}]},
            {"conversations": [{"content": "ask"}], "output_len": 2},
        )
        + "\n\n"
    )
    items = items_of("custom", path, "--custom-output-len=9")
    encoded = [BYTES.encode(text) for text in ("a text", "other", "ask")]
    assert [item.prompt for item in items] == [
        encoded[0], [5, 6, 7], encoded[1], messages, encoded[2], encoded[2],
    ]  # fmt: skip
    assert [item.prompt_len for item in items] == [
        *map(len, (encoded[0], "123", encoded[1], "bebrief")),
        3,
        3,
    ]
    assert [item.output_len for item in items] == [3, 4, 9, 9, 4, 2]
    assert all(item.at is None for item in items)
    assert items_of("custom", path, "--custom-output-len=9", "--num-prompts=2") == items[:2]


def test_custom_lines_with_a_timestamp_are_sent_then(write):
    path = write(lines({"text": "a", "timestamp": 12.5}, {"text": "b"}, {"text": "c", "timestamp": 10}))
    assert [item.at for item in items_of("custom", path)] == [2.5, None, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": 3}]}]', r".*\$\[0\].conversations\[1\].value"),
        ("sharegpt", '[{"conversations": []}, {"conversations": [{"from": "a"}]}]', r".*neither.*\$\[1\]"),
        ("sharegpt", '[{"conversations": []}, {}]', r".*missing required field.*\$\[1\]"),
        ("sharegpt", '{"conversations": []}', "Expected `array`, got `object`"),
        ("sharegpt", "[{]", ".*malformed.*byte 2"),
        ("sharegpt", "[]", "none of its 0 entries"),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "none of its 1 entries"),
        ("mooncake-trace", lines(trace(0, 5, 1), trace(0, 0, 1)), "line 2: .*`int` >= 1.*input_length"),
        ("mooncake-trace", lines(trace(0, 5, -1)), r"line 1: .*`int` >= 0.*hash_ids\[0\]"),
        ("mooncake-trace", lines(trace(0, BLOCK + 1, 1)), "line 1: 1 hash_ids are too few for input_length 513"),
        ("mooncake-trace", '{"timestamp": 0}', "line 1: .*missing required field `input_length`"),
        ("mooncake-trace", "\n\n", "it has no lines"),
        ("custom", '{"text": "a"}\n\n{"text": "b"', "line 3: .*truncated"),
        ("custom", b'{"text": "\xff"}', "line 1: .*UTF-8"),
        ("custom", "[1]", "line 1: Expected `object`"),
        ("custom", '{"output_len": 4}', "line 1: needs one of prompt, text, messages"),
        ("custom", '{"text": "a", "prompt": "b"}', "line 1: needs one of"),
        ("custom", '{"text": "a", "max_tokens": 0}', "line 1: .*`int` >= 1.*max_tokens"),
        ("custom", '{"text": ""}', "line 1: the prompt is empty"),
        ("custom", '{"prompt": []}', "line 1: the prompt is empty"),
        ("custom", '{"messages": []}', "line 1: the prompt is empty"),
        ("custom", '{"conversations": []}', "line 1: .*length >= 1.*conversations"),
        ("custom", '{"messages": [{"content": "a"}]}', r"line 1: .*missing required field `role`.*\$\[0\]"),
        ("custom", '{"prompt": [1, 512]}', "line 1: id 512 in a prompt: the model has 512 ids"),
        ("custom", '{"prompt": [1, -1]}', r"line 1: .*`int` >= 0.*prompt\[1\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(write, name, content, message):
    path = write(content)
    with pytest.raises(ConfigError, match=f"{path.replace('=', ' ')}: {message}"):
        items_of(name, path)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("random", ["--num-prompts=0"], "--num-prompts 0: must be at least 1"),
        ("random", ["--random-input-len=0"], "--random-input-len 0: must be at least 1"),
        ("random", ["--random-range-ratio=1.5"], "--random-range-ratio 1.5: must be between 0 and 1"),
        ("random", ["--random-range-ratio=nan"], "--random-range-ratio nan"),
        ("random", ["--dataset-path=pyproject.toml"], "--dataset-name random reads no file"),
        ("sharegpt", ["--sharegpt-output-len=0"], "--sharegpt-output-len 0: must be at least 1"),
        ("sharegpt", [], "--dataset-name sharegpt needs --dataset-path"),
        ("custom", ["--dataset-path=no/such"], "--dataset-path no/such: there is no such file"),
        ("custom", ["--dataset-path=/"], "--dataset-path /: there is no such file"),
        ("generated-shared-prefix", ["--gsp-num-groups=-1"], "--gsp-num-groups -1: must be at least 1"),
        ("multi-turn", ["--multi-turn-delay=-1"], "--multi-turn-delay -1: must be at least 0"),
        ("multi-turn", ["--multi-turn-delay=inf"], "--multi-turn-delay inf"),
        ("mooncake-trace", ["--mooncake-slowdown-factor=0"], "--mooncake-slowdown-factor 0: must be above 0"),
    ],
)
def test_wrong_options_are_named(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        items_of(name, *arguments)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="--seed -1: must be at least 0"):
        items_of("random", seed=-1)
