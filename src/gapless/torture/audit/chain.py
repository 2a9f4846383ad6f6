"""An outbox as it is stored, link by link: what is missing, and what is not as it was written (L1, L5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gapless.protocol.cursor import Link, link_after
from gapless.torture.audit.findings import Findings, Kind

__all__ = ["BLOCK", "Chain", "Logged"]

BLOCK: Final = re.compile(
    rb"id: (0|[1-9]\d{0,18})\.(0|[1-9]\d{0,18})\.([0-9a-f]{16})\n(?:event: ([ -~]+)\n)?data: ([^\n]*)\n"
)
"""A block as the one encoder writes it (W1), less the blank line: number, stream, link, type, data."""


@dataclass(frozen=True, slots=True)
class Logged:
    """An event that a log holds."""

    seq: int
    event: str
    data: bytes


class Chain:
    """Follows a session's events from the floor on.

    An event is altered if it does not follow the one before it. Its successors are then measured
    by what its ID says and by what its text makes of it, so that one alteration is one finding.
    Where events are missing, the chain starts anew from the ID of the first one after them.
    """

    def __init__(self, floor: int, link: Link, findings: Findings) -> None:
        self.last = floor
        self.whole = True
        """Whether every event above the floor is there, and as it was written."""
        self._floor = floor
        self._links: tuple[Link, ...] = (link,)
        self._findings = findings

    def feed(self, page: bytes, upto: int) -> Iterator[Logged]:
        """Take whole blocks, which reach up to event `upto` by the log's account; yield what is sound."""
        end: int | None = None
        for block in BLOCK.finditer(page):
            torn = page[end or 0 : block.start()] != (b"" if end is None else b"\n")
            end = block.end()
            event = self._take(block, torn)
            if event is not None:
                yield event
        torn = page[end or 0 :] != b"\n"
        if self.last < upto:
            self._lack(upto, torn)
        elif torn:
            self._findings.add(Kind.EVENTS_ALTERED, self.last)

    def end(self, committed: int, link: Link) -> None:
        """There is no more; `committed` and the link there are what the log has noted."""
        if self.last < committed:
            self._lack(committed, False)
        elif self.last > committed:
            self._findings.add(Kind.EVENTS_ABOVE, committed + 1, self.last)
        elif self._links and link not in self._links:
            self._findings.add(Kind.HEAD_DIFFERS, committed)

    def _take(self, block: re.Match[bytes], torn: bool) -> Logged | None:
        seq, stream, link = int(block[1]), int(block[2]), Link(bytes.fromhex(block[3].decode()))
        type, data = (block[4] or b"message").decode(), block[5]
        if seq <= self._floor:
            return None  # evicted, and not swept yet (L3)
        computed = tuple(link_after(before, stream, type, data) for before in self._links)
        follows = link in computed
        if seq != self.last + 1 and follows:
            seq = self.last + 1  # a link does not cover its number: it is the number that was altered
            self._findings.add(Kind.EVENTS_ALTERED, seq)
        elif seq > self.last + 1:
            self._lack(seq - 1, torn)
            computed = ()
        elif seq <= self.last:
            self._findings.add(Kind.EVENTS_REPEATED, seq)
            return None
        elif torn:
            self._findings.add(Kind.EVENTS_ALTERED, self.last)  # the blank line after it
        self.last = seq
        if computed and not follows:
            self._findings.add(Kind.EVENTS_ALTERED, seq)
            self._links, self.whole = (link, *computed), False
            return None
        self._links = (link,)
        return Logged(seq, type, data)

    def _lack(self, upto: int, torn: bool) -> None:
        self._findings.add(Kind.EVENTS_UNREADABLE if torn else Kind.EVENTS_MISSING, self.last + 1, upto)
        self.last = upto
        self._links, self.whole = (), False
