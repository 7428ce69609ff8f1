"""Request bodies, with a bound on one and on all that are held at once."""

from __future__ import annotations

from starlette.requests import Request

from gapless.runtime.core.errors import CapacityError, TooLargeError

LONGEST_AT_ONCE = 64
UNCOUNTED_BYTES = 64 << 10  # of each: a few clients with long bodies must not keep short ones out


class BodyRoom:
    """Room for `LONGEST_AT_ONCE` bodies of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.free = LONGEST_AT_ONCE * limit


class Body:
    """One body. It takes its room while it comes, and keeps it until `drop`."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._taken = 0

    async def read(self, request: Request) -> bytearray:
        """The whole of it; raises TooLargeError as soon as it is known to be too long, and CapacityError."""
        limit = self._room.limit
        too_large = TooLargeError(f"the body is larger than {limit} bytes (--max-body-bytes)")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise too_large
            self._take(len(data) - UNCOUNTED_BYTES)
        return data

    def drop(self) -> None:
        self._room.free += self._taken
        self._taken = 0

    def _take(self, size: int) -> None:
        more = max(size - self._taken, 0)
        if more > self._room.free:
            raise CapacityError("too many long requests are being sent at once")
        self._room.free -= more
        self._taken += more
