"""The naive server's log and its delivery: a list of events, and one loop for every connection."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Final

from gapless.protocol import refusal
from gapless.protocol.block import COMMENT, encode_block, encode_event
from gapless.protocol.cursor import EventId, Link, link_after
from gapless.protocol.refusal import Reason
from tests.torture.naive_switches import NaiveSwitches

__all__ = ["MOMENT", "NaiveLog", "Reader", "Write"]

MOMENT: Final = 0.02
"""Seconds between two steps that should have been one."""

Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Event:
    id: EventId
    block: bytes


@dataclass(slots=True, eq=False)
class Reader:
    """A connection: a position in the log, and what bounds it.

    Attributes:
        opening: the blocks to begin with.
        stop: the last event to send; then the stream ends (U10, B2).
        gate: `C`, until it is acknowledged, by `deadline` (U4).
        resumed: whether it is an event stream whose client stated a cursor.
        idle: sends no event, ever: something is wrong with it.
        control: blocks to send before anything else.
        close: the code to end with, at once.
        heard: set whenever something arrives, and when it is gone.
    """

    position: int
    opening: bytes
    stream: int = 0
    socket: bool = False
    stop: int | None = None
    gate: int | None = None
    deadline: float = inf
    resumed: bool = False
    idle: bool = False
    control: list[bytes] = field(default_factory=list[bytes])
    close: int | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class NaiveLog:
    """One session's events, all of stream 0 in the session view, and who reads them."""

    def __init__(self, switches: NaiveSwitches) -> None:
        self.over: Reason | None = None
        self.done: set[int] = set()
        """Streams to which nothing is added any more (M2)."""
        self.readers: set[Reader] = set()
        self.evicted: dict[int, int] = {}
        """Each stream's last event that is gone."""
        self.acked: dict[int, int] = {}
        self._switches = switches
        self._links = [Link(secrets.token_bytes(8))]
        self._events: list[_Event] = []
        self._pin = (0, 0, 0.0)
        self._changed = asyncio.Event()

    @property
    def committed(self) -> int:
        """The number of the last event."""
        return len(self._links) - 1

    @property
    def floor(self) -> int:
        """The number of the last event that is gone."""
        return self.committed - len(self._events)

    def id(self, seq: int, stream: int = 0) -> EventId:
        """A position of the log as an event ID of `stream`."""
        return EventId(seq, stream, self._links[min(seq, self.committed)])

    def owns(self, cursor: EventId) -> bool:
        """Whether the event is of this log (C3)."""
        return cursor.seq <= self.committed and self._links[cursor.seq] == cursor.link

    def append(self, stream: int, event: str, data: bytes) -> int:
        """Number, link and store an event; evict what is too many, but for a pinned gap (L4)."""
        self._links.append(link_after(self._links[-1], stream, event, data))
        id = self.id(self.committed, stream)
        self._events.append(_Event(id, encode_event(id, event, data)))
        after, upto, until = self._pin
        pinned = self.now() < until and self.acked.get(0, 0) < upto
        keep = id.seq - self._switches.retain_events
        while self.floor < (min(keep, max(after, self.acked.get(0, 0))) if pinned else keep):
            gone = self._events.pop(0).id
            self.evicted[gone.stream] = gone.seq
        self.wake()
        return id.seq

    def pin(self, cursor: EventId) -> None:
        """Keep the gap of an upgrade until it is acknowledged, or the window is over (L4)."""
        self._pin = (cursor.seq, self.committed, self.now() + self._switches.upgrade_window)

    def after(self, position: int, upto: int, stream: int) -> list[_Event]:
        """A stream's events above `position`, up to `upto`."""
        kept = self._events[max(0, position - self.floor) : max(0, upto - self.floor)]
        return [event for event in kept if event.id.stream == stream]

    def finish(self, stream: int) -> None:
        """Nothing is added to a stream any more; stream 0 has no end."""
        if stream > 0:
            self.done.add(stream)
            self.wake()

    def wake(self) -> None:
        """Something has changed: every connection looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Seconds of one clock."""
        return asyncio.get_running_loop().time()

    # Delivery -------------------------------------------------------------------------------------

    async def deliver(self, reader: Reader, write: Write) -> int:
        """Write what follows the position, advance, wait for more; the code to close with."""
        if reader.opening:
            await write(reader.opening)
        if reader.resumed:
            await self._resume_badly(reader, write)
        silent = self.now() + self._switches.keepalive
        while True:
            changed, event = self._changed, self._next(reader)
            if reader.control:
                data, reader.control, event = b"".join(reader.control), [], None
            elif reader.close is not None:
                return reader.close
            elif self.now() >= reader.deadline:
                return refusal.CLOSE_ACK_WINDOW
            elif reader.position < self.evicted.get(reader.stream, 0):
                return refusal.CLOSE_EVICTED  # L3
            elif event is not None:
                data = event.block
            elif self._complete(reader):
                return refusal.CLOSE_OVER if reader.socket else refusal.CLOSE_NORMAL
            elif self.now() >= silent:
                data = encode_block("keepalive", b"{}") if reader.socket else COMMENT  # C8
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(silent, reader.deadline)):
                        await changed.wait()
                continue
            await write(data)
            silent = self.now() + self._switches.keepalive
            if event is not None:
                reader.position = event.id.seq

    def _next(self, reader: Reader) -> _Event | None:
        bounds = [bound for bound in (reader.stop, reader.gate) if bound is not None]
        upto = min([self.committed, *bounds])
        while reader.position < upto and not reader.idle:
            event = self._events[max(0, reader.position - self.floor)]
            if event.id.stream == reader.stream:
                return event if event.id.seq <= upto else None
            reader.position = event.id.seq
        return None

    def _complete(self, reader: Reader) -> bool:
        """Whether what was written is all that there will be."""
        if reader.idle:
            return False
        return reader.stop is not None or self.over is not None or reader.stream in self.done

    async def _resume_badly(self, reader: Reader, write: Write) -> None:
        """What is wrong with a resume, if anything is."""
        switches, stream = self._switches, reader.stream
        if switches.repeats:
            before = self.after(0, reader.position, stream)
            reader.position = before[-1].id.seq - 1 if before else reader.position
        if switches.replays_then_registers or switches.reorders:
            past = self.after(reader.position, self.committed, stream)
            reader.position = self.committed
            await asyncio.sleep(MOMENT)
            present = self.after(reader.position, self.committed, stream)
            reader.position = self.committed
            for event in present + past if switches.reorders else past:
                await write(event.block)
        if switches.ends_early:
            self.finish(stream)
