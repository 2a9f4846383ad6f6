"""All sessions of one server: open, find, expire, bury."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hmac import compare_digest
from typing import Final

from gapless.auth.base import ANONYMOUS, Principal
from gapless.backends.base import BackendFactory
from gapless.errors import ConflictError, StorageError
from gapless.log.base import Log, Owner, OwnerId, SessionKey, Stored
from gapless.protocol.carried import Waiting
from gapless.protocol.cursor import LINK_BYTES, Link
from gapless.protocol.jsonrpc import peek
from gapless.protocol.outbox import Grain
from gapless.protocol.record import Retained, read_record, restore, write_record
from gapless.protocol.refusal import CLOSE_UNAUTHENTICATED, Reason, Refusal
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from gapless.server.faults import StorageFault
from gapless.server.lease import Lease
from gapless.server.live import Live
from gapless.server.observer import Observer, Turn
from gapless.server.relay import Reach, bury, reachable

__all__ = ["Elsewhere", "Sessions", "own"]

_log: Final = logging.getLogger("gapless.sessions")
_SWEEP: Final = 60.0
"""Seconds between two looks at what dead processes have left behind."""
_REVIVALS: Final = 32
"""Fresh backends that are told at a time what those before them were."""
_CONTENDERS: Final = 5
"""Times that a session's owner may change under the eyes of somebody who looks for it."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A session that another process owns, which lives as far as anybody knows (N1)."""

    address: str
    silence: Callable[[], Awaitable[None]]
    """Returns when that process has shown no life for as long as a lease."""


