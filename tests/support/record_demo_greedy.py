"""Records what transformers generates for the demo model: `python tests/support/record_demo_greedy.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gapless.runtime.tokenizer.load import load_tokenizer

FILE = Path(__file__).parent.parent / "scheduler" / "demo_greedy.json"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The three primary colours are red,",
    "To make bread you need flour, water, salt and yeast. First,",
    "日本の首都は",
    "Water boils at 100 degrees Celsius at sea level because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "A radix tree is a data structure in which every node that is the only child is merged with its parent, and so it "
    "stores the common beginnings of many strings once. Caches of language models use such trees because",
]
COUNT = 48


def record(model: Any, prompts: list[str], count: int) -> list[dict[str, Any]]:
    """For each prompt the greedy ids and, for each of them, the gap between the two best logits."""
    encode = load_tokenizer("demo").encode
    entries = []
    for prompt in prompts:
        ids = torch.tensor([encode(prompt)])
        chosen, gaps, cache = [], [], None
        for _ in range(count):
            with torch.inference_mode():
                out = model(ids, past_key_values=cache, use_cache=True)
            best = out.logits[0, -1].float().topk(2)
            cache, ids = out.past_key_values, best.indices[:1].unsqueeze(0)
            chosen.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 6))
        entries.append({"prompt": prompt, "ids": chosen, "gaps": gaps})
    return entries


if __name__ == "__main__":
    from transformers_demo import transformers_demo

    FILE.write_text(
        json.dumps(record(transformers_demo(), PROMPTS, COUNT), ensure_ascii=False, indent=1) + "\n"
    )
