"""One live session: its machine, made durable, dispatched to its backend, shown to its connections.

A `Live` wraps one machine. Whatever is put into it is handled at once; what that appended goes to
the log in the order it was appended, several inputs to a commit if they came while one was under
way; and the effects are handed out when the commit is durable (L2).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import structs

from gapless.backends.base import BackendFactory
from gapless.errors import ConflictError, StorageError
from gapless.log.base import Digest, Entry, Log, SessionKey, Write
from gapless.protocol.cursor import Position
from gapless.protocol.delivery import ConnectionId, Delivery
from gapless.protocol.inputs import (
    Acked,
    Cursor,
    Dispatch,
    Dropped,
    Effect,
    Emitted,
    End,
    Handed,
    Handshake,
    Input,
    Known,
    Listen,
    Probing,
    Refused,
    Serving,
    Upgrade,
    Verdict,
)
from gapless.protocol.record import write_record
from gapless.protocol.refusal import CLOSE_RESTART, CLOSE_UNAUTHENTICATED, Reason
from gapless.protocol.session import Commit, Session
from gapless.server.attached import Attached, Wake
from gapless.server.carrier import Carrier
from gapless.server.faults import RETRY_STORAGE, StorageFault
from gapless.server.lease import Lease
from gapless.server.observer import Observer, Turn
from gapless.server.rate import Rate

__all__ = ["Live", "as_write"]

_log: Final = logging.getLogger("gapless.live")
_CUT_AFTER: Final = 1.0
"""Seconds that a connection which is to end may take over a write before it is cut."""
_PROBES: Final = 3
_UNSEEN: Final = (Emitted, Handed)
"""Inputs that are no turn of a transport."""

Asking = TypeVar("Asking", Listen, Upgrade, Handshake)


class Live:
    """One session that this process serves."""

    __slots__ = (
        "_attached",
        "_committer",
        "_connections",
        "_crossing",
        "_durable",
        "_lease",
        "_life",
        "_observer",
        "_spans",
        "_version",
        "_waiters",
        "carrier",
        "clock",
        "failing",
        "fence",
        "key",
        "log",
        "machine",
        "name",
        "principal",
        "stale",
        "upgrades",
    )

    def __init__(
        self,
        key: SessionKey,
        principal: str,
        machine: Session,
        log: Log,
        backends: BackendFactory,
        lease: Lease,
        observer: Observer,
        fence: int,
        revivals: asyncio.Semaphore,
    ) -> None:
        self.key = key
        self.name = key.hex()[:8]
        """What logs call it by."""
        self._observer = observer
        self._spans = observer.spans(self.name, machine)
        self._crossing: dict[ConnectionId, float] = {}
        self.principal = principal
        self.machine = machine
        self.log = log
        self.fence = fence
        """The number this process writes under; a higher one in the log shuts it out (N1)."""
        self._lease = lease
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.carrier = Carrier(self, backends, revivals)
        self._version = 0
        self._durable = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._committer: asyncio.Task[None] | None = None
        self._attached: dict[ConnectionId, Attached] = {}
        self._life: dict[ConnectionId, asyncio.Event] = {}
        self._connections = 0
        self.upgrades = Rate(machine.limits.max_upgrades_per_minute, self.clock())
        self.stale = False
        self.failing = False
        """Whether the log refuses what is to be written."""

    # Inputs --------------------------------------------------------------------------------------

    async def put(self, input: Input) -> list[Effect]:
        """Handle one input; return its effects once everything so far is durable.

        Raises:
            StorageFault: it is not durable, and nothing of it may be told; it will be tried again.
        """
        effects = self.offer(input)
        try:
            await self.durable()
        except BaseException:
            for effect in effects:
                if isinstance(effect, Serving):
                    self.offer(Dropped(effect.delivery.connection, effect.pending))  # nobody will serve it
            raise
        return [self._told(effect) for effect in effects]

    def _told(self, effect: Effect) -> Effect:
        """A refusal says where the server is when it is told: by then what its input changed is durable."""
        if not isinstance(effect, Refused):
            return effect
        told = effect.refusal
        return self.machine.refusal(told.reason, told.message, own=told.own)

    async def ask(self, input: Asking) -> list[Effect]:
        """Put in a question whose answer may depend on a bound socket, probing that if need be (B6)."""
        for _ in range(_PROBES):
            effects = await self.put(input)
            probing = next((e for e in effects if isinstance(e, Probing)), None)
            if probing is None:
                return effects
            input = structs.replace(input, verdict=await self._probe(probing.delivery))
        return [self.machine.refusal(Reason.WEBSOCKET_BOUND, "other sockets keep taking this session")]

    def offer(self, input: Input) -> list[Effect]:
        """Handle one input without waiting for the log: for what is answered by state, not by an effect."""
        machine = self.machine
        over, gone = machine.reason, None
        if isinstance(input, Dropped):
            gone = machine.connections.get(input.connection)
        effects = machine.handle(input, self.clock())
        turned = not isinstance(input, _UNSEEN)
        if turned or machine.reason is not over:
            self._observer.saw(self.name, machine, input, effects, over=over, gone=gone)
            self._time_crossing(input, effects)
        self.carrier.moved()
        self._version += 1
        if self._spans is not None:
            self._spans.saw(input, effects, self._version)
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.carrier.dispatch(self._version, effect)
        self._start_committer()
        if turned:
            self.wake()  # of what the backend does nothing can be told before it is durable
        return effects

    def _time_crossing(self, input: Input, effects: list[Effect]) -> None:
        """How long the clients of sockets take from their handshake to the end of the gap (U3)."""
        match input, effects:
            case Handshake(), [Serving(delivery)]:
                self._crossing[delivery.connection] = self.clock()
            case Acked(connection=int() as connection), _ if connection in self._crossing:
                delivery = self.machine.connections.get(connection)
                if delivery is not None and delivery.gate is None:
                    seconds = self.clock() - self._crossing.pop(connection)
                    self._observer.crossed(self.name, self.machine, seconds)
            case Dropped(), _:
                self._crossing.pop(input.connection, None)
            case _:
                pass

    async def _probe(self, delivery: Delivery) -> Verdict:
        connection = delivery.connection
        if connection not in self._attached and connection not in self.machine.connections:
            return Verdict(delivery.generation, alive=False)  # no live process behind the binding
        life = self._life.setdefault(connection, asyncio.Event())
        life.clear()
        delivery.probe = secrets.token_urlsafe(8)
        self.wake()
        try:
            async with asyncio.timeout(self.machine.limits.probe_timeout):
                await life.wait()
        except TimeoutError:
            return Verdict(delivery.generation, alive=False)
        return Verdict(delivery.generation, alive=True)

    # Connections ---------------------------------------------------------------------------------

    def connection(self) -> ConnectionId:
        """A number for a new connection."""
        self._connections += 1
        return ConnectionId(self._connections)

    def attach(
        self, connection: ConnectionId, cut: Callable[[], object], expires: float | None = None
    ) -> Wake:
        """What tells a connection to look again; `cut` ends it if it does not end itself.

        At the Unix time `expires` it is told to go, with 4401 on a socket: its token is none any more (§9).
        """
        expiry = None
        if expires is not None:
            left = max(0.0, expires - time.time())
            expiry = asyncio.get_running_loop().call_later(left, self._expire, connection)
        attached = self._attached[connection] = Attached(cut, expiry)
        return attached.wake

    def detach(self, connection: ConnectionId) -> None:
        """The connection is gone."""
        attached = self._attached.pop(connection, None)
        if attached is not None and attached.expiry is not None:
            attached.expiry.cancel()
        life = self._life.pop(connection, None)
        self.offer(Dropped(connection))
        if life is not None:
            life.set()  # whoever probes it learns that it is gone by asking again

    def _expire(self, connection: ConnectionId) -> None:
        delivery = self.machine.connections.get(connection)
        if delivery is not None:
            delivery.close = delivery.close or CLOSE_UNAUTHENTICATED
            self.wake()

    def heard(self, connection: ConnectionId) -> None:
        """Something came in on a socket: it lives (B6)."""
        delivery = self.machine.connections.get(connection)
        if delivery is not None:
            delivery.heard_at = self.clock()
        life = self._life.get(connection)
        if life is not None:
            life.set()

    def evict(self, now: float) -> None:
        """Apply retention to a session where nothing else happens."""
        self._evict(now)
        self._start_committer()

    def _evict(self, now: float) -> None:
        before = self.machine.outbox.evicted_unacked
        self.machine.evict(now)
        unacked = self.machine.outbox.evicted_unacked - before
        if unacked:
            self._observer.metrics.evicted_unacked.inc(unacked)

    def wake(self) -> None:
        """Let every connection look again."""
        connections = self.machine.connections
        for connection, attached in self._attached.items():
            attached.wake.set()
            delivery = connections.get(connection)
            if delivery is not None and delivery.close is not None and attached.cut is not None:
                # It sees that itself, unless its peer has stopped reading: nobody waits for that (B8).
                asyncio.get_running_loop().call_later(_CUT_AFTER, attached.cut)
                attached.cut = None

    # The log -------------------------------------------------------------------------------------

    async def cursor(self, stated: Position) -> Cursor:
        """A stated cursor beside what the log holds there (C3)."""
        outbox = self.machine.outbox
        if stated.seq == outbox.floor:  # of a new session everybody's
            return Cursor(stated, outbox.floor_link)
        return Cursor(stated, await self.log.link(self.key, stated.seq))

    async def known(self, number: int) -> Known | None:
        """The inbox entry under a number that was received already (L6)."""
        if number > self.machine.inbox.received:
            return None
        await self.durable()
        found = await self.log.entries(self.key, number - 1, 1)
        return Known(found[0].digest, not found[0].data) if found else None

    async def durable(self) -> None:
        """Wait until everything handled so far is durable.

        Raises:
            StorageFault: the log refused it just now.
        """
        if self.stale:
            raise StorageFault("this process serves the session no more")
        if self._durable >= self._version:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((self._version, waiter))
        await waiter

    def _start_committer(self) -> None:
        if self._committer is None and not self.stale:
            if not self.machine.dirty:
                self._durable = self._version
                return
            self._committer = asyncio.create_task(self._commit())

    async def _commit(self) -> None:
        try:
            while self.machine.dirty:
                self._evict(self.clock())
                version, commit = self._version, self.machine.take()
                began = self.clock()
                record = None
                if commit.record:
                    record = write_record(self.machine, self.principal, self._ended_at())
                await self._write(as_write(commit, record, self.fence))
                self.machine.confirm(commit)
                events = self.machine.outbox.committed - commit.expect
                self._observer.committed(events, len(commit.entries), self.clock() - began)
                self._durable = version
                if self._spans is not None:
                    self._spans.durable(version)
                self._release(None)
                self.wake()
        except ConflictError as error:
            self.abandon(f"another process writes this session: {error}")
        except Exception as error:
            _log.exception("session %s: the commit failed", self.name)
            self.abandon(f"the commit failed: {error}")
        finally:
            self._committer = None
        if not self.machine.dirty:
            self._durable = self._version
            self._release(None)

    def abandon(self, message: str) -> None:
        """What this process knows of the session is not what the log holds: stop serving it at once (N1)."""
        if self.stale:
            return
        _log.error("session %s: %s", self.name, message)
        self._observer.turned(Turn.ABANDONED, self.name, self.machine)
        self.stale = True
        self.carrier.stop()
        self._release(StorageFault(message), everyone=True)
        self.expel(CLOSE_RESTART)

    def expel(self, code: int, retry: float | None = None) -> None:
        """Tell every connection to go: sockets close with `code`, streams end, after a `retry:` if given."""
        for delivery in self.machine.connections.values():
            delivery.close = delivery.close or code
            delivery.retry = delivery.retry or retry
        self.wake()

    async def _write(self, write: Write) -> None:
        """Commit, trying again while the store is unable to: what is pending is never dropped."""
        failed = False
        while True:
            try:
                await self._lease.ensure()
                if self.stale:
                    raise ConflictError("it was taken over while this process gave no sign of life")
                await self.log.commit(self.key, write)
            except StorageError as error:
                if not failed:
                    _log.error("session %s: %s", self.name, error.line)
                failed = self.failing = True
                self._observer.metrics.storage_faults.inc()
                self._release(StorageFault(str(error)), everyone=True)
                await asyncio.sleep(RETRY_STORAGE)
            else:
                self.failing = False
                if failed:
                    _log.warning("session %s: the log takes writes again", self.name)
                return

    def _release(self, error: StorageFault | None, *, everyone: bool = False) -> None:
        while self._waiters and (everyone or self._waiters[0][0] <= self._durable):
            _, waiter = self._waiters.pop(0)
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _ended_at(self) -> float | None:
        return None if self.machine.reason is None else time.time()

    # The backend -----------------------------------------------------------------------------------

    async def may_hand_over(self, version: int) -> bool:
        """Wait until what led to a dispatch is durable and the lease is held; whether both came to be."""
        while True:
            try:
                if self._durable < version:
                    await self.durable()
                await self._lease.ensure()
            except StorageFault:
                if self.stale:
                    return False
                # It is being tried again; until it is durable nothing is handed over.
            except StorageError:
                await asyncio.sleep(RETRY_STORAGE)
            else:
                if self._durable >= version:
                    return not self.stale

    async def end(self, reason: Reason, message: str = "") -> list[Effect]:
        """End the session; its backend is closed behind it."""
        try:
            return await self.put(End(reason, message))
        finally:
            self.carrier.stop()

    async def close(self) -> None:
        """Stop serving: finish what is being committed, close the backend."""
        await self.carrier.close()
        if self._committer is not None:
            try:
                async with asyncio.timeout(2.0):
                    await asyncio.shield(self._committer)
            except TimeoutError:
                self._committer.cancel()
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.close()


def as_write(commit: Commit, record: bytes | None, fence: int) -> Write:
    """A machine's commit as the log takes it, written under `fence` (N1)."""
    floor, floor_link = commit.floor or (None, None)
    return Write(
        expect=commit.expect,
        segment=commit.segment.data,
        last=commit.segment.last,
        link=commit.segment.link,
        entries=tuple(Entry(m.number or 0, Digest(m.digest), m.data) for m in commit.entries),
        dispatched=commit.dispatched,
        record=record,
        floor=floor,
        floor_link=floor_link,
        fence=fence,
    )