class Sessions:
    """All sessions of one server."""

    def __init__(
        self, log: Log, backends: BackendFactory, limits: Limits, observer: Observer | None = None
    ) -> None:
        self.log = log
        self.backends = backends
        self.limits = limits
        self.observer = observer or Observer()
        self._live: dict[SessionKey, Live] = {}
        self._opening = Counter[str]()
        self._of = Counter[str]()
        """Sessions in `_live`, by principal."""
        self._loading: dict[SessionKey, asyncio.Task[Live | Elsewhere | None]] = {}
        self._orphans: dict[SessionKey, float] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._revivals = asyncio.Semaphore(_REVIVALS)
        self._janitor: asyncio.Task[None] | None = None
        self._lease: Lease | None = None
        self.draining = False

    async def start(self, meet: Callable[[str], Awaitable[str]] | None = None) -> None:
        """Open the log and whatever the backends share.

        Args:
            meet: opens what other processes on the log reach this one by, near a path: its address.

        Raises:
            LogError: the log cannot be opened.
        """
        await self.log.start()
        address = "" if meet is None or self.log.place is None else await meet(self.log.place)
        self._lease = Lease(self.log, self.limits.lease, self._check_owned)
        await self._lease.start(address)
        await self.backends.start()
        self.observer.metrics.read_off(lambda: (live.machine for live in self.all()), lambda: self.lease)
        self._janitor = asyncio.create_task(self._clean())

    async def close(self) -> None:
        """Close every backend and the log. Connections have been told to go by `drain`."""
        for task in (self._janitor, *self._loading.values()):
            if task is not None:
                task.cancel()
        try:
            await asyncio.gather(*self._leaving, *(live.close() for live in self.all()))
            await self.backends.close()
        finally:
            if self._lease is not None:
                await self._lease.close()
            await self.log.close()

    def unready(self) -> str | None:
        """Why nobody new should be sent here, if so."""
        if self._lease is None:
            return "starting"
        if self.draining:
            return "shutting down"
        if not self._lease.held:
            return "no sign of life has reached the log for as long as a lease"
        if any(live.failing for live in self._live.values()):
            return "the log refuses writes"
        return None

    @property
    def lease(self) -> Lease:
        """This process's lease; there is one once `start` has returned."""
        assert self._lease is not None
        return self._lease

    async def _check_owned(self) -> None:
        """Some session was taken from this process: stop serving those that are not its own (N1)."""
        served = self.all()  # before the look: what becomes ours meanwhile is not in what is seen
        owned = await self.log.owned(self.lease.id)
        for live in served:
            if live.key not in owned and live.machine.reason is None:
                live.abandon("another process has taken it over")

    async def revoke(self, principal: str) -> None:
        """A principal's tokens are good no more: its connections here end, with 4401 on a socket (§9).

        Its sessions stay, for a token that is good. Other processes on the log have to be told by themselves.
        """
        for live in self.all():
            if live.principal == principal:
                live.expel(CLOSE_UNAUTHENTICATED)

    def drain(self, code: int) -> None:
        """Tell every connection to go: event streams end after `retry:`, sockets close with `code`."""
        self.draining = True
        for live in self._live.values():
            live.expel(code, retry=live.machine.limits.retry)

    async def open(self, view: View, principal: str) -> tuple[str, Live] | Refusal:
        """Open a session, or say why not; its token is told once and stored only as a hash (§9).

        Raises:
            StorageError: the log could not take it.
        """
        full = self._full(principal)
        if full is not None:
            return full
        token = secrets.token_urlsafe(32)
        key = _key(token)
        link = Link(secrets.token_bytes(LINK_BYTES))
        now = asyncio.get_running_loop().time()
        machine = Session(view, link, self.limits, self.log.durability.value, now)
        self._opening[principal] += 1
        try:
            await self.log.create(key, write_record(machine, principal, None), link, self.lease.id)
        finally:
            _one_less(self._opening, principal)
        live = self._live[key] = self._serve(key, principal, machine)
        self.observer.turned(Turn.OPENED, live.name, machine)
        return token, live

    def _full(self, principal: str) -> Refusal | None:
        """Why no more sessions are opened, if so; those of a process that is gone are never refused."""
        limits = self.limits
        most, things = limits.max_sessions, "sessions"
        if self.backends.spawns and limits.max_children < most:
            most, things = limits.max_children, "sessions with an MCP server each"
        # They are counted one by one only where those that have ended could make the difference.
        if len(self._live) + self._opening.total() >= most and self._count() >= most:
            return Refusal(Reason.LIMIT, f"this server is for at most {most} {things}")
        most = limits.max_principal_sessions
        held = self._of[principal] + self._opening[principal]
        if principal != ANONYMOUS.name and held >= most and self._count(principal) >= most:
            return Refusal(Reason.LIMIT, f"{most} sessions of this principal are open", own=True)
        return None

    def _count(self, principal: str | None = None) -> int:
        """Sessions that are not over, of anybody or of one principal."""
        lives = self._live.values()
        opening = self._opening.total() if principal is None else self._opening[principal]
        return opening + sum(
            live.machine.reason is None and principal in (None, live.principal) for live in lives
        )

    async def bearer(self, token: str, ticket: str) -> Principal | None:
        """Whom a ticket of the session behind a token stands for, and until when (§9).

        `None` if it is not the one that is outstanding, has expired, or there is no such session. Nothing
        is started or changed by that: whoever asks has shown nothing yet.

        Raises:
            StorageError: the log could not be read.
        """
        key = _key(token)
        valid, name = None, ""
        if (live := await self._held(key)) is not None:
            valid, name = live.machine.door.ticket, live.principal
        elif (stored := await self.log.load(key)) is not None:
            record = read_record(stored.record)
            valid, name = record.ticket, record.principal
        if valid is None or not compare_digest(ticket.encode(errors="replace"), valid.encode()):
            return None
        _, _, until = valid.partition(".")
        if until and time.time() >= int(until):
            return None
        return Principal(name, float(until) if until else None)

    async def find(self, token: str, principal: str) -> Live | Elsewhere | Refusal:
        """The session behind a token, or why there is none: another principal's is as none (§9).

        Raises:
            StorageError: the log could not be read, or ownership could not be settled.
        """
        key = _key(token)
        live = await self._held(key)
        if live is not None:
            if live.principal == principal:
                return live
            await self.log.load(key)  # in no less time than if there were none
            return _unknown()
        stored = await self.log.load(key)
        record = None if stored is None else read_record(stored.record)
        if stored is None or record is None or principal != record.principal:
            return _unknown()
        if record.reason is not None:  # a tombstone: who asks is told why, and nobody owns it (B4)
            text = f"the session is over: {record.reason}"
            return Refusal(record.reason, text, stored.committed, stored.floor, stored.received)
        return await self._load(key) or _unknown()

    async def _held(self, key: SessionKey) -> Live | None:
        """The session as this process serves it, unless another may know more of it than this one."""
        live = self._live.get(key)
        if live is not None:
            await self.lease.ensure()
            if live.stale:
                self._let_go(live)
                return None
        return live

    async def _load(self, key: SessionKey, *, expire: bool = False) -> Live | Elsewhere | None:
        """Find a session in the log, once for all who ask at the same time; if it is ours to, end it."""
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._locate(key, expire))
            loading.add_done_callback(lambda _: self._loading.pop(key))
        return await asyncio.shield(loading)

    async def _locate(self, key: SessionKey, expire: bool) -> Live | Elsewhere | None:
        for _ in range(_CONTENDERS):
            stored = await self.log.load(key)
            if stored is None or key in self._live:
                return self._live.get(key)
            owner = await self._owner(stored)
            if owner is not None:
                return Elsewhere(owner.address, partial(self.lease.silence, owner.id))
            with suppress(ConflictError):  # somebody else was faster
                live = await self._own(stored)
                await (live.end(Reason.SESSION_EXPIRED) if expire else live.carrier.take_over())
                return live
        raise StorageError("this session's owner keeps changing", hint="try again")

    async def _owner(self, stored: Stored) -> Owner | None:
        """The other process that owns a session and may still live; a dead one is struck off."""
        if stored.owner is None or stored.owner == self.lease.id or read_record(stored.record).reason:
            return None
        owner = next((o for o in await self.lease.watch() if o.id == stored.owner), None)
        return owner if owner is not None and await self._lives(owner) else None

    async def _lives(self, owner: Owner) -> bool:
        """Whether another process may live as far as its sessions go; a dead one is struck off."""
        silent = self.lease.silent(owner.id)
        match await reachable(owner.address):
            case Reach.LISTENS:
                return not silent
            case Reach.UNKNOWN if not silent:
                return True
            case _:
                await self.log.leave(owner.id)
                await bury(owner.address)
                return False

    async def _own(self, stored: Stored) -> Live:
        """Own a session whose process is gone.

        Raises:
            ConflictError: somebody else was faster.
        """
        now = asyncio.get_running_loop().time()
        machine, principal, fence = await own(
            self.log, stored, self.limits, self.lease.id, now=now, unix=time.time()
        )
        live = self._live[stored.key] = self._serve(stored.key, principal, machine, fence)
        return live

    def _serve(self, key: SessionKey, principal: str, machine: Session, fence: int = 0) -> Live:
        self._of[principal] += 1
        log, backends, revivals = self.log, self.backends, self._revivals
        return Live(key, principal, machine, log, backends, self.lease, self.observer, fence, revivals)

    def all(self) -> Iterable[Live]:
        """The sessions that are live in this process."""
        return tuple(self._live.values())

    async def _clean(self) -> None:
        pause = min(5.0, self.limits.session_expiry / 4)
        since = _SWEEP
        while True:
            if since >= _SWEEP:
                since = 0.0
                try:
                    await self._sweep()
                except (StorageError, StorageFault) as error:
                    _log.warning("the log could not be swept: %s", error.line)
            await asyncio.sleep(pause)
            since += pause
            await self.clean(asyncio.get_running_loop().time())

    async def _sweep(self) -> None:
        """Bury what dead processes left in the log: the ended, and those that nobody came back for.

        However long ago a session was written, its client may have been there until its process died:
        so its expiry counts from when it is first seen without one.
        """
        now, unix = asyncio.get_running_loop().time(), time.time()
        limits, orphans = self.limits, dict[SessionKey, float]()
        others = [owner for owner in await self.lease.watch() if owner.id != self.lease.id]
        living = {owner.id for owner in others if await self._lives(owner)}
        for stored in await self.log.sessions(before=unix - min(limits.session_expiry, limits.tombstone)):
            if stored.key in self._live:
                continue
            try:
                ended_at = read_record(stored.record).ended_at
                if ended_at is None:
                    if stored.owner not in living:
                        since = orphans[stored.key] = self._orphans.get(stored.key, now)
                        if now >= since + limits.session_expiry:
                            await self._load(stored.key, expire=True)
                elif unix >= ended_at + limits.tombstone:
                    await self.log.remove(stored.key)
            except (StorageError, StorageFault) as error:
                _log.warning("session %s could not be cleaned up: %s", stored.key.hex()[:8], error.line)
        self._orphans = orphans

    async def clean(self, now: float) -> None:
        """Expire idle sessions, evict what is old, and let go of the ended (§8)."""
        for live in self.all():
            try:
                await self._look_after(live, now)
            except StorageFault as error:
                _log.warning("session %s: %s", live.name, error)  # the next round tries again

    async def _look_after(self, live: Live, now: float) -> None:
        machine = live.machine
        if live.stale:
            self._let_go(live)
            return
        if machine.expired(now):
            await live.end(Reason.SESSION_EXPIRED)
        live.evict(now)
        over = machine.ended()
        if over is not None and not machine.connections:
            await live.durable()
            self._let_go(live)

    def _let_go(self, live: Live) -> None:
        """Serve a session no more; what it leaves behind is closed meanwhile."""
        if self._live.get(live.key) is live:
            del self._live[live.key]
            _one_less(self._of, live.principal)
            leaving = asyncio.create_task(self._close(live))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _close(self, live: Live) -> None:
        await live.close()
        self.log.release(live.key)


