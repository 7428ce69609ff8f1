"""Chat formats by name, for a server that does not apply its model's template, or a model that has none.

The begin-of-text token is the tokenizer's to add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gapless.frontend.backends.base import BackendError
from gapless.frontend.backends.roles import Turn


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What stands around the content of each role's turns. Without a turn of its own, a system's content is the
    beginning of the user's first turn."""

    turns: Mapping[str, Turn]

    def around(self, before: Sequence[str], role: str) -> Turn:
        """(before, after) the content of a turn of `role` that follows turns of these roles; raises BackendError."""
        if role not in ("system", "user", "assistant"):
            raise BackendError(f"unknown role: {role!r}")
        if "system" in self.turns:
            return self.turns[role]
        opening, closing = self.turns["user"]
        if role == "system":
            if before:
                raise BackendError("a system turn must be the first in this chat format")
            return opening, "\n\n"
        if tuple(before) == ("system",):
            if role != "user":
                raise BackendError("a user turn must follow the system turn in this chat format")
            return "", closing
        return self.turns[role]


def _same(opening: str, closing: str) -> ChatFormat:
    """All roles by their names."""
    roles = ("system", "user", "assistant")
    return ChatFormat({role: (opening.format(role), closing) for role in roles})


FORMATS: Mapping[str, ChatFormat] = {
    "chatml": _same("<|im_start|>{}\n", "<|im_end|>\n"),
    "llama-3": _same("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "gemma": ChatFormat(
        {
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        }
    ),
    "mistral": ChatFormat({"user": ("[INST] ", "[/INST]"), "assistant": ("", "</s>")}),
}

_SIGNS = (  # in a model's path, in lower case
    ("gemma", "gemma"),
    ("llama-3", "llama-3"),
    ("llama3", "llama-3"),
    ("mixtral", "mistral"),
    ("mistral", "mistral"),
    ("qwen", "chatml"),
    ("chatml", "chatml"),
    ("hermes", "chatml"),
)


def chat_format(name: str) -> ChatFormat:
    """Raises ValueError naming those that there are."""
    if name not in FORMATS:
        raise ValueError(f"chat_template is {name!r}: must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of_model(path: str) -> ChatFormat:
    """Guessed from the model's path; raises BackendError where that says nothing."""
    lower = path.lower()
    for sign, name in _SIGNS:
        if sign in lower:
            return FORMATS[name]
    raise BackendError(
        f"no chat format is known for {path!r}: say chat_template=, one of {', '.join(FORMATS)}"
    )
