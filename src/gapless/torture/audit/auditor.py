"""An audit: does a log hold together, and did a client process what is in it, whole and in order?

It trusts nobody's word but the log's own links. It judges the log of a server, and the receipts of
a client, after the fact; neither need be running.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

import msgspec

from gapless.client.receipts import Line
from gapless.errors import StorageError
from gapless.log.base import Entry, SessionKey, Stored
from gapless.protocol.cursor import MAX_SEQ, Link
from gapless.protocol.record import Record, read_record
from gapless.protocol.session import View
from gapless.torture.audit.chain import BLOCK, Chain, Logged
from gapless.torture.audit.continuity import Continuity, Held
from gapless.torture.audit.findings import Finding, Findings, Kind
from gapless.torture.audit.settling import Requests, Settled

__all__ = ["Report", "Source", "audit", "audit_session"]

_PAGE: Final = 256 * 1024
"""Bytes of events to ask for at once."""
_ENTRIES: Final = 16
"""Messages to ask for at once; each may be as large as a message can be."""


class Source(Protocol):
    """What is audited: a `Log` that nobody writes to meanwhile, or a snapshot of one."""

    async def sessions(self) -> tuple[Stored, ...]:
        """All sessions."""
        ...

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """Whole blocks of what follows event `after`, and the last event in them by the log's account."""
        ...

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        """Messages of the inbox above `after`."""
        ...


@dataclass(slots=True)
class Report:
    """What an audit has to say of one session. `session` is its hash, or as much of it as is known."""

    session: str
    logged: bool
    committed: int = 0
    floor: int = 0
    received: int = 0
    view: str | None = None
    state: str | None = None
    ended: str | None = None
    requests: Settled = field(default_factory=Settled)
    receipts: int | None = None
    """How many receipts there are; `None` if there is no word of the session in any."""
    processed: int | None = None
    findings: Findings = field(default_factory=Findings)

    @property
    def violations(self) -> list[Finding]:
        """What must not be."""
        return [finding for finding in self.findings if finding.kind.violation]

    @property
    def notes(self) -> list[Finding]:
        """What may be, and is worth knowing."""
        return [finding for finding in self.findings if not finding.kind.violation]

    @property
    def count(self) -> int:
        """How many violations there are, those included that are not kept."""
        return len(self.violations) + self.findings.uncounted

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "session": self.session,
            "logged": self.logged,
            "view": self.view,
            "state": self.state,
            "ended": self.ended,
            "committed": self.committed,
            "floor": self.floor,
            "received": self.received,
            "requests": asdict(self.requests),
            "receipts": self.receipts,
            "processed": self.processed,
            "count": self.count,
            "violations": [_as_json(finding) for finding in self.violations],
            "notes": [_as_json(finding) for finding in self.notes],
        }


def _as_json(finding: Finding) -> dict[str, Any]:
    kind = finding.kind
    return {
        "kind": kind.label,
        "rule": kind.rule,
        "of": kind.unit,
        "first": finding.first,
        "last": finding.last,
        "detail": finding.detail or None,
        "since": _turn_as_json(finding.since),
        "until": _turn_as_json(finding.until),
        "text": finding.text,
    }


def _turn_as_json(turn: Line | None) -> dict[str, Any] | None:
    return None if turn is None else {"turn": str(turn.what), "at": turn.at, "line": turn.number}


async def audit(source: Source, receipts: Iterable[Line] = (), session: str = "") -> list[Report]:
    """Audit the sessions of a log, and a client's receipts against it.

    Memory: a page of events at a time, and a few words for each request and each session.

    Args:
        receipts: the lines of a client's file, in order; read after the log has been opened.
        session: the beginning of the hash of those to look at.

    Raises:
        LogError: the log cannot be read. UsageError: the receipts are none.
    """
    reports: dict[str, Report] = {}
    held: dict[str, Held] = {}
    for stored in await source.sessions():
        name = stored.key.hex()
        if name.startswith(session):
            reports[name[:16]] = await audit_session(source, stored)
            links = _Links(source, stored.key)
            held[name[:16]] = Held(stored.committed, stored.floor, stored.floor_link, links.find)
    followed: dict[str, Continuity] = {}
    last = ""
    for line in receipts:
        name = last = line.session or last or "?"  # what cannot be read is laid to the session before it
        if not name.startswith(session[:16]):
            continue
        report = reports.setdefault(name, Report(name, logged=False))
        if name not in followed:
            followed[name] = Continuity(held.get(name), report.findings)
        await followed[name].take(line)
        report.receipts, report.processed = followed[name].receipts, followed[name].processed
    return list(reports.values())


