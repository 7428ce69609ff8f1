"""The model that an example runs on, by its command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import gapless


@contextmanager
def chosen_model(description: str | None) -> Iterator[None]:
    """Programs in the `with` block run on the model of a server, or on one that is loaded for them."""
    parser = argparse.ArgumentParser(description=description)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--base-url", help="of a running server, such as http://127.0.0.1:30000")
    where.add_argument("--model-path", default="demo", help="what to load here: toy, demo or another model's")
    parser.add_argument(
        "--chat-template", help="chatml, gemma, llama-3 or mistral, for a model that has none"
    )
    parsed = parser.parse_args()
    if parsed.base_url:
        gapless.set_default_backend(
            gapless.RuntimeEndpoint(parsed.base_url, chat_template=parsed.chat_template)
        )
        yield
        return
    has_none = parsed.model_path in ("toy", "demo")
    template = parsed.chat_template or ("gemma" if has_none else "")
    with gapless.Engine(parsed.model_path, chat_template=template) as engine:
        gapless.set_default_backend(engine)
        yield
