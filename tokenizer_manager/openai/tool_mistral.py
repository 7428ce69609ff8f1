"""Tool calls of Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and since its eleventh tokenizer
`[TOOL_CALLS]name[ARGS]{...}`, each behind its own mark."""

from __future__ import annotations

import re
import uuid

from gapless.tokenizer_manager.openai.tool_marks import MarkedParser
from gapless.tokenizer_manager.openai.tool_parser import SPACE, Call, read_arguments, read_call

_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_NAME_CHARS = 512  # with what stands between it and the arguments


class MistralParser(MarkedParser):
    needs_special_tokens = True
    opener = "[TOOL_CALLS]"
    closer = "]"
    before = SPACE + "["
    between = SPACE + ","
    _name: str | None = None  # that stood before the object

    def object_at(self, text: str, at: int) -> int | None:
        self._name = None
        if text[at] == "{":
            return at
        if (match := _NAMED.match(text, at)) is not None:
            self._name = match[1]
            return match.end()
        may_follow = re.match(r"[\w.-]", text[at]) and "{" not in text[at:]
        return -1 if may_follow and len(text) - at <= _MAX_NAME_CHARS else None

    def read(self, text: str) -> Call | None:
        name, self._name = self._name, None
        if name is None:
            return read_call(text, self.names)
        arguments = read_arguments(text)
        return None if arguments is None or name not in self.names else Call(name, arguments)

    def new_id(self) -> str:
        """Its templates take ids of nine letters and digits alone."""
        return uuid.uuid4().hex[:9]
