"""Text where a cursor is expected: it is one, and reads back as it was, or it is malformed (C1, C2)."""

from __future__ import annotations

from contextlib import suppress

from gapless.errors import MalformedError
from gapless.protocol.cursor import MAX_SEQ, START, parse_cursor, parse_event_id
from gapless.server.intake import message_number

__all__ = ["SEEDS", "target"]

SEEDS = (
    b"0",
    b"47",
    b"47.0.a193f6b6c59d5344",
    b"0.0.0001020304050607",
    b"9223372036854775807.9223372036854775807.ffffffffffffffff",
    b"9223372036854775808.0.a193f6b6c59d5344",
    b" 47.0.a193f6b6c59d5344\n",
    b"047.00.A193F6B6C59D5344",
    b"1.9223372036854775808.a193f6b6c59d5344",
    "4\u0667.0.a193f6b6c59d5344".encode(),
)


def target(data: bytes) -> None:
    """The bytes as a header has them, and as text."""
    for text in (data.decode("latin-1"), data.decode(errors="replace")):
        with suppress(MalformedError):
            cursor = parse_cursor(text)
            assert str(cursor) == text
            assert cursor is START or parse_event_id(text) == cursor
            assert max(cursor.seq, cursor.stream) <= MAX_SEQ
        number = message_number(text)
        assert number is None or (str(number) == text and 0 < number < 2**63)
