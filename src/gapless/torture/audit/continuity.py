"""Whether what a client processed is a prefix of its session's log (§11.1), receipt by receipt."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gapless.client.receipts import Line, Turn
from gapless.errors import MalformedError
from gapless.protocol.cursor import EventId, Link, parse_event_id
from gapless.torture.audit.findings import MOST, Finding, Findings, Kind

__all__ = ["Continuity", "Held"]


@dataclass(frozen=True, slots=True)
class Held:
    """What a log holds of a session; `link` finds that of an event above the floor, `None` if it is lost."""

    committed: int
    floor: int
    floor_link: Link
    link: Callable[[int], Awaitable[Link | None]]


class Continuity:
    """Follows one session's receipts.

    A client process goes on from its cursor without a hole; where it takes over from one that died,
    that is the cursor which was saved. A finding is placed between two turns of the connection: the
    last one before the event up to which all was well, and the last one before the finding was made
    or, if there is none between the two, the next.

    Args:
        held: what the log has of the session; `None` if it has none.
    """

    def __init__(self, held: Held | None, findings: Findings) -> None:
        self.receipts = 0
        self.processed = 0
        """The highest event that was processed."""
        self._held = held
        self._findings = findings
        self._cursor: int | None = None
        self._turn: Line | None = None
        self._under: Line | None = None
        self._holes: deque[Finding] = deque(maxlen=MOST)
        self._waiting: deque[Finding] = deque(maxlen=MOST)
        """Findings that the next turn comes after."""

    async def take(self, line: Line) -> None:
        """Take the session's next line."""
        match line.what:
            case EventId():
                self.receipts += 1
                await self._take_event(line.what)
            case Turn():
                if line.what in (Turn.OPENED, Turn.CONTINUED):
                    await self._begin(line)
                self._turn = line
                for finding in self._waiting:
                    finding.until = line
                self._waiting.clear()
            case None:
                self._findings.add(Kind.LINES_UNREADABLE, line.number)

    async def _begin(self, line: Line) -> None:
        """A client process begins at its first cursor, or at the one that was saved."""
        try:
            id = parse_event_id(line.detail)
        except MalformedError:
            self._findings.add(Kind.LINES_UNREADABLE, line.number)
            return
        if await self._foreign(id):
            self._find(Kind.FOREIGN, id.seq)
            return
        if self._cursor is None:
            self.processed = id.seq
            if id.seq:
                self._findings.add(Kind.BEGINS_LATE, id.seq + 1)
        elif id.seq > self._cursor:
            self._find(Kind.NOT_PROCESSED, self._cursor + 1, id.seq)
        self._cursor = id.seq

    async def _take_event(self, id: EventId) -> None:
        cursor, seq = self._cursor or 0, id.seq
        if await self._foreign(id):
            self._find(Kind.FOREIGN, seq)
            return
        if seq > cursor + 1:
            self._holes.append(self._find(Kind.NOT_PROCESSED, cursor + 1, seq - 1))
        elif seq <= cursor:
            late = self._fill(seq)
            self._find(Kind.OUT_OF_ORDER if late else Kind.PROCESSED_AGAIN, seq)
            return
        if seq <= self.processed:
            self._findings.add(Kind.SEEN_AGAIN, seq)  # only a new process begins below it (§11.1)
        elif self._held is None:
            self._findings.add(Kind.NOT_LOGGED, seq)
        elif seq < self._held.floor:
            self._findings.add(Kind.EVICTED, seq)
        self._cursor, self.processed, self._under = seq, max(seq, self.processed), self._turn

    async def _foreign(self, id: EventId) -> bool:
        """Whether the log has another event there, or none yet (C3, C5)."""
        held = self._held
        if held is None or id.seq < held.floor:
            return False
        if id.seq > held.committed:
            return True
        link = held.floor_link if id.seq == held.floor else await held.link(id.seq)
        return link is not None and link != id.link

    def _find(self, kind: Kind, first: int, last: int | None = None) -> Finding:
        under, turn = self._under, self._turn
        finding = self._findings.add(kind, first, last, since=under)
        if turn is not None and turn is not under:
            finding.until = turn
        elif finding not in self._waiting:
            self._waiting.append(finding)
        return finding

    def _fill(self, seq: int) -> bool:
        """Whether an event was missed before; it is not missing any more."""
        for hole in self._holes:
            if hole.first <= seq <= hole.last:
                rest = [replace(hole, last=seq - 1), replace(hole, first=seq + 1)]
                rest = [part for part in rest if part.first <= part.last]
                self._findings.replace(hole, rest)
                for kept in (self._holes, self._waiting):
                    if hole in kept:
                        kept.remove(hole)
                        kept.extend(rest)
                return True
        return False
