"""What keeps requests with the same ids from sharing pages: each of these is a part of its own of the root's key."""

from __future__ import annotations

from typing import NamedTuple


class Namespace(NamedTuple):
    """Requests share pages only where all of these are the same."""

    extra_key: str = ""
    cache_salt: str = ""
    adapter: str = ""
    weights: int = 0  # the version of the weights; flushing counts as a new one
