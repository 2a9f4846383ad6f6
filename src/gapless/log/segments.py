"""What logs share: events held in memory as segments, and the rules that let a write in.

A **segment** is a run of events' blocks, concatenated, in wire form: it goes to a socket as it
is. Nothing here decodes one. Blocks start with their `id:` line, at the segment's first byte or
right after a blank line, and no block has a blank line inside (W1, W4); so the block of event
48 is where `\\n\\nid: 48.` is found, and whatever ends in a blank line ends with a whole block.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from gapless.errors import ConflictError, StorageError, UsageError
from gapless.log.base import BelowFloorError, Digest, SessionKey, Stored, Write
from gapless.protocol.cursor import LINK_BYTES, Link

__all__ = [
    "Ahead",
    "DamagedError",
    "Segment",
    "Segments",
    "Tails",
    "check",
    "conflict",
    "fits",
    "join",
    "landed",
    "outrun",
]

_ID: Final = rb"id: ([0-9]{1,19})\.([0-9]{1,19})\.([0-9a-f]{%d})\n" % (2 * LINK_BYTES)
_FIRST: Final = re.compile(_ID)
_NEXT: Final = re.compile(rb"\n\n" + _ID)


class DamagedError(StorageError):
    """What is stored is not what was written.

    Args:
        what: what is wrong.
        path: the log's place, if it has one.
    """

    hint = "restore the log from a copy, or see with gapless audit what is lost"

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"the log {path}{' ' if path else ''}is damaged: {what}")
        self.what = what


class Segment(NamedTuple):
    """The blocks of events `first … last`, concatenated, committed at Unix time `at` (0: not known).

    Every method raises `DamagedError` where the data do not hold what they should.
    """

    first: int
    last: int
    data: bytes
    at: float = 0.0

    def start(self, seq: int) -> int:
        """Where the block of event `seq` begins; the length of the data for `last + 1`."""
        if seq > self.last:
            if not self.data.endswith(b"\n\n"):
                raise DamagedError(f"event {self.last} does not end")
            return len(self.data)
        if seq == self.first and self.data.startswith(b"id: %d." % seq):
            return 0
        at = self.data.find(b"\n\nid: %d." % seq)
        if at < 0:
            raise self._lacks(seq)
        return at + 2

    def link(self, seq: int) -> Link:
        """The link of event `seq`, read from its ID (C1)."""
        _, link = next(self.ids(seq - 1))
        return link

    def ids(self, after: int) -> Iterator[tuple[int, Link]]:
        """The stream and the link of each event above `after`, in order; nothing else is looked at."""
        start = self.start(after + 1)
        ids = chain([_FIRST.match(self.data, start)], _NEXT.finditer(self.data, start))
        for seq in range(after + 1, self.last + 1):
            found = next(ids, None)
            if found is None or int(found[1]) != seq:
                raise self._lacks(seq)
            yield int(found[2]), Link(bytes.fromhex(found[3].decode("ascii")))
        if next(ids, None) is not None:
            raise DamagedError(f"an event follows events {self.first} to {self.last} where none should be")

    def _lacks(self, seq: int) -> DamagedError:
        return DamagedError(f"event {seq} is not found among events {self.first} to {self.last}")


def join(segments: Iterable[Segment], after: int, upto: int, limit: int) -> tuple[bytes, int]:
    """The blocks of events `after + 1 … upto`, as many as fit in `limit` bytes, at least one.

    Segments that lie wholly within the range and the limit are taken as they are; one of them
    alone is returned without a copy.

    Args:
        segments: in order and without holes, from the one that holds event `after + 1` on; no
            more of them are taken than are needed.
        upto: above `after`, and at most the last event in `segments`.

    Returns:
        the bytes, and the number of the last event in them.

    Raises:
        DamagedError: the segments do not hold what they should.
    """
    parts: list[bytes] = []
    room = max(limit, 0)
    for segment in segments:
        start = segment.start(after + 1)
        end = segment.start(upto + 1)
        whole = end
        if end - start > room:
            end = segment.data.rfind(b"\n\n", start, start + room) + 2
            if end < start + 2:  # not one block fits
                if parts:
                    break
                end = segment.data.find(b"\n\n", start) + 2
        if not start < end <= whole:
            raise DamagedError(f"event {after + 1} does not end")
        parts.append(segment.data[start:end])
        if end < whole:
            # Cut inside: the number that was reached is read from the block that follows the cut.
            following = _FIRST.match(segment.data, end)
            if following is None or not after + 1 < int(following[1]) <= min(segment.last, upto):
                raise DamagedError(f"what follows event {after + 1} is no event")
            after = int(following[1]) - 1
            break
        after = min(segment.last, upto)
        room = max(room - (end - start), 0)
        if after == upto or not room:
            break
    return b"".join(parts), after


def _last(segment: Segment) -> int:
    return segment.last


class Segments:
    """An ordered run of segments, without holes: some session's newest events, or all of them.

    Attributes (to read only):
        last: the last event's number; where the run begins, while it is empty.
        floor: events at or below are evicted, though a segment that reaches above is kept whole.
        size: bytes held, an allowance for each segment's own overhead included.
    """

    __slots__ = ("_run", "floor", "last", "size")

    _OVERHEAD: Final = 128

    def __init__(self, after: int = 0) -> None:
        """An empty run, whose first event will be `after + 1`."""
        self._run: list[Segment] = []
        self.last = after
        self.floor = 0
        self.size = 0

    @property
    def first(self) -> int:
        """The first event's number; `last + 1` if there is none."""
        return self._run[0].first if self._run else self.last + 1

    def copy(self) -> Segments:
        """An independent run of the same segments; their bytes are shared."""
        twin = Segments(self.last)
        twin._run = self._run.copy()
        twin.floor = self.floor
        twin.size = self.size
        return twin

    def __iter__(self) -> Iterator[Segment]:
        """The segments held, in order."""
        return iter(self._run)

    def append(self, last: int, data: bytes, at: float = 0.0) -> None:
        """Add the blocks of the events that follow, up to `last`, committed at Unix time `at`."""
        self._run.append(Segment(self.last + 1, last, data, at))
        self.last = last
        self.size += len(data) + self._OVERHEAD

    def read(self, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """As `Log.read`, of the events held; `(b"", after)` where event `after + 1` is not held.

        Raises:
            BelowFloorError: `after` is below the floor.
        """
        if after < self.floor:
            raise BelowFloorError(f"events up to {self.floor} are evicted: nothing follows {after}")
        upto = min(upto, self.last)
        if after >= upto or after + 1 < self.first:
            return b"", after
        at = bisect_left(self._run, after + 1, key=_last)
        return join(map(self._run.__getitem__, range(at, len(self._run))), after, upto, limit)

    def link(self, seq: int) -> Link | None:
        """`link(seq)` of a held event above the floor; `None` for any other."""
        if not max(self.first, self.floor + 1) <= seq <= self.last:
            return None
        return self._run[bisect_left(self._run, seq, key=_last)].link(seq)

    def evict_to(self, floor: int) -> None:
        """Evict every event at or below `floor` (L3). A lower floor than before changes nothing."""
        self.floor = max(self.floor, floor)
        self._drop(bisect_right(self._run, floor, key=_last))

    def shrink(self, size: int) -> None:
        """Let go of the oldest segments until at most `size` is held. Not eviction: the floor stays."""
        left, count = self.size, 0
        while left > size:
            left -= len(self._run[count].data) + self._OVERHEAD
            count += 1
        self._drop(count)

    def _drop(self, count: int) -> None:
        self.size -= sum(len(segment.data) + self._OVERHEAD for segment in self._run[:count])
        del self._run[:count]


class Tails:
    """The newest events of many sessions, within a bound: a cache in front of a store.

    It is told of writes that are durable, so it holds nothing else. It need not hold anything:
    whoever finds nothing here asks the store.

    Args:
        limit: the most bytes to hold. Above it the sessions that were neither written nor read
            for longest lose their oldest segments.
    """

    __slots__ = ("_limit", "_tails", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tails: OrderedDict[SessionKey, Segments] = OrderedDict()
        self.size = 0

    def wrote(self, key: SessionKey, write: Write) -> None:
        """Take note of a durable write."""
        tail = self._tails.pop(key, None)
        if tail is not None:
            self.size -= tail.size
        if tail is None or tail.last != write.expect:
            tail = Segments(write.expect)
        if write.segment:
            tail.append(write.last, write.segment)
        if write.floor is not None:
            tail.evict_to(write.floor)
        if tail.size:
            self._tails[key] = tail
            self.size += tail.size
            self._trim()

    def forget(self, key: SessionKey) -> None:
        """Hold nothing of a session: it is removed, or what the store has of it is in doubt."""
        tail = self._tails.pop(key, None)
        if tail is not None:
            self.size -= tail.size

    def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """As `Log.read`; `(b"", after)` where event `after + 1` is not held.

        Raises:
            BelowFloorError: `after` is below the floor.
        """
        tail = self._tails.get(key)
        if tail is None:
            return b"", after
        self._tails.move_to_end(key)
        return tail.read(after, upto, limit)

    def link(self, key: SessionKey, seq: int) -> Link | None:
        """`link(seq)` of a held event; `None` for any other."""
        tail = self._tails.get(key)
        return None if tail is None else tail.link(seq)

    def _trim(self) -> None:
        if self.size <= self._limit:
            return
        # An eighth more than needed, so that a full cache does not trim at every write.
        goal = self._limit - self._limit // 8
        while self.size > goal:
            key, tail = next(iter(self._tails.items()))
            self.size -= tail.size
            tail.shrink(max(goal - self.size, 0))
            self.size += tail.size
            if not tail.size:
                del self._tails[key]


class Ahead:
    """What was read from a store beyond what was asked for, until it is asked for: a cache for long reads.

    Args:
        limit: the most bytes to hold, or else one session. Those that were not read for longest go first.
    """

    __slots__ = ("_limit", "_runs", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: OrderedDict[SessionKey, dict[int, Segments]] = OrderedDict()
        self._size = 0

    def keep(self, key: SessionKey, after: int, run: Segments) -> None:
        """Hold `run` for whoever reads on after event `after`."""
        runs = self._runs.setdefault(key, {})
        self._runs.move_to_end(key)
        self._size += run.size - (runs[after].size if after in runs else 0)
        runs[after] = run
        while self._size > self._limit and len(self._runs) > 1:
            self.forget(next(iter(self._runs)))

    def take(self, key: SessionKey, after: int) -> Segments | None:
        """What is held for whoever reads on after event `after`; it is held no more."""
        runs = self._runs.get(key)
        run = None if runs is None else runs.pop(after, None)
        if run is not None:
            self._size -= run.size
            if not runs:
                del self._runs[key]
        return run

    def evict_to(self, key: SessionKey, floor: int) -> None:
        """Hold nothing for those who are below the floor (L3)."""
        for after in [after for after in self._runs.get(key, ()) if after < floor]:
            self.take(key, after)

    def forget(self, key: SessionKey) -> None:
        """Hold nothing of a session."""
        for run in self._runs.pop(key, {}).values():
            self._size -= run.size


def check(write: Write) -> None:
    """Refuse a write whose parts contradict each other, before any log is touched.

    Raises:
        UsageError: the caller's mistake, in words.
    """
    if (write.last > write.expect) != bool(write.segment) or write.last < write.expect:
        raise UsageError(
            f"{len(write.segment)} bytes of events cannot follow event {write.expect} up to {write.last}"
        )
    if any(entry.number != at for at, entry in enumerate(write.entries, _first(write))):
        raise UsageError("inbox entries of one write are numbered without holes")
    if (write.floor is None) != (write.floor_link is None) or (write.floor or 0) > write.last:
        raise UsageError("a floor comes with its link, and lies at or below the last event")


def fits(stored: Stored, write: Write) -> bool:
    """Whether a write follows what is stored (L8), under a fence that still holds (N1)."""
    return (
        write.expect == stored.committed
        and write.fence >= stored.fence
        and (not write.entries or _first(write) == stored.received + 1)
    )


def landed(stored: Stored, write: Write, digest: Callable[[int], Digest | None]) -> bool:
    """Whether a write that does not fit is there already, its success having gone unreported.

    A link proves its event and all before it (L5), a digest its message (L6). A write that was
    fenced off meanwhile is not recognised: its writer has to learn that it was.

    Args:
        digest: `Log.digest` of the session.
    """
    return (
        write.fence >= stored.fence
        and (write.last, write.link) == (stored.committed, stored.link)
        and all(digest(entry.number) == entry.digest for entry in write.entries)
    )


def conflict(stored: Stored | None, write: Write) -> ConflictError:
    """Why a write that neither fits nor has landed is refused."""
    if stored is None:
        return ConflictError("there is no such session in the log")
    return ConflictError(
        f"the log is at event {stored.committed} and message {stored.received} under fence {stored.fence}; "
        f"the write follows event {write.expect} under fence {write.fence}"
    )


def outrun(stored: Stored | None, fence: int) -> ConflictError:
    """Why a session cannot be acquired from under `fence`."""
    if stored is None:
        return ConflictError("there is no such session in the log")
    return ConflictError(f"the session is under fence {stored.fence} by now, not {fence}: another took it")


def _first(write: Write) -> int:
    return write.entries[0].number if write.entries else 0
