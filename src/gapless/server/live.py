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
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final, TypeVar

from msgspec import structs

from gapless.backends.base import Backend, BackendFactory
from gapless.errors import BackendError, ConflictError, GaplessError, StorageError
from gapless.log.base import Digest, Entry, Log, SessionKey, Write
from gapless.protocol.carried import LISTEN, Phase, Waiting
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
    Lost,
    Probing,
    Refused,
    Revive,
    Serving,
    Upgrade,
    Verdict,
)
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response, peek
from gapless.protocol.record import write_record
from gapless.protocol.refusal import CLOSE_RESTART, CLOSE_UNAUTHENTICATED, Reason
from gapless.protocol.session import Commit, Session
from gapless.server.attached import Attached, Wake
from gapless.server.lease import Lease
from gapless.server.observer import Observer, Turn
from gapless.server.rate import Rate

__all__ = ["Live", "StorageFault", "as_write"]

_log: Final = logging.getLogger("gapless.live")
_PENDING: Final = 1024 * 1024
"""Bytes not yet durable above which the backend is made to wait."""
_RETRY_STORAGE: Final = 0.25
_REPLAY: Final = 30.0
"""Seconds that a fresh backend has to take what is replayed to it."""
_BACKOFF: Final = 0.25
"""Seconds before a backend is started anew that was of no use the last time; four times that the next."""
_CUT_AFTER: Final = 1.0
"""Seconds that a connection which is to end may take over a write before it is cut."""
_PROBES: Final = 3
_UNSEEN: Final = (Emitted, Handed)
"""Inputs that are no turn of a transport."""

Asking = TypeVar("Asking", Listen, Upgrade, Handshake)


class StorageFault(GaplessError):
    """The log does not take writes now; nothing was acknowledged, and the write is tried again."""

    code = "storage"


