"""The demo model's tokenizer against ids and text recorded from, or computed by, transformers."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from gapless.runtime.core.model_path import resolve_model_path
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.load import load_pieces, load_tokenizer

Recorded = list[tuple[str, list[int]]]


@pytest.fixture(scope="module")
def demo_path() -> str:
    return str(resolve_model_path("demo").path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that starts empty: the vocabulary is derived by the code under test."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAPLESS_CACHE_DIR", str(root))
        yield root


@pytest.fixture(scope="module")
def tokenizer(demo_path: str, cache: Path) -> Tokenizer:
    return load_tokenizer(demo_path)


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer, cache: Path) -> Library:
    (path,) = cache.glob("tokenizer/*/tokenizer.json")
    return Library.from_file(str(path))


def test_ids_are_transformers(tokenizer: Tokenizer, recorded: Recorded) -> None:
    assert len(recorded) >= 150
    for text, ids in recorded:
        assert tokenizer.encode(text) == ids, text
    assert tokenizer.encode_batch([text for text, _ in recorded]) == [ids for _, ids in recorded]


def test_without_special_tokens_only_bos_is_missing(tokenizer: Tokenizer, recorded: Recorded) -> None:
    for text, ids in recorded:
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


def test_facts(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (2, {1}, 262_144)
    assert tokenizer.special_ids >= {0, 1, 2, 3, 4, 6, 105, 106, 262_143}
    assert not tokenizer.special_ids & {5, 107, 138, 255_999}  # user-defined tokens are text
    assert tokenizer.chat_template is None


def test_every_id_has_the_bytes_that_it_decodes_to(tokenizer: Tokenizer, library: Library) -> None:
    ids = range(tokenizer.vocab_size)
    decoded = library.decode_batch([[i] for i in ids], skip_special_tokens=False)
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == decoded
    assert [tokenizer.pieces.piece(238 + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]


def test_pieces_join_to_the_text(tokenizer: Tokenizer, library: Library, recorded: Recorded) -> None:
    for text, ids in recorded:
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text.replace("▁", " ")
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "\ud800\ud800 語 \udfff", "\ud83d\ude00"])
def test_surrogates_do_not_raise(tokenizer: Tokenizer, text: str) -> None:
    """A client sent half of an emoji's surrogate pair in JSON, and the encoder's TypeError became a 500."""
    repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer.encode(text) == tokenizer.encode(repaired)


def test_threads_share_a_tokenizer(tokenizer: Tokenizer, recorded: Recorded) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(tokenizer.encode, text) for _ in range(10) for text, _ in recorded]
        assert [job.result() for job in jobs] == [ids for _ in range(10) for _, ids in recorded]


def test_a_second_start_takes_the_entry_from_the_cache(
    tokenizer: Tokenizer, demo_path: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_again(path: Path) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("gapless.runtime.tokenizer.gguf.read_definition", read_again)
    again = load_tokenizer(demo_path)
    assert again.encode("Hello  world") == tokenizer.encode("Hello  world")
    assert load_pieces(demo_path).blob == tokenizer.pieces.blob


@pytest.mark.parametrize(
    ("load", "absent"), [("load_tokenizer", ["torch"]), ("load_pieces", ["torch", "tokenizers"])]
)
def test_loading_imports_neither_torch_nor_more_than_it_needs(
    tokenizer: Tokenizer, demo_path: str, load: str, absent: list[str]
) -> None:
    code = f"""
import sys
from gapless.runtime.tokenizer.load import {load}
{load}({demo_path!r})
print([name for name in {absent!r} if name in sys.modules])
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def random_texts(tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """Characters of every plane, vocabulary pieces in random order, runs, and control tokens between them."""
    rng = random.Random(7)
    planes = [(0, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x370, 0xD7FF), (0xE000, 0xFFFF), (0x1F000, 0x1FBFF)]
    planes += [(0x10000, 0x10FFFF)]

    def part() -> str:
        match rng.randrange(5):
            case 0:
                low, high = rng.choice(planes)
                return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))
            case 1:
                return rng.choice(" \n\t\r") * rng.randint(1, 40)
            case 2:
                return rng.choice(
                    ["<bos>", "<start_of_turn>", "<unused12>", "[multimodal]", "<h1>", "<0x0A>", "▁"]
                )
            case _:
                ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 8))]
                return tokenizer.decode(ids)

    for _ in range(count):
        yield "".join(part() for _ in range(rng.randint(1, 10)))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ids_are_transformers_on_random_texts(
    demo_path: str, tokenizer: Tokenizer, recorded: Recorded
) -> None:
    from transformers import AutoTokenizer

    path = Path(demo_path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*(text for text, _ in recorded), *random_texts(tokenizer, 2000)]:
        assert tokenizer.encode(text) == theirs.encode(text), text
