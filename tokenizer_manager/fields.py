"""JSON bodies: decoding, unknown fields, and the plain ones that a struct describes in full."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.body import Body, BodyRoom

T = TypeVar("T", bound=msgspec.Struct)
_AT = re.compile(r" - at `\$\.?(.*)`$")


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of a JSON object; raises RequestError."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return fields


def check_known(fields: Mapping[str, Any], known: Collection[str], prefix: str = "") -> None:
    """For --strict-fields: raises RequestError naming the fields that are not `known`."""
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        names = ", ".join(reprlib.repr(prefix + name) for name in unknown[:8])
        raise RequestError(f"unknown fields (--strict-fields): {names}", param=prefix + unknown[0][:256])


def parse_body(body: bytes | bytearray, kind: type[T], *, strict: bool) -> T:
    """The body as a `kind`, whose field names the JSON's are. null means the default; unknown fields are ignored
    unless `strict`. Raises RequestError naming the field."""
    fields = decode_object(body)
    if strict:
        check_known(fields, kind.__struct_fields__)
    return convert(fields, kind)


def convert(fields: Mapping[str, Any], kind: type[T]) -> T:
    """The fields as a `kind`; null means the default. Raises RequestError naming the field."""
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        raise RequestError(str(error), param=at.group(1) if at else None) from error


async def read_body(request: Request, room: BodyRoom, kind: type[T], *, strict: bool) -> T:
    """`parse_body` of a request, within the bounds on bodies."""
    body = Body(room)
    try:
        return parse_body(await body.read(request), kind, strict=strict)
    finally:
        body.drop()
