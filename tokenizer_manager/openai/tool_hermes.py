"""Tool calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, each in its own marks."""

from __future__ import annotations

from gapless.tokenizer_manager.openai.tool_marks import MarkedParser


class HermesParser(MarkedParser):
    opener = "<tool_call>"
    closer = "</tool_call>"
