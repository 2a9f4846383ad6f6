"""One direction of a link: what comes in at one end, and when and how it goes out at the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

__all__ = ["CHUNK", "Direction", "End", "Hooks", "Lane", "Trap"]

CHUNK: Final = 64 * 1024
"""Bytes read at a time."""

_IN_FLIGHT: Final = 1024 * 1024
"""Bytes that may wait in a lane; it reads no more until they are fewer."""

_TURNS: Final = 5
"""Turns of the loop between two pieces: in so many, a reader on this loop has read the first."""

_TICK: Final = 0.02
"""Seconds' worth of bytes that a throttled lane writes at a time."""


class Direction(Enum):
    """Which way bytes go."""

    TO_SERVER = "to-server"
    TO_CLIENT = "to-client"


class End(Enum):
    """How a source has ended."""

    FIN = auto()
    RST = auto()


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a lane tells the link.

    Attributes:
        seen: a write: direction, bytes and a note (see `FaultProxy`).
        broken: one end was reset, and the other is to be told.
        ended: one end was told that nothing more comes.
    """

    seen: Callable[[Direction, int, str], None]
    broken: Callable[[], None]
    ended: Callable[[], None]


@dataclass(slots=True)
class Trap:
    """Waits for a pattern. Two that wait for the same, to do the same, are equal.

    Attributes:
        cause: what `strike` was made of, for comparison.
        seen: the end of what has passed since it was set, in which the pattern may have begun.
    """

    pattern: bytes
    before: bool
    cause: object
    strike: Callable[[], None] = field(compare=False)
    seen: bytes = field(default=b"", compare=False)


class Lane:
    """Reads from one end of a connection and writes to the other.

    What was read waits in a queue with the time it came, so that it can be late without slowing down
    what follows. `read` fills the queue and `write` empties it; each returns when it has nothing more
    to do. Whatever is changed counts for all that has not been written yet.

    Attributes:
        swallowing: write nothing, and do as if.
        told: whether the far end knows, or never will, that nothing more comes.
        ended: whether it knows by a FIN.
    """

    opposite: Lane

    def __init__(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hooks: Hooks
    ) -> None:
        self.direction = direction
        self.swallowing = False
        self.told = False
        self.ended = False
        self._reader = reader
        self._writer = writer
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._queue: deque[tuple[float, bytes | End]] = deque()
        self._in_flight = 0
        self._pending = b""
        self._traps: list[Trap] = []
        self._arrived = 0.0
        """When what is being forwarded came."""
        self._free_at = 0.0
        """When a throttled lane may write again."""
        self._held = False
        self._delay = self._window = self._rate = 0.0
        self._size = 0
        self._deaf = False
        """What is read is thrown away."""
        self._closing = False
        """What has been read is written without delay, then a FIN."""
        self._dropped = False
        """Only the FIN is left to write."""
        # `drain` then returns when all is with the kernel, and an abort takes nothing with it.
        writer.transport.set_write_buffer_limits(high=0)

    # What can be done to it --------------------------------------------------------------------------

    def hold(self, on: bool) -> None:
        """Write nothing, and keep it; or go on."""
        self._held = on
        self._changed.set()

    def delay(self, seconds: float) -> None:
        """Write everything so much after it came."""
        self._delay = seconds
        self._changed.set()

    def throttle(self, rate: float) -> None:
        """Write so many bytes a second; with 0, as fast as can be."""
        self._rate, self._free_at = rate, 0.0
        self._changed.set()

    def split(self, size: int) -> None:
        """Write pieces of so many bytes; with 0, what there is."""
        self._size = size

    def coalesce(self, seconds: float) -> None:
        """Write as one what came within so long."""
        self._window = seconds

    def arm(self, trap: Trap) -> None:
        """Set a trap, if its equal is not set."""
        if trap not in self._traps:
            self._traps.append(trap)

    def close(self) -> None:
        """Write a FIN, behind what has been read and is not held. What comes later is thrown away."""
        self._closing = self._deaf = True
        self._changed.set()
        if self.told and not self._writer.is_closing():  # the FIN of a source was swallowed
            with suppress(OSError):
                self._writer.write_eof()

    # Reading -----------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read until the source ends."""
        end = End.FIN
        try:
            while data := await self._reader.read(CHUNK):
                if not self._deaf:
                    self._put(data)
                while self._in_flight >= _IN_FLIGHT and not self._deaf:
                    await self._wait()
        except OSError:
            end = End.RST
        if end is End.RST:
            self.tell()
        elif not self._deaf:
            self._put(end)

    def tell(self) -> None:
        """Tell the far end that the near end is gone, as late as anything else from there."""
        if not self.told:
            self._put(End.RST)
        elif not self.swallowing:
            self._hooks.broken()

    def _put(self, what: bytes | End) -> None:
        if isinstance(what, bytes):
            self._in_flight += len(what)
        self._queue.append((self._loop.time(), what))
        self._changed.set()

    async def _wait(self, seconds: float | None = None) -> None:
        """Until something has changed, or so long."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # Writing -----------------------------------------------------------------------------------------

    async def write(self) -> None:
        """Write until the far end is told."""
        try:
            while not self.told:
                what = await self._next()
                if isinstance(what, bytes):
                    await self._forward(what)
                else:
                    await self._finish(what)
        except OSError:  # the far end is gone, which the near end is told
            self.told = True
            self.opposite.tell()
        self._deaf = True
        self._changed.set()

    async def _forward(self, data: bytes) -> None:
        """Send what has come, or something in its place."""
        await self._send(data)

    def _rest(self) -> bytes:
        """What `_forward` has kept, and must be sent before the end."""
        return b""

    async def _next(self) -> bytes | End:
        """The next chunk or end, once it may pass."""
        while not self._dropped:
            if self._queue:
                self._arrived = self._queue[0][0] + self._window
                await self._passable()
                if self._queue:
                    return self._take()
            elif self._closing:
                break
            else:
                await self._wait()
        return End.FIN

    def _take(self) -> bytes | End:
        """The first of the queue, and of a coalescing lane what came within the window too."""
        what = self._queue.popleft()[1]
        if isinstance(what, End):
            return what
        while self._window and self._queue and self._queue[0][0] <= self._arrived:
            following = self._queue[0][1]
            if isinstance(following, End):
                break
            what += following
            self._queue.popleft()
        self._in_flight -= len(what)
        self._changed.set()
        return what

    async def _passable(self) -> None:
        """Until something may be written."""
        while not self._closing:
            if self._held:
                await self._wait()
                continue
            seconds = max(self._arrived + self._delay, self._free_at) - self._loop.time()
            if seconds <= 0:
                return
            await self._wait(seconds)
        if self._held:
            self._drop()

    async def _send(self, data: bytes) -> None:
        """Write, when, how and as far as may be."""
        self._pending += data
        while self._pending and not self._dropped:
            await self._passable()
            if self._dropped:
                break
            size, sprung = self._look()
            most = self._most()
            if most < size:
                size, sprung = most, []
            if not size and not sprung:
                return  # it may be the beginning of a pattern
            piece, self._pending = self._pending[:size], self._pending[size:]
            for trap in self._traps:
                text = trap.seen + piece
                trap.seen = text[max(0, len(text) - len(trap.pattern) + 1) :]
            self._traps = [trap for trap in self._traps if trap not in sprung]
            await self._write(piece)
            for trap in sprung:
                self._strike(trap.strike, before=trap.before)

    def _look(self) -> tuple[int, list[Trap]]:
        """How many of the pending bytes may pass now, and the traps that spring then."""
        stop, sprung = len(self._pending), list[Trap]()
        for trap in self._traps:
            text = self._pending if trap.before else trap.seen + self._pending
            at = text.find(trap.pattern)
            found = at >= 0
            if not found:
                at = len(text) - _begun(text, trap.pattern) if trap.before else stop
            elif not trap.before:
                at += len(trap.pattern) - len(trap.seen)
            if at < stop:
                stop, sprung = at, []
            if found and at == stop:
                sprung.append(trap)
        return stop, sprung

    def _most(self) -> int:
        """How many bytes may be written at once."""
        most = len(self._pending)
        if self._closing or self.swallowing:
            return most
        if self._size:
            most = min(most, self._size)
        if self._rate:
            most = min(most, max(1, int(self._rate * _TICK)))
        return most

    async def _write(self, piece: bytes) -> None:
        if not piece:
            return
        if self.swallowing:
            self._hooks.seen(self.direction, len(piece), "swallowed")
            return
        self._check()
        self._writer.write(piece)
        await self._writer.drain()
        self._hooks.seen(self.direction, len(piece), "")
        if self._rate:
            self._free_at = max(self._free_at, self._loop.time()) + len(piece) / self._rate
        if self._size and not self._closing:
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    def _strike(self, action: Callable[[], None], *, before: bool = True) -> None:
        """Do what somebody wants done; with `before`, nothing more passes if it closes the lane."""
        was = self._closing
        action()
        self._check()
        if before and self._closing and not was:
            self._drop()

    def _check(self) -> None:
        """Raise, as asyncio's loop does but uvloop does not, if the far end is gone."""
        if self._writer.is_closing():
            raise ConnectionResetError("the far end is gone")

    def _drop(self) -> None:
        """Throw away what has not been written, and go on to the FIN."""
        self._dropped = True
        self._pending = b""
        self._queue.clear()

    async def _finish(self, end: End) -> None:
        """Tell the far end."""
        if end is End.RST and not self._closing:
            self.told = True
            if not self.swallowing:
                self._hooks.broken()
            return
        await self._send(self._rest())
        # What seemed to begin a pattern did not.
        piece, self._pending = (b"" if self._dropped else self._pending), b""
        await self._write(piece)
        self.told = True
        if self._closing or not self.swallowing:
            self._check()
            self._writer.write_eof()
            self._hooks.seen(self.direction, 0, "fin")
            self.ended = True
            self._hooks.ended()


def _begun(text: bytes, pattern: bytes) -> int:
    """How many bytes at the end of `text` may begin `pattern`."""
    most = min(len(text), len(pattern) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(pattern[:size])), 0)
