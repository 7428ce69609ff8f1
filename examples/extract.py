"""Data from text: `json_schema` keeps the output to the form, so that it can be read without checks."""

from __future__ import annotations

import json
from typing import Any

from model import chosen_model

import gapless
from gapless import ProgramState, gen

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "kind": {"enum": ["bridge", "tower", "church"]},
    },
    "required": ["name", "year", "kind"],
    "additionalProperties": False,
}
EXAMPLE = """\
Text: The Eiffel Tower in Paris was completed in 1889.
JSON: {"name": "Eiffel Tower", "year": 1889, "kind": "tower"}
"""
TEXTS = (
    "The Golden Gate Bridge in San Francisco was opened in 1937.",
    "Notre-Dame de Paris was completed in 1345.",
)


@gapless.function
def extract(s: ProgramState, text: str) -> Any:
    s += EXAMPLE + f"Text: {text}\nJSON: "
    s += gen("record", max_tokens=160, json_schema=SCHEMA)
    return json.loads(s["record"])


def main() -> None:
    states = extract.run_batch([{"text": text} for text in TEXTS], temperature=0)
    for state in states:
        print(state.ret_value)


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
