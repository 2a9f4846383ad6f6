"""Events, writes and open logs for the tests of this package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from gapless.log.base import Digest, Grain, SessionKey, Write
from gapless.log.sqlite import SqliteLog
from gapless.protocol.block import encode_event
from gapless.protocol.cursor import EventId, Link

PLENTY = 2**30
GRAIN = Grain(1024, 2**20, 60.0)
DIGEST = Digest(b"digest digest d.")


def key(name: str) -> SessionKey:
    return SessionKey(sha256(name.encode()).digest())


A, B = key("a"), key("b")


def link(seq: int) -> Link:
    return Link(sha256(b"%d" % seq).digest()[:8])


def blocks(first: int, last: int, data: bytes = b"{}") -> bytes:
    return b"".join(
        encode_event(EventId(seq, 0, link(seq)), "message", data) for seq in range(first, last + 1)
    )


def write(first: int, last: int, data: bytes = b"{}", **more: Any) -> Write:
    if "floor" in more:
        more["floor_link"] = link(more["floor"])
    return Write(first - 1, blocks(first, last, data), last, link(last), **more)


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[SqliteLog]:
    log = SqliteLog(path, **options)
    await log.start()
    try:
        yield log
    finally:
        await log.close()
