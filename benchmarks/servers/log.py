"""Gapless's log without a server around it, which cannot cost less than this.

    python log.py FILE

Each line that it reads is answered with a number: `cpu COUNT EVENTS` with the seconds of CPU for each event
of so many commits of so many events, one after another; `wait COUNT` with the median of the seconds that two
commits take, one after the other: a message, then an event.
"""

from __future__ import annotations

import sys
import time
from hashlib import sha256
from statistics import median

import uvloop

from benchmarks.servers.bare import batches, block
from gapless.log.base import Digest, Entry, SessionKey, Write
from gapless.log.sqlite import SqliteLog
from gapless.protocol.cursor import Link

LINK = Link(bytes(8))


class Session:
    """What is committed, and how far that has come."""

    def __init__(self, log: SqliteLog) -> None:
        self.key = SessionKey(sha256(b"bench").digest())
        self._log = log
        self._at = self._number = 0

    async def event(self, segment: bytes, events: int) -> None:
        """Commit events."""
        await self._log.commit(self.key, Write(self._at, segment, self._at + events, LINK))
        self._at += events

    async def message(self, data: bytes) -> None:
        """Commit a message."""
        self._number += 1
        entry = Entry(self._number, Digest(bytes(16)), data)
        await self._log.commit(self.key, Write(self._at, b"", self._at, LINK, (entry,), self._number))


async def main() -> None:
    """Answer one line after another."""
    log = SqliteLog(sys.argv[1])
    await log.start()
    session = Session(log)
    await log.create(session.key, b"", LINK)
    for line in sys.stdin:
        what, count, *more = line.split()
        if what == "cpu":
            events = int(more[0])
            segments = batches(int(count) * events, events)
            begun = time.process_time()
            for segment in segments:
                await session.event(segment, events)
            print((time.process_time() - begun) / len(segments) / events, flush=True)
        else:
            taken: list[float] = []
            for n in range(int(count)):
                begun = time.perf_counter()
                await session.message(block(n))
                await session.event(block(n), 1)
                taken.append(time.perf_counter() - begun)
            print(median(taken), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