def _one_less(counts: Counter[str], name: str) -> None:
    """Count one less of a name; none of those that have none is kept, or they would gather."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


async def own(
    log: Log, stored: Stored, limits: Limits, owner: OwnerId | None, *, now: float, unix: float
) -> tuple[Session, str, int]:
    """A session's machine, its principal, and the fence to write it under (N1).

    Whoever wrote it before writes no more from here on, unless it is over, when nobody does.

    Args:
        now, unix: the time by the machine's clock, and by the log's.

    Raises:
        ConflictError: somebody else was faster. StorageError: the log could not be read or written.
    """
    fence = stored.fence
    if read_record(stored.record).reason is None:
        fence = await log.acquire(stored.key, fence, owner)
        stored = await log.load(stored.key) or stored  # as it is now that nobody else can write
    entries = await log.entries(stored.key, stored.dispatched, stored.received)
    runs = await log.runs(stored.key, Grain.of(limits))
    retained = Retained(
        committed=stored.committed,
        link=stored.link,
        floor=stored.floor,
        floor_link=stored.floor_link,
        received=stored.received,
        dispatched=stored.dispatched,
        runs=tuple(replace(run, at=now - max(0.0, unix - run.at)) for run in runs),
        waiting=tuple(Waiting(e.number, e.data, peek(e.data)) for e in entries if e.data),
    )
    record = read_record(stored.record)
    return restore(record, retained, limits, log.durability.value, now), record.principal, fence


def _unknown() -> Refusal:
    return Refusal(Reason.SESSION_UNKNOWN, "no such session")


def _key(token: str) -> SessionKey:
    return SessionKey(hashlib.sha256(token.encode(errors="surrogateescape")).digest())
