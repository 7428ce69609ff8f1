"""Tool calls of Llama 3: an output of `{"name": ..., "parameters": {...}}`, several with `;` between them.

`<|python_tag|>` may stand before the first, and then also behind text.
"""

from __future__ import annotations

from gapless.tokenizer_manager.openai.tool_marks import MarkedParser
from gapless.tokenizer_manager.openai.tool_parser import SPACE


class Llama3Parser(MarkedParser):
    needs_special_tokens = True
    opener = "<|python_tag|>"
    between = SPACE + ";"
    starts_open = True

    def object_at(self, text: str, at: int) -> int | None:
        """At the start of the output the tag may stand or not."""
        if text.startswith(self.opener, at) or self.opener.startswith(text[at:]):
            return None if text.startswith(self.opener, at) else -1
        return super().object_at(text, at)
