"""What is true of every session, whatever its servers remember: what was acknowledged, and to whom.

A log that reports to the ledger reports what a commit promised, the moment it has promised it. From
then on no restart may lack it, no server may write under an older fence, and no client may be told more.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from gapless.errors import MalformedError
from gapless.log.base import BelowFloorError, Entry, OwnerId, SessionKey, Stored, Write
from gapless.log.sqlite import SqliteLog
from gapless.protocol.block import BlockDecoder
from gapless.protocol.cursor import EventId, Link, parse_event_id
from gapless.protocol.jsonrpc import Kind, peek
from gapless.protocol.record import read_record

__all__ = ["RUN", "Account", "Event", "Ledger", "RecordedLog", "key_of"]

RUN: Final = re.compile(rb'"run":"([^"]+)"')
"""Names a call, in the arguments of its request and in all that it leads to."""


def key_of(token: str) -> SessionKey:
    """The key under which a log has a session."""
    return SessionKey(hashlib.sha256(token.encode()).digest())


@dataclass(frozen=True, slots=True)
class Event:
    """An event that is durable."""

    id: EventId
    event: str
    data: bytes


@dataclass(slots=True)
class Account:
    """One session, as far as anybody was promised."""

    key: SessionKey
    events: list[Event] = field(default_factory=list[Event])
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    fence: int = 0
    seals: dict[int, int] = field(default_factory=dict[int, int])
    """How many events there were when a fence was first seen."""
    ended: bool = False
    removed: bool = False

    @property
    def name(self) -> str:
        """Short."""
        return self.key.hex()[:8]

    @property
    def received(self) -> int:
        """The highest number of a message that is durable."""
        return max(self.entries, default=0)

    def settlements(self) -> Counter[Any]:
        """How many answers each ID has."""
        found: Counter[Any] = Counter()
        for event in self.events:
            if event.event == "message" and (envelope := peek(event.data)).kind is Kind.RESPONSE:
                found[envelope.id] += 1
        return found


class Ledger:
    """All sessions.

    Args:
        wrong: called with what must not be.
    """

    def __init__(self, wrong: Callable[[str], None]) -> None:
        self.accounts: dict[SessionKey, Account] = {}
        self.runs: set[bytes] = set()
        """Calls that were accepted: their requests are durable."""
        self.handed: Counter[bytes] = Counter()
        """How often each call was handed to a backend."""
        self._wrong = wrong

    # What logs report ---------------------------------------------------------------------------------

    def created(self, key: SessionKey) -> None:
        """A session was made."""
        self.accounts.setdefault(key, Account(key))

    def acquired(self, key: SessionKey, fence: int) -> None:
        """A session has a new owner."""
        account = self.accounts[key]
        if fence <= account.fence:
            self._wrong(f"N1: session {account.name} was acquired under {fence} after {account.fence}")
        account.fence = fence

    def committed(self, key: SessionKey, write: Write) -> None:
        """A write has returned."""
        account = self.accounts[key]
        # It may be heard of late. What the next owner found is the most that an earlier one can have written.
        later = [upto for fence, upto in account.seals.items() if fence > write.fence]
        sealed = min(later, default=write.last)
        if write.last > sealed:
            self._wrong(f"N1: session {account.name} was written under {write.fence}, after {account.fence}")
        self._events(account, write.segment)
        self._entries(account, write.entries)
        if write.record is not None:
            account.ended = read_record(write.record).reason is not None

    def promised(self, key: SessionKey) -> tuple[int, int, int] | None:
        """What a log has to know of a session from now on: events, messages, the fence."""
        account = self.accounts.get(key)
        if account is None or account.removed:
            return None
        return len(account.events), account.received, account.fence

    def found(self, key: SessionKey, stored: Stored, promised: tuple[int, int, int] | None) -> Account:
        """What a log knows of a session, and what it had to know when it was asked."""
        # Without an account it was made, and its maker died before it heard so.
        account = self.accounts.setdefault(key, Account(key))
        events, received, fence = promised or (0, 0, 0)
        for what, has, had in (
            ("events", stored.committed, events),
            ("messages", stored.received, received),
            ("fences", stored.fence, fence),
        ):
            if has < had:
                self._wrong(f"L2: of session {account.name} the log has {has} {what}, not {had}")
        account.seals.setdefault(stored.fence, stored.committed)
        account.fence = max(account.fence, stored.fence)
        account.ended = account.ended or read_record(stored.record).reason is not None
        return account

    def read(self, account: Account, segment: bytes, entries: tuple[Entry, ...]) -> None:
        """What a log has of a session, read anew."""
        self._events(account, segment)
        self._entries(account, entries)

    def _events(self, account: Account, segment: bytes) -> None:
        for block in BlockDecoder(1 << 24).feed(segment):
            event = Event(parse_event_id(block.id or ""), block.event, block.data or b"")
            have = len(account.events)
            if event.id.seq == have + 1:
                account.events.append(event)
            elif event.id.seq > have + 1:
                self._wrong(f"L1: in session {account.name} event {event.id.seq} follows {have}")
            elif account.events[event.id.seq - 1] != event:
                self._wrong(f"L2: in session {account.name} event {event.id.seq} has changed")

    def _entries(self, account: Account, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            have = account.entries.get(entry.number)
            if have is not None and have != entry:
                self._wrong(f"L6: in session {account.name} message {entry.number} has changed")
            account.entries[entry.number] = entry
            self.runs |= set(RUN.findall(entry.data))

    def lost(self, key: SessionKey) -> None:
        """A log does not know a session."""
        self._wrong(f"L2: session {key.hex()[:8]} is gone")

    # What others report -------------------------------------------------------------------------------

    def told(self, token: str, id: EventId) -> None:
        """A client has received an event (S4)."""
        account = self.accounts.get(key_of(token))
        events = [] if account is None else account.events
        if id.seq > len(events) or events[id.seq - 1].id.link != id.link:
            self._wrong(f"§11.4: a client was sent event {id}, which is not durable: {len(events)} are")

    def told_received(self, token: str, number: int) -> None:
        """A client was told that its messages up to this one were received (L6)."""
        account = self.accounts.get(key_of(token))
        if number and (account is None or account.received < number):
            self._wrong(f"L6: a client was told that {number} was received, which is not durable")

    def hand(self, run: bytes) -> None:
        """A backend was handed a call (S6)."""
        self.handed[run] += 1
        if self.handed[run] > 1:
            self._wrong(f"§11.6: call {run.decode()} was handed to a backend twice")
        if run not in self.runs:
            self._wrong(f"N1: call {run.decode()} was handed to a backend, and its request is not durable")

    # At the end ---------------------------------------------------------------------------------------

    def settled(self, account: Account) -> None:
        """Every request of a session is settled, exactly once (L7)."""
        answers = account.settlements()
        cancelled: set[Any] = set()
        asked: list[Any] = []
        for entry in account.entries.values():
            try:
                envelope = peek(entry.data)
            except MalformedError:
                continue
            if envelope.kind is Kind.REQUEST:
                asked.append(envelope.id)
            elif envelope.method == "notifications/cancelled":
                cancelled.add(envelope.target)
        for id in asked:
            if answers[id] > 1 or (answers[id] == 0 and id not in cancelled):
                self._wrong(f"§11.6: in session {account.name} request {id!r} has {answers[id]} answers")
        if strays := set(answers) - set(asked):
            self._wrong(f"§11.6: in session {account.name} there are answers to {strays}, which nobody asked")


class RecordedLog(SqliteLog):
    """The SQLite log, which tells the ledger what it has promised."""

    ledger: Ledger

    async def create(self, key: SessionKey, record: bytes, link: Link, owner: OwnerId | None = None) -> None:
        await super().create(key, record, link, owner)
        self.ledger.created(key)

    async def acquire(self, key: SessionKey, fence: int, owner: OwnerId | None = None) -> int:
        raised = await super().acquire(key, fence, owner)
        self.ledger.acquired(key, raised)
        return raised

    async def commit(self, key: SessionKey, write: Write) -> None:
        await super().commit(key, write)
        self.ledger.committed(key, write)

    async def load(self, key: SessionKey) -> Stored | None:
        promised = self.ledger.promised(key)
        stored = await super().load(key)
        if stored is not None:
            account = self.ledger.found(key, stored, promised)
            if stored.committed > len(account.events) or stored.received > account.received:
                await self._compare(account, stored, len(account.events))
        elif promised is not None and self.ledger.promised(key) is not None:
            self.ledger.lost(key)
        return stored

    async def remove(self, key: SessionKey) -> None:
        if key in self.ledger.accounts:
            self.ledger.accounts[key].removed = True
        await super().remove(key)

    async def audit(self) -> None:
        """Compare all that is there with all that was promised."""
        for key, account in list(self.ledger.accounts.items()):
            stored = await self.load(key)
            if stored is not None:
                await self._compare(account, stored, stored.floor)

    async def _compare(self, account: Account, stored: Stored, after: int) -> None:
        events = b""
        try:
            while after < stored.committed:
                data, after = await super().read(account.key, after, stored.committed, 1 << 20)
                if not data:
                    return  # removed this moment
                events += data
        except BelowFloorError:
            return  # evicted this moment
        self.ledger.read(account, events, await super().entries(account.key, 0, 1 << 20))