async def audit_session(source: Source, stored: Stored, *, outbox: bool = True) -> Report:
    """Audit what a log has of one session: outbox, inbox, record.

    Args:
        outbox: whether to read the events; without them nothing is concluded about answers either.

    Raises:
        LogError: the log cannot be read.
    """
    report = Report(stored.key.hex(), True, stored.committed, stored.floor, stored.received)
    findings = report.findings
    record = _record(stored, report)
    open = {} if record is None else {request.id: request.number for request in record.open}
    requests = Requests(open, findings)
    chain = Chain(stored.floor, stored.floor_link, findings)
    seam = None if record is None else _Seam(record, findings)
    if outbox:
        await _follow(source, stored, chain, seam, requests)
    number = 0
    while entries := await source.entries(stored.key, number, _ENTRIES):
        for entry in entries:
            requests.sent(entry.number, entry.digest, entry.data)
        number = entries[-1].number
    whole = outbox and chain.whole
    ended, known = report.ended is not None, whole and record is not None and stored.floor == 0
    report.requests = requests.end(stored.received, ended=ended, whole=known)
    if seam is not None and whole and stored.committed > stored.floor:
        seam.end(stored.committed)
    return report


def _record(stored: Stored, report: Report) -> Record | None:
    """A session's record, which goes into the report; `None` if it is unreadable."""
    try:
        record = read_record(stored.record)
    except StorageError:
        report.findings.add(Kind.RECORD_UNREADABLE, 0)
        return None
    report.view, report.state = record.view.value, record.state.value
    report.ended = None if record.reason is None else record.reason.value
    return record


async def _follow(
    source: Source, stored: Stored, chain: Chain, seam: _Seam | None, requests: Requests
) -> None:
    """Read the events of a session."""
    after = stored.floor
    while True:
        page, upto = await source.read(stored.key, after, MAX_SEQ, _PAGE)
        if upto <= after:
            break
        for event in chain.feed(page, min(upto, stored.committed)):
            if seam is not None:
                seam.take(event)
            if event.event == "message":
                requests.answered(event.seq, event.data)
        after = upto
    chain.end(stored.committed, stored.link)


class _Acceptance(msgspec.Struct):
    negotiation: str = ""
    ticket: str | None = None


class _Seam:
    """The protocol's own events: acceptances one at a time (U7), and an end that is the end (W3)."""

    def __init__(self, record: Record, findings: Findings) -> None:
        self._record = record
        self._findings = findings
        self._bound = 0
        self._outstanding: int | None = None
        self._over: int | None = None

    def take(self, event: Logged) -> None:
        """Take the next event of the log."""
        if self._over is not None:
            self._findings.add(Kind.AFTER_THE_END, event.seq, detail=f"which is event {self._over}")
        elif event.event == "session-superseded":
            self._over = event.seq
        elif event.event == "upgrade-accepted":
            pending = self._pending(event.data)
            self._bound += not pending
            if self._outstanding is not None or self._bound > self._record.generation:
                self._findings.add(Kind.UPGRADE_DOUBLED, event.seq)
            self._outstanding = event.seq if pending else None

    def _pending(self, data: bytes) -> bool:
        """Whether no handshake has concluded it: it has a ticket, and its nonce is not among the spent."""
        try:
            body = msgspec.json.decode(data, type=_Acceptance)
        except msgspec.DecodeError:
            return False  # altered, and the chain says so
        return body.ticket is not None and body.negotiation not in self._record.concluded

    def end(self, committed: int) -> None:
        """There is no more."""
        ended = self._record.reason is not None and self._record.view is View.SESSION
        if ended and self._over is None:
            self._findings.add(Kind.END_MISSING, committed)
        elif self._over is not None and not ended:
            self._findings.add(Kind.END_EARLY, self._over)


class _Links:
    """The links of one session's events, page by page: receipts ask for them in order, for the most part."""

    def __init__(self, source: Source, key: SessionKey) -> None:
        self._source = source
        self._key = key
        self._page: dict[int, Link] = {}

    async def find(self, seq: int) -> Link | None:
        """The link of an event above the floor; `None` if the log has lost it."""
        if seq not in self._page:
            page, _ = await self._source.read(self._key, seq - 1, MAX_SEQ, _PAGE)
            self._page = {
                int(block[1]): Link(bytes.fromhex(block[3].decode())) for block in BLOCK.finditer(page)
            }
        return self._page.get(seq)
