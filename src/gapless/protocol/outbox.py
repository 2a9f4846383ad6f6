"""The outbox of one session: numbering, links, what is durable, what may be evicted (L1–L4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gapless.protocol.block import encode_events
from gapless.protocol.cursor import Link, links_after
from gapless.protocol.settings import Limits

__all__ = ["Grain", "Outbox", "Pin", "Run", "Segment"]

_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class Grain:
    """What is evicted together, at most: a 64th part of each limit, so that nothing is kept per event.

    One event always is, and so is what one write wrote.
    """

    events: int
    bytes: int
    seconds: float

    @classmethod
    def of(cls, limits: Limits) -> Grain:
        """That of some limits."""
        seconds = limits.retain_seconds / _STEPS
        return cls(limits.retain_events // _STEPS, limits.retain_bytes // _STEPS, seconds)


@dataclass(frozen=True, slots=True)
class Segment:
    """Events on their way to the log: blocks in wire form, and the position they reach."""

    data: bytes
    last: int
    link: Link


@dataclass(frozen=True, slots=True)
class Pin:
    """Events in `(after, upto]` are kept until acknowledged or until `deadline` (L4)."""

    after: int
    upto: int
    deadline: float


@dataclass(slots=True)
class Run:
    """A run of events that is evicted together.

    Attributes:
        last: its last event; `link` is the link there.
        events, size: how many events it has, and how many bytes their blocks have.
        at: when it began, in seconds: of Unix time in a log, of the machine's clock in a machine.
        streams: the last event of each stream that has one in it, and the link there.
    """

    last: int
    link: Link
    events: int
    size: int
    at: float
    streams: dict[int, tuple[int, Link]]


class Outbox:
    """Numbers and links events, and knows what of them is durable and what is retained.

    `head` is the last event numbered, `committed` the last durable one: between them lies what
    the log has not confirmed yet, which nobody is told of (L2). `floor` is the highest evicted
    event; its link is kept (L3).
    """

    __slots__ = (
        "_buffer",
        "_bytes",
        "_grain",
        "_marks",
        "_moved",
        "acks",
        "committed",
        "evicted",
        "evicted_unacked",
        "floor",
        "floor_link",
        "head",
        "link",
        "pin",
    )

    def __init__(self, link: Link, grain: Grain) -> None:
        self.head = 0
        self.link = link
        self.committed = 0
        self.floor = 0
        self.floor_link = link
        self.acks: dict[int, int] = {}
        self.pin: Pin | None = None
        self.evicted_unacked = 0
        self.evicted: dict[int, tuple[int, Link]] = {}
        """The last evicted event of each stream, and its link (M4)."""
        self._grain = grain
        self._buffer = bytearray()
        self._marks: list[Run] = []
        self._bytes = 0
        self._moved = False

    def resume(
        self,
        committed: int,
        link: Link,
        floor: int,
        floor_link: Link,
        acks: dict[int, int],
        runs: Iterable[Run],
    ) -> None:
        """Go on where a log ends, which retains these runs."""
        self.head = self.committed = committed
        self.link, self.floor, self.floor_link, self.acks = link, floor, floor_link, acks
        self._marks.extend(runs)
        self._bytes = sum(run.size for run in self._marks)

    def append(self, stream: int, event: str, run: Sequence[bytes], now: float) -> int:
        """Number, link and encode a run of events of one type and stream; the last one's number (L1, L5)."""
        links = links_after(self.link, stream, event, run)
        blocks = encode_events(self.head + 1, stream, event, links, run)
        encoded = b"".join(blocks)
        seq, at, left = self.head, 0, len(encoded)
        while at < len(blocks):
            mark = self._mark(now)
            count = 1  # as many as there is room for, where that is certain: nearly always all
            if mark.size + left < self._grain.bytes:
                count = max(1, min(len(blocks) - at, self._grain.events - mark.events))
            size = sum(map(len, blocks[at : at + count]))
            at, left = at + count, left - size
            mark.last, mark.link = seq + at, links[at - 1]
            mark.events += count
            mark.size += size
            mark.streams[stream] = (mark.last, mark.link)
        self._buffer += encoded
        self._bytes += len(encoded)
        self.head, self.link = seq + at, links[-1]
        return self.head

    def _mark(self, now: float) -> Run:
        """The run that the next event is a part of: a new one, where the last has its fill or is too old."""
        mark, grain = self._marks[-1] if self._marks else None, self._grain
        if (
            mark is None
            or mark.events >= grain.events
            or mark.size >= grain.bytes
            or now - mark.at >= grain.seconds
        ):
            mark = Run(self.head, self.link, 0, 0, now, {})
            self._marks.append(mark)
        return mark

    @property
    def pending(self) -> int:
        """Bytes numbered but not yet handed to the log."""
        return len(self._buffer)

    def take(self) -> Segment:
        """What has gathered since the last take, for the log."""
        segment = Segment(bytes(self._buffer), self.head, self.link)
        self._buffer.clear()
        return segment

    def confirm(self, last: int) -> None:
        """The log holds everything up to `last`."""
        self.committed = last

    def ack(self, stream: int, seq: int) -> bool:
        """Note that the client has processed `stream` up to `seq`; whether that was progress (C4, M4)."""
        if self.pin is not None and seq >= self.pin.upto:
            self.pin = None  # also where another connection has stated as much before
        if seq <= self.acks.get(stream, 0):
            return False
        self.acks[stream] = seq
        return True

    def pin_gap(self, after: int, upto: int, deadline: float) -> None:
        """Keep `(after, upto]` until its ack or the deadline (L4); where nothing is in it, nothing."""
        self.pin = Pin(after, upto, deadline) if after < upto else None

    def evict(self, limits: Limits, now: float) -> int:
        """Evict what the limits allow, acked events first; return the new floor (L4).

        Acked events go once half of a limit is used, others only at the limit itself or past
        their age. What is not committed stays. A pin yields to nothing but the byte limit.
        """
        if self.pin is not None and now >= self.pin.deadline:
            self.pin = None
        while self._marks and self._marks[0].last <= self.committed:
            mark = self._marks[0]
            events = self.head - self.floor
            over_bytes = self._bytes > limits.retain_bytes
            over = events > limits.retain_events or now - mark.at > limits.retain_seconds
            acked = self._acked(mark)
            used = events > limits.retain_events // 2 or self._bytes > limits.retain_bytes // 2
            pin = self.pin
            pinned = pin is not None and mark.last > pin.after and self.floor < pin.upto
            if not (over_bytes or (not pinned and (over or (acked and used)))):
                break
            self._marks.pop(0)
            self._bytes -= mark.size
            self.floor = mark.last
            self.floor_link = mark.link
            self._moved = True
            self.evicted.update(mark.streams)
            if not acked:
                self.evicted_unacked += mark.events
        return self.floor

    @property
    def floor_moved(self) -> bool:
        """Whether the log has yet to be told of the floor."""
        return self._moved

    def take_floor(self) -> tuple[int, Link] | None:
        """The floor and its link, if it moved since the last take."""
        if not self._moved:
            return None
        self._moved = False
        return self.floor, self.floor_link

    def _acked(self, mark: Run) -> bool:
        """Whether every event of a mark is acked, each by its own stream's cursor (M4)."""
        return all(self.acks.get(stream, 0) >= last for stream, (last, _) in mark.streams.items())

    def copy(self) -> Outbox:
        """An independent copy."""
        other = Outbox(self.link, self._grain)
        other.head, other.committed = self.head, self.committed
        other.floor, other.floor_link = self.floor, self.floor_link
        other.acks, other.pin = dict(self.acks), self.pin
        other.evicted_unacked = self.evicted_unacked
        other.evicted = dict(self.evicted)
        other._buffer = bytearray(self._buffer)
        other._marks = [Run(m.last, m.link, m.events, m.size, m.at, dict(m.streams)) for m in self._marks]
        other._bytes, other._moved = self._bytes, self._moved
        return other
