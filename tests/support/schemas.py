"""Random JSON schemas whose every output is short: nested, with enums, patterns, bounded arrays, and recursive ones."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ["name", "age", "city", "size", "color", "items", "price", "date", "note", "kind", "left", "right"]
PATTERNS = [
    "^[A-Z][a-z]{2,8}$",
    "^[0-9]{4}-[0-9]{2}$",
    "^(red|green|blue)$",
    "^[a-f0-9]{6}$",
    "^[^@]{1,5}@x[.]org$",
]


def random_schema(rng: random.Random) -> Schema:
    """An object at the top; one in eight is recursive, and only there may a model go on for ever."""
    return _recursive(rng) if rng.random() < 0.125 else _object(rng, depth=rng.randint(0, 2))


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    if depth and rng.random() < 0.6:
        if rng.random() < 0.5:
            return _object(rng, depth - 1)
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": _value(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    return rng.choice(
        [
            {"enum": rng.sample(["red", "green", 7, None, True, "a b", "漢字", -1.5], 3)},
            {"const": rng.choice(["fixed", 0, False])},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 16)},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
            {"type": "boolean"},
            {"type": "null"},
            {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 8}]},
        ]
    )


def _recursive(rng: random.Random) -> Schema:
    """A list or a tree: every node may be the last."""
    node = _object(rng, depth=0)
    deeper: Schema = rng.choice(
        [
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        ]
    )
    node["properties"]["next"] = deeper
    node["required"].append("next")
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
