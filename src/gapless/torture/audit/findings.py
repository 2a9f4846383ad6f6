"""What an audit finds: each kind of it by name, with the rule it is about and the range it covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gapless.client.receipts import Line

__all__ = ["MOST", "Finding", "Findings", "Kind"]

MOST: Final = 100
"""Findings that are kept of a session; of the rest the violations are counted."""


class Kind(Enum):
    """What can be found: its name, its rule, its words, what it counts, and whether it is a violation."""

    EVENTS_MISSING = ("events-missing", "L1", "missing from the log")
    EVENTS_REPEATED = ("events-repeated", "L1", "in the log more than once")
    EVENTS_UNREADABLE = ("events-unreadable", "W1", "unreadable in the log")
    EVENTS_ALTERED = ("events-altered", "L5", "not what the link says")
    EVENTS_ABOVE = ("events-above", "L2", "above what the log says is committed")
    HEAD_DIFFERS = ("head-differs", "L5", "not the last link that the log has noted")
    MESSAGES_MISSING = ("messages-missing", "L6", "missing from the inbox", "message")
    MESSAGES_ABOVE = ("messages-above", "L6", "above what the log says is received", "message")
    MESSAGES_UNREADABLE = ("messages-unreadable", "L6", "unreadable in the inbox", "message")
    REQUEST_UNSETTLED = ("request-unsettled", "L7", "never settled", "message")
    REQUEST_RESETTLED = ("request-resettled", "L7", "settles a request that was settled before")
    REQUEST_UNKNOWN = ("request-unknown", "L7", "settles a request that nobody made")
    UPGRADE_DOUBLED = ("upgrade-doubled", "U7", "accepts an upgrade while another is outstanding")
    AFTER_THE_END = ("after-the-end", "W3", "after the end of the session")
    END_MISSING = ("end-missing", "W3", "last of a session that has ended, and no session-superseded")
    END_EARLY = ("end-early", "W3", "session-superseded, and the session has not ended")
    RECORD_UNREADABLE = ("record-unreadable", "§1", "the session's record is unreadable", "")
    NOT_PROCESSED = ("not-processed", "§11.1", "never processed")
    PROCESSED_AGAIN = ("processed-again", "§11.1", "processed more than once")
    OUT_OF_ORDER = ("out-of-order", "§11.1", "processed out of order")
    FOREIGN = ("foreign", "§11.1", "processed, and not this log's")

    EVICTED = ("evicted", "L3", "evicted: contiguous by number, the link is not checkable", "event", False)
    SEEN_AGAIN = ("seen-again", "§11.1", "seen again after a crash, as may be", "event", False)
    BEGINS_LATE = ("begins-late", "§11.1", "where the receipts begin", "event", False)
    SETTLED_UNSEEN = ("settled-unseen", "L7", "settled in what is not there, if at all", "message", False)
    REFORMATTED = ("reformatted", "L6", "not the text that its digest is of", "message", False)
    LINES_UNREADABLE = ("lines-unreadable", "§11.1", "unreadable in the receipts", "line", False)
    NOT_LOGGED = ("not-logged", "§11.1", "of a session that the log does not hold", "event", False)

    def __init__(
        self, label: str, rule: str, words: str, unit: str = "event", violation: bool = True
    ) -> None:
        self.label = label
        self.rule = rule
        self.words = words
        self.unit = unit
        self.violation = violation


@dataclass(slots=True, eq=False)
class Finding:
    """One finding: what, from where to where, and, for receipts, between which turns of the connection."""

    kind: Kind
    first: int
    last: int
    detail: str = ""
    since: Line | None = None
    until: Line | None = None

    @property
    def where(self) -> str:
        """What the finding is about; empty where that is the session as a whole."""
        unit = self.kind.unit
        if not unit or self.first == self.last:
            return unit and f"{unit} {self.first}"
        return f"{unit}s {self.first} to {self.last}"

    @property
    def what(self) -> str:
        """What is found there."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind.words}{detail}{self._between}"

    @property
    def text(self) -> str:
        """The finding in words."""
        return f"{self.where}: {self.what}" if self.where else self.what

    @property
    def _between(self) -> str:
        match self.since, self.until:
            case None, None:
                return ""
            case None, Line() as until:
                return f", before {_name(until)}"
            case Line() as since, None:
                return f", after {_name(since)}"
            case since, until:
                return f", between {_name(since)} and {_name(until)}"


def _name(turn: Line) -> str:
    return f"`{turn.what} at {turn.at.partition('T')[2]}`"


class Findings:
    """What is found of one session; runs of one kind are one finding, and their number is bounded."""

    def __init__(self) -> None:
        self._all: list[Finding] = []
        self._latest: dict[Kind, Finding] = {}
        self.uncounted = 0
        """Violations beyond those that are kept."""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._all)

    def add(
        self, kind: Kind, first: int, last: int | None = None, detail: str = "", since: Line | None = None
    ) -> Finding:
        """Note a finding; one that goes on where the last of its kind ended extends that."""
        last = first if last is None else last
        known = self._latest.get(kind)
        if known is not None and known.last + 1 == first and (known.detail, known.since) == (detail, since):
            known.last = last
            return known
        new = self._latest[kind] = Finding(kind, first, last, detail, since)
        if len(self._all) < MOST:
            self._all.append(new)
        else:
            self.uncounted += kind.violation
        return new

    def replace(self, old: Finding, new: list[Finding]) -> None:
        """Put others in the place of one."""
        if old in self._all:
            at = self._all.index(old)
            self._all[at : at + 1] = new
        if self._latest.get(old.kind) is old:
            del self._latest[old.kind]
