"""Bad inputs to a WebSocket: frames that RFC 6455 has something against, and blocks that we have."""

from __future__ import annotations

import struct
import zlib
from random import Random
from typing import Final

from tests.attack.shapes import blocks, json_text, mutated, upgrade
from tests.attack.target import Target
from tests.attack.volley import Family, Frames

__all__ = ["CLOSE", "FRAME_FAMILIES", "PING", "TEXT", "frame"]

CONT: Final = 0
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10


def frame(
    opcode: int,
    data: bytes,
    *,
    final: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: bytes | None = None,
    mask: bytes = b"\0\0\0\0",
) -> bytes:
    """One frame; `length` stands in for its extended length."""
    size = len(data)
    first = (final << 7) | (reserved << 4) | opcode
    if length is not None:
        short, more = {2: 126, 8: 127}[len(length)], length
    elif size < 126:
        short, more = size, b""
    elif size < 65536:
        short, more = 126, struct.pack(">H", size)
    else:
        short, more = 127, struct.pack(">Q", size)
    if masked and mask != b"\0\0\0\0":
        data = bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))
    return bytes([first, (masked << 7) | short]) + more + (mask if masked else b"") + data


_BAD_TEXT: Final = (
    b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\x80", b"data: \xc3", b"\xe2\x80",
    b"\xf8\x88\x80\x80\x80",
)  # fmt: skip
_CODES: Final = (
    0, 1, 999, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1012, 1015, 1016, 2999, 3000, 4999, 65535,
)  # fmt: skip
"""Of close frames; the server returns those that are allowed, so 1011 is left to itself."""
_deflate: Final = zlib.compressobj(wbits=-12)
_BOMB: Final = (_deflate.compress(b"x" * 4_000_000) + _deflate.flush(zlib.Z_SYNC_FLUSH))[:-4]
"""What becomes four megabytes where compression was agreed upon."""


def _broken(random: Random) -> bytes:
    """A frame, or a few, after which a connection cannot go on."""
    match random.randrange(16):
        case 0:
            return frame(TEXT, b"data: {}\n\n", masked=False)
        case 1:
            return frame(TEXT, b"data: {}\n\n", reserved=random.randint(1, 7))
        case 2:
            return frame(random.choice((3, 4, 5, 6, 7, 11, 12, 13, 14, 15)), b"x")
        case 3:
            return frame(random.choice((TEXT, TEXT, CLOSE)), random.choice(_BAD_TEXT))
        case 4:
            return frame(
                TEXT, b"x", length=random.choice((b"\x00\x01", b"\0\0\0\0\0\0\0\x01"))
            )  # not the shortest
        case 5:
            return frame(
                TEXT,
                b"x" * 200,
                length=random.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\0" * 7)),
            )
        case 6:
            return frame(random.choice((CLOSE, PING, PONG)), b"x", final=False)
        case 7:
            return frame(random.choice((CLOSE, PING, PONG)), b"x" * 126)
        case 8:
            return frame(CONT, b"x")
        case 9:
            return frame(TEXT, b"x", final=False) + frame(random.choice((TEXT, BINARY)), b"y")
        case 10:
            return frame(
                CLOSE,
                random.choice(
                    (b"\x03", struct.pack(">H", random.choice(_CODES)) + random.choice((b"", b"x", b"\xff")))
                ),
            )
        case 11:
            return frame(BINARY, random.choice((b"", b"data: {}\n\n", random.randbytes(40))))
        case 12:
            return frame(
                TEXT, random.choice((b"data: {}", b"event: message\ndata: {}\n", b"x", b"id: 1\n"))
            )  # no whole block
        case 13:
            return frame(
                TEXT,
                b'event: cursor-ack\ndata: {"cursor":"%b"}\n\n'
                % random.choice((b"47", b"", b"x.y.z", b"1.0.g")),
            )
        case 14:
            return random.randbytes(random.randint(1, 60))
        case _:
            whole = frame(TEXT, b"event: probe-ack\ndata: {}\n\n" + b"x" * 100)
            return random.choice((mutated(random, whole), whole[: random.randint(1, len(whole) - 1)]))


def _odd(random: Random, number: int, cursor: bytes) -> bytes:
    """A frame, or a few, that a connection survives, whatever they bring."""
    mask = b"\0\0\0\0" if random.random() < 0.7 else random.randbytes(4)
    match random.randrange(10):
        case 0:
            return frame(PING, random.randbytes(random.choice((0, 1, 125))))
        case 1:
            return frame(PONG, random.randbytes(random.choice((0, 1, 125))))
        case 2:
            text = b"event: probe-ack\ndata: {}\n\n"
            parts = [text[n : n + 5] for n in range(0, len(text), 5)]
            out = frame(TEXT, parts[0], final=False)
            for part in parts[1:]:
                out += random.choice((b"", frame(PING, b"between"), frame(PONG, b"")))
                out += frame(CONT, part, final=False)
            return out + frame(CONT, b"")
        case 3:
            return frame(
                TEXT,
                random.choice((b"", b"\n", b"\n\n", b":\n\n", b"\r\r", b"event: x\n\n", b"\xef\xbb\xbf\n\n")),
            )
        case 4:
            text = json_text(random).replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
            text = text.decode(errors="replace").encode()
            return frame(
                TEXT, b"id: %d\ndata: %b\n\n" % (number + random.choice((0, 0, 0, -1, 1, 5)), text), mask=mask
            )
        case 5:
            return frame(TEXT, b'event: cursor-ack\ndata: {"cursor":"%b"}\n\n' % cursor, mask=mask)
        case _:
            text = blocks(random, number, cursor).decode(errors="replace").encode()
            if b"cursor-ack" in text or not text.endswith(b"\n\n"):
                text = b"event: probe-ack\ndata: {\n\n"  # else it ends here, and nothing after it is read
            return frame(TEXT, text, mask=mask)


def _frames(random: Random, target: Target, most: int, sure: float) -> Frames:
    seat = target.seat(random, streams=False)
    stated = seat.cursor() if random.random() < 0.95 else target.cursor(random, seat)
    headers = [(b"Last-Event-ID", stated), (b"Mcp-Client", b"attack")]
    if random.random() < 0.1:
        headers.append((b"Sec-WebSocket-Extensions", b"permessage-deflate"))
    count = random.randint(1, most)
    parts = [_odd(random, seat.number, seat.cursor()) for _ in range(count - 1)]
    if random.random() < sure:
        parts.append(_broken(random))
    else:
        parts.append(_odd(random, seat.number, target.cursor(random, seat)))
    match random.randrange(600):
        case 0:
            parts[-1] = frame(TEXT, b"x" * 200_000)
        case 1 | 2:
            headers.append((b"Sec-WebSocket-Extensions", b"permessage-deflate"))
            parts[-1] = frame(TEXT, _BOMB, reserved=4)
        case _:
            pass
    return Frames(upgrade(seat.path + b"/events", headers), b"".join(parts), count, seat)


FRAME_FAMILIES: Final = (
    Family("frames that break", 60, lambda random, target: _frames(random, target, 6, 0.95)),
    Family("frames that are odd", 60, lambda random, target: _frames(random, target, 240, 0.3)),
)
