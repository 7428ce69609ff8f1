"""Server-sent events as a client reads them: the `data` of each event, by the WHATWG's event stream format."""

from __future__ import annotations

MAX_EVENT_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"


class EventParser:
    """For one stream. An event is given out when the empty line that ends it has come; other fields are ignored.

    A line, or the data of an event, of more than `max_event_bytes` raises ValueError; the stream is lost then.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._data: list[bytes] = []  # the data lines of the event that has begun
        self._size = 0  # of them, in bytes
        self._line = bytearray()  # the line that has begun
        self._after_cr = False  # a line feed that comes first belongs to the last line's end
        self._at_start = True  # where a byte order mark may stand

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that these bytes complete. A stream may be cut into pieces anywhere."""
        if data.startswith(b"data: ") and data.endswith(b"\n\n") and not self._data and not self._line:
            payload = data[6:-2]
            if b"\n" not in payload and b"\r" not in payload and len(data) <= self._max:
                self._after_cr = self._at_start = False
                return [payload]
        return self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if not data:
            return []
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        lines = data.splitlines(keepends=True)
        if lines and self._line:
            self._line += lines[0]
            if not lines[0].endswith((b"\n", b"\r")):
                self._check(len(self._line))
                return []
            lines[0] = bytes(self._line)
            self._line.clear()
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._line += lines.pop()
            self._check(len(self._line))
        payloads: list[bytes] = []
        for line in lines:
            self._take(line.rstrip(b"\r\n"), payloads)
        return payloads

    def _take(self, line: bytes, payloads: list[bytes]) -> None:
        self._check(len(line))
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if not line:
            if self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
                self._size = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._size += len(value) + 1
            self._check(self._size - 1)

    def _check(self, size: int) -> None:
        if size > self._max:
            raise ValueError(f"a server-sent event is longer than {self._max} bytes")