class Live:
    """One session that this process serves."""

    __slots__ = (
        "_attached",
        "_backend",
        "_backends",
        "_closed",
        "_closing",
        "_committer",
        "_connections",
        "_crossing",
        "_dispatcher",
        "_dispatches",
        "_durable",
        "_lease",
        "_life",
        "_observer",
        "_replayed",
        "_revivals",
        "_reviving",
        "_room",
        "_spans",
        "_version",
        "_waiters",
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
        self._backends = backends
        self._backend: Backend | None = None
        self._version = 0
        self._durable = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._committer: asyncio.Task[None] | None = None
        self._dispatches: list[tuple[int, Dispatch]] = []
        self._dispatcher: asyncio.Task[None] | None = None
        self._room: asyncio.Event | None = None
        """Where somebody waits for room; that most of these never have to is memory saved."""
        self._attached: dict[ConnectionId, Attached] = {}
        self._life: dict[ConnectionId, asyncio.Event] = {}
        self._connections = 0
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._reviving: asyncio.Task[None] | None = None
        self._revivals = revivals
        """Held while a fresh backend is told what the last one was."""
        self._replayed: asyncio.Event | None = None
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
                    self.offer(Dropped(effect.delivery.connection))  # nobody will serve it
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
        if self._replayed is not None and machine.carried.phase is not Phase.REPLAYING:
            self._replayed.set()
        self._version += 1
        if self._spans is not None:
            self._spans.saw(input, effects, self._version)
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._dispatches.append((self._version, effect))
                self._start_dispatcher()
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

    async def uncrowded(self) -> None:
        """Wait until the backend has caught up enough for another message."""
        while self.crowded and not self._closed and self.machine.reason is None:
            if self._room is None or self._room.is_set():
                self._room = asyncio.Event()
            await self._room.wait()

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

    @property
    def crowded(self) -> bool:
        """Whether too many accepted messages wait for the backend."""
        waiting = len(self._dispatches) + len(self.machine.carried.waiting)
        return waiting >= self.machine.limits.max_inbox

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
        self.close_backend()
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
                await asyncio.sleep(_RETRY_STORAGE)
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

    def _start_dispatcher(self) -> None:
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())

    async def _dispatch(self) -> None:
        """Hand accepted messages to the backend, in order, each once and only when durable (N1)."""
        while self._dispatches:
            version, item = self._dispatches[0]
            if not await self._may_hand_over(version) or self.machine.reason is not None or self._closed:
                return
            wanted = item.incarnation == self.machine.carried.incarnation
            try:
                if wanted and self._backend is None:
                    await self._start_backend(item.incarnation)
                    continue  # that took its time: whether this may be handed over is asked again
                self._dispatches.pop(0)
                if self._room is not None and not self.crowded:
                    self._room.set()
                if not wanted or self._backend is None:
                    continue  # what it was for is gone, and so the message is settled
                await self._backend.send(item.data, item.envelope)
            except BackendError as error:
                self.lose(error.line, item.incarnation)
            except Exception as error:
                _log.exception("session %s: its MCP server failed", self.name)
                # or its requests would wait for ever (L7)
                self.lose(f"the MCP server failed: {error}", item.incarnation)
            if not self._dispatches:
                self.offer(Handed(item.incarnation))

    async def _start_backend(self, incarnation: int) -> None:
        """Start a backend; one that nobody wants any more by the time it runs is closed again.

        Raises:
            BackendError: it cannot be started.
        """
        self._backend = await self._backends.open(_Voice(self, incarnation))
        superseded = incarnation != self.machine.carried.incarnation
        if superseded or self.stale or self._closed or self.machine.reason is not None:
            self.close_backend()

    async def _may_hand_over(self, version: int) -> bool:
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
                await asyncio.sleep(_RETRY_STORAGE)
            else:
                if self._durable >= version:
                    return not self.stale

    def emit(
        self,
        data: bytes,
        envelope: Envelope,
        related: RequestId | None,
        incarnation: int,
        more: tuple[bytes, ...],
    ) -> Awaitable[None] | None:
        """The backend's incarnation of that number emitted a message; what to wait for before the next."""
        machine = self.machine
        limit = machine.limits.max_message_bytes
        if len(data) > limit:
            return self._refuse_large(len(data), envelope, incarnation)
        if more and max(map(len, more)) > limit:
            self._warn_large(max(map(len, more)))
            more = tuple(line for line in more if len(line) <= limit)
        self.offer(Emitted(data, envelope, related, incarnation, more))
        return self._uncommitted() if machine.outbox.pending > _PENDING else None

    async def _uncommitted(self) -> None:
        while self.machine.outbox.pending > _PENDING and not self.stale:
            with suppress(StorageFault):  # it is being tried again; until then the backend waits
                await self.durable()

    def _warn_large(self, size: int) -> str:
        limit = self.machine.limits.max_message_bytes
        text = f"the server's message of {size} bytes is above the limit of {limit}"
        _log.warning("session %s: %s", self.name, text)
        return text

    async def _refuse_large(self, size: int, envelope: Envelope, incarnation: int) -> None:
        """W5: above the limit nothing is sent; a result becomes an error on its own request."""
        text = self._warn_large(size)
        error = error_response(envelope.id, -32603, text, {"reason": Reason.TOO_LARGE.value})
        match envelope.kind:
            case Kind.RESPONSE:
                self.offer(Emitted(error, Envelope(Kind.RESPONSE, id=envelope.id), None, incarnation))
            case Kind.REQUEST if self._backend is not None:
                await self._backend.send(error, Envelope(Kind.RESPONSE, id=envelope.id))
            case _:
                pass

    def lose(self, message: str, incarnation: int, untaken: frozenset[RequestId] = frozenset()) -> None:
        """The backend of that number is gone: what it had is settled, and a fresh one begins (L7, N2)."""
        if incarnation != self.machine.carried.incarnation or self.machine.carried.phase is Phase.DOWN:
            return
        _log.warning("session %s: %s", self.name, message)
        self.close_backend()
        unsent = (item.envelope for _, item in self._dispatches if item.incarnation == incarnation)
        untaken |= {
            envelope.id for envelope in unsent if envelope.kind is Kind.REQUEST and envelope.id is not None
        }
        self.offer(Lost(message, untaken=untaken))
        self._go_on()

    async def take_over(self) -> None:
        """Go on with a session of an earlier process, which is gone with its backend (N2).

        Raises:
            StorageFault: the log refused it just now.
        """
        try:
            await self.put(Lost("the server was restarted, and its MCP server with it", taken_over=True))
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if self.machine.reason is None and not self._closed:
            self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        """Start a fresh backend with what the last one was told."""
        carried = self.machine.carried
        incarnation = carried.incarnation
        if carried.futile:
            await asyncio.sleep(_BACKOFF * 4 ** (carried.futile - 1))
        revival: Revive | None = None
        while revival is None:
            try:
                await self.durable()
                revival = Revive(await self._orders(), await self._entries(carried.untaken))
            except (StorageFault, StorageError):
                if self.stale:
                    return
                await asyncio.sleep(_RETRY_STORAGE)
        # Where all sessions begin anew at once, each is to have its time, or all of them would be late.
        async with self._revivals:
            self._replayed = asyncio.Event()
            self.offer(revival)
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPLAY):
                    await self._replayed.wait()
        self._give_up(incarnation)

    async def _orders(self) -> tuple[Waiting, ...]:
        """What a fresh backend is told, in the order in which the client said it."""
        machine = self.machine
        listens = (request.number for request in machine.inbox.open.values() if request.method == LISTEN)
        told = {n for n in (*machine.carried.orders.values(), *listens) if n <= machine.dispatched}
        return await self._entries(told)

    async def _entries(self, numbers: Iterable[int]) -> tuple[Waiting, ...]:
        """Messages as the log has them, in order."""
        found = [await self.log.entries(self.key, number - 1, 1) for number in sorted(numbers)]
        return tuple(Waiting(entry.number, entry.data, peek(entry.data)) for (entry,) in found)

    def _give_up(self, incarnation: int) -> None:
        carried = self.machine.carried
        if carried.incarnation == incarnation and carried.phase is Phase.REPLAYING:
            message = f"a fresh MCP server did not take in {_REPLAY:.0f} s what the last one had been told"
            self.lose(message, incarnation)

    async def end(self, reason: Reason, message: str = "") -> list[Effect]:
        """End the session; its backend is closed behind it."""
        try:
            return await self.put(End(reason, message))
        finally:
            self.close_backend()

    def close_backend(self) -> None:
        """Begin to close the backend, if there is one; that is bounded, and `close` waits for it."""
        backend, self._backend = self._backend, None
        if backend is not None:
            closing = asyncio.create_task(backend.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Stop serving: finish what is being committed, close the backend."""
        self._closed = True
        tasks = [task for task in (self._dispatcher, self._reviving) if task is not None]
        for task in tasks:
            task.cancel()
        self.close_backend()
        await asyncio.gather(*tasks, return_exceptions=True)  # one may be starting a backend
        await asyncio.gather(*self._closing)
        if self._committer is not None:
            try:
                async with asyncio.timeout(2.0):
                    await asyncio.shield(self._committer)
            except TimeoutError:
                self._committer.cancel()
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.close()


class _Voice:
    """One incarnation of a backend, as its session hears it (`Sink`)."""

    def __init__(self, live: Live, incarnation: int) -> None:
        self._live = live
        self._incarnation = incarnation

    def emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
    ) -> Awaitable[None] | None:
        return self._live.emit(data, envelope, related, self._incarnation, more)

    async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
        self._live.lose(message, self._incarnation, untaken)


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
