"""How vocabularies write bytes as text: byte-level BPE's alphabet, and SentencePiece's spaces and byte tokens."""

from __future__ import annotations

import re

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: a printable Latin-1 byte is itself, the others are U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level_piece(token: str) -> bytes:
    """A token with a character from outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_piece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace(SPACE, " ").encode()
