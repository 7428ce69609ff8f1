"""A tokenizer from a Hugging Face directory: tokenizer.json, with tokenizer_config.json beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.tokenizer.definition import Definition, Facts

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_definition(directory: Path) -> Definition:
    """Raises ModelLoadError naming the file that is missing or damaged.

    Whether a text gets BOS is for tokenizer.json's post-processor to say: as in transformers 5, `add_bos_token` in
    the configuration does not count beside it.
    """
    vocabulary, settings, template = (directory / name for name in FILES)
    if not vocabulary.is_file():
        raise ModelLoadError(f"model directory {directory} has no tokenizer.json{_advice(directory)}")
    spec = _read_json(vocabulary)
    config = _read_json(settings) if settings.is_file() else {}
    bos, eos = (_token(config, role, spec, settings) for role in ("bos_token", "eos_token"))
    spec["truncation"] = spec["padding"] = None  # a prompt is never cut or padded silently
    chat = template.read_text() if template.is_file() else _default_template(config.get("chat_template"))
    special = {
        role: content
        for role in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (content := _content(config.get(role))) is not None
    }
    return Definition(spec, Facts(bos[1] if bos else None, [eos[1]] if eos else [], chat, special))


def _advice(directory: Path) -> str:
    if not (directory / "tokenizer.model").is_file():
        return ""
    return "; transformers writes one from its tokenizer.model: AutoTokenizer.from_pretrained(D).save_pretrained(D)"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return content


def _token(config: dict[str, Any], role: str, spec: dict[str, Any], path: Path) -> tuple[str, int] | None:
    """The (token, id) that plays `role` in the configuration."""
    content = _content(config.get(role))
    if content is None:
        return None
    for token in spec.get("added_tokens") or []:
        if token["content"] == content:
            return content, token["id"]
    vocab = spec["model"]["vocab"]
    if content in vocab:
        return content, vocab[content]
    raise ModelLoadError(f"{path} names {content!r} as {role}, which tokenizer.json does not have")


def _content(token: Any) -> str | None:
    """A configuration writes a token as a string or as {"content": string}."""
    return token.get("content") if isinstance(token, dict) else token


def _default_template(templates: str | list[dict[str, str]] | None) -> str | None:
    """A configuration has one template, or a list of named ones."""
    if isinstance(templates, list):
        return next((entry["template"] for entry in templates if entry["name"] == "default"), None)
    return templates
