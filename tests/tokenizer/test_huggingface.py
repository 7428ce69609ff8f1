"""Tokenizers from Hugging Face directories, on tiny ones made here by the tokenizers library."""

from pathlib import Path

import pytest
from tokenizer_files import byte_level, save, sentencepiece_like
from tokenizers import Tokenizer, decoders

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.tokenizer.load import load_pieces, load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(params=[byte_level, sentencepiece_like])
def library(request: pytest.FixtureRequest, texts: list[str]) -> Tokenizer:
    return request.param(texts)


def test_ids_are_the_librarys_and_pieces_join_to_its_text(
    tmp_path: Path, library: Tokenizer, texts: list[str]
) -> None:
    library.enable_truncation(5)
    library.enable_padding(length=9)
    path = save(tmp_path, library)
    library.no_truncation()
    library.no_padding()
    tokenizer = load_tokenizer(path)
    samples = [*texts, "a<|end|>b<tool>c <|begin|>"]
    batch = tokenizer.encode_batch(samples, add_special_tokens=False)
    assert batch == [library.encode(text, add_special_tokens=False).ids for text in samples]
    for ids in batch:
        assert tokenizer.decode(ids) == library.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(
            ids, skip_special_tokens=False
        )
    pieces = load_pieces(path)
    assert tokenizer.vocab_size == len(pieces) == library.get_vocab_size()
    assert pieces.special.nonzero()[0].tolist() == sorted(tokenizer.special_ids)


def test_special_tokens_and_template_come_from_the_configuration(tmp_path: Path, texts: list[str]) -> None:
    path = save(
        tmp_path, byte_level(texts), bos_token={"content": "<|begin|>"}, chat_template="{{ messages }}"
    )
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, {1})
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.encode("a")[0] == 0
    assert 0 not in tokenizer.encode("a", add_special_tokens=False)


def test_a_template_file_overrules_the_configuration(tmp_path: Path, texts: list[str]) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = save(tmp_path, byte_level(texts), chat_template=named)
    assert load_tokenizer(path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(path).chat_template == "from file"


@pytest.mark.parametrize(
    "flags",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}],
)
def test_special_tokens_are_added_as_by_transformers(
    tmp_path: Path, library: Tokenizer, flags: dict[str, bool]
) -> None:
    from transformers import PreTrainedTokenizerFast

    path = save(tmp_path, library, bos_token="<|begin|>", **flags)
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    for text in ("the the", "", "<|end|>x"):
        assert load_tokenizer(path).encode(text) == theirs.encode(text)


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(
    tmp_path: Path, own_cache: Path, texts: list[str]
) -> None:
    path = save(tmp_path, byte_level(texts))
    load_tokenizer(path)
    load_pieces(path)
    entries = own_cache / "tokenizer"
    assert len(list(entries.glob("*/pieces.bin"))) == 1
    save(tmp_path, sentencepiece_like(texts))
    assert load_tokenizer(path).encode("the", add_special_tokens=False) == [
        sentencepiece_like(texts).token_to_id("the")
    ]
    assert len(list(entries.glob("*/pieces.bin"))) == 2


def test_a_missing_or_damaged_file_is_named(tmp_path: Path, texts: list[str]) -> None:
    path = save(tmp_path, byte_level(texts))
    spec = tmp_path / "tokenizer.json"
    whole = spec.read_text()
    spec.write_text(whole[:-100])
    for load in (load_tokenizer, load_pieces):
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            load(path)
    spec.write_text("{}")
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_pieces(path)
    spec.write_text(whole.replace('"BPE"', '"XYZ"'))
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_tokenizer(path)
    spec.unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json$"):
        load_tokenizer(path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelLoadError, match=r"from its tokenizer\.model"):
        load_tokenizer(path)


def test_a_special_token_that_the_vocabulary_lacks_is_named(tmp_path: Path, texts: list[str]) -> None:
    path = save(tmp_path, byte_level(texts), bos_token="<absent>")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json names '<absent>' as bos_token"):
        load_tokenizer(path)


def test_a_decoder_of_another_family_is_refused(tmp_path: Path, texts: list[str]) -> None:
    tokenizer = byte_level(texts)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        load_pieces(save(tmp_path, tokenizer))
