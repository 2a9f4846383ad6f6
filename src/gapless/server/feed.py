"""THE loop: a position over a log, to a writer. Nothing else delivers (§1).

Live or replayed, SSE or WebSocket, one stream or all: ask the machine what may be written, read
that from the log, write it, move the position, wait for more. A slow reader delays only itself,
and costs a number, not a queue.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from gapless.log.base import BelowFloorError
from gapless.protocol.delivery import Deliver, Delivery, Finish, Wait
from gapless.server.attached import Wake
from gapless.server.live import Live

__all__ = ["CHUNK", "Writer", "feed"]

CHUNK: Final = 64 * 1024
"""Bytes of events that one write carries at most, one event above that apart."""

Writer = Callable[[bytes, bytes], Awaitable[None]]
"""Writes control blocks and event blocks, in that order; returns when the socket takes more."""


async def feed(live: Live, delivery: Delivery, wake: Wake, write: Writer) -> Finish:
    """Deliver to one connection until it is finished; how it is to be closed is returned.

    Raises:
        StorageError: the log could not be read.
    """
    machine, loop = live.machine, asyncio.get_running_loop()
    while True:
        wake.clear()
        match machine.poll(delivery, live.clock()):
            case Deliver(control, after, upto):
                data, last = b"", after
                if after < upto:
                    with suppress(BelowFloorError):  # evicted meanwhile: the next look says what to do
                        data, last = await live.log.read(live.key, after, upto, CHUNK)
                    data = _filtered(data, delivery)
                if delivery.close is not None:
                    continue  # fenced while the log was read: what it would write is void (B8)
                if control or data:
                    await write(control, data)
                machine.advance(delivery, last, live.clock())
            case Finish() as finish:
                if finish.control:
                    await write(finish.control, b"")
                return finish
            case Wait(until):
                due = loop.call_at(until, wake.set)
                try:
                    await wake.wait()
                finally:
                    due.cancel()


def _others(data: bytes, stream: int) -> bool:
    """Whether there is a block of any other stream."""
    own = b"%d" % stream
    if not data.startswith(own + b".", data.index(b".") + 1):
        return True
    if b"\n\nid: " not in data:
        return False  # a single block: no pattern need be made
    return re.search(rb"\n\nid: [0-9]+\.(?!%b\.)" % own, data) is not None


def _filtered(data: bytes, delivery: Delivery) -> bytes:
    """The blocks of the delivery's own stream, less what is not to be repeated (M2, M3)."""
    if delivery.stream is None or not data:
        return data
    if not delivery.skip and not _others(data, delivery.stream):
        return data  # as nearly always: nobody else had a part in it
    kept: list[bytes] = []
    for block in data.split(b"\n\n"):
        if not block:
            continue
        # The ID comes first in every block: `id: <seq>.<stream>.<link>`.
        seq, stream, _ = block[4 : block.index(b"\n")].split(b".")
        if int(stream) == delivery.stream and int(seq) not in delivery.skip:
            kept.append(block)
    return b"\n\n".join(kept) + b"\n\n" if kept else b""
