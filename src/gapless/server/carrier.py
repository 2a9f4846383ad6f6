"""The MCP server that a live session carries: started, handed messages, heard, lost, begun anew (N1–N3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gapless.backends.base import Backend, BackendFactory
from gapless.errors import BackendError, StorageError
from gapless.protocol.carried import LISTEN, Phase, Waiting
from gapless.protocol.inputs import Dispatch, Emitted, Handed, Lost, Revive
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response, peek
from gapless.protocol.refusal import Reason
from gapless.server.faults import RETRY_STORAGE, StorageFault

if TYPE_CHECKING:
    from gapless.server.live import Live

__all__ = ["Carrier"]

_log: Final = logging.getLogger("gapless.live")
_PENDING: Final = 1024 * 1024
"""Bytes not yet durable above which the backend is made to wait."""
_REPLAY: Final = 30.0
"""Seconds that a fresh backend has to take what is replayed to it."""
_BACKOFF: Final = 0.25
"""Seconds before a backend is started anew that was of no use the last time; four times that the next."""


class Carrier:
    """What one live session has to do with its backend.

    Args:
        live: the session, which is told what the backend says and what becomes of it.
        revivals: held while a fresh backend is told what the last one was.
    """

    __slots__ = (
        "_backend",
        "_backends",
        "_closed",
        "_closing",
        "_dispatcher",
        "_dispatches",
        "_held",
        "_machine",
        "_name",
        "_replayed",
        "_revivals",
        "_reviving",
        "_room",
    )

    def __init__(self, live: Live, backends: BackendFactory, revivals: asyncio.Semaphore) -> None:
        self._held: Live | None = live
        """Let go of in the end: the two would hold each other until the garbage is looked for."""
        self._machine = live.machine
        self._name = live.name
        self._backends = backends
        self._backend: Backend | None = None
        self._dispatches: list[tuple[int, Dispatch]] = []
        self._dispatcher: asyncio.Task[None] | None = None
        self._room: asyncio.Event | None = None
        """Where somebody waits for room; that most of these never have to is memory saved."""
        self._reviving: asyncio.Task[None] | None = None
        self._revivals = revivals
        self._replayed: asyncio.Event | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def _live(self) -> Live:
        assert self._held is not None, "nothing of the kind is done once this is closed"
        return self._held

    # To the backend ------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether too many accepted messages wait for the backend."""
        waiting = len(self._dispatches) + len(self._machine.carried.waiting)
        return waiting >= self._machine.limits.max_inbox

    async def uncrowded(self) -> None:
        """Wait until the backend has caught up enough for another message."""
        while self.crowded and not self._closed and self._machine.reason is None:
            if self._room is None or self._room.is_set():
                self._room = asyncio.Event()
            await self._room.wait()

    def dispatch(self, version: int, item: Dispatch) -> None:
        """Hand a message to the backend once what led to it, up to `version`, is durable."""
        if self._closed:
            return
        self._dispatches.append((version, item))
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())

    async def _dispatch(self) -> None:
        """Hand accepted messages to the backend, in order, each once and only when durable (N1)."""
        live = self._live
        while self._dispatches:
            version, item = self._dispatches[0]
            if not await live.may_hand_over(version) or live.machine.reason is not None or self._closed:
                return
            wanted = item.incarnation == live.machine.carried.incarnation
            try:
                if wanted and self._backend is None:
                    await self._start(item.incarnation)
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
                _log.exception("session %s: its MCP server failed", live.name)
                # or its requests would wait for ever (L7)
                self.lose(f"the MCP server failed: {error}", item.incarnation)
            if not self._dispatches:
                live.offer(Handed(item.incarnation))

    async def _start(self, incarnation: int) -> None:
        """Start a backend; one that nobody wants any more by the time it runs is closed again.

        Raises:
            BackendError: it cannot be started.
        """
        live = self._live
        self._backend = await self._backends.open(_Voice(self, incarnation))
        superseded = incarnation != live.machine.carried.incarnation
        if superseded or live.stale or self._closed or live.machine.reason is not None:
            self.stop()

    # From the backend ----------------------------------------------------------------------------

    def emit(
        self,
        data: bytes,
        envelope: Envelope,
        related: RequestId | None,
        incarnation: int,
        more: tuple[bytes, ...],
    ) -> Awaitable[None] | None:
        """The backend's incarnation of that number emitted a message; what to wait for before the next."""
        if self._held is None:
            return None  # nobody hears it any more
        machine = self._machine
        limit = machine.limits.max_message_bytes
        if len(data) > limit:
            return self._refuse_large(len(data), envelope, incarnation)
        if more and max(map(len, more)) > limit:
            self._warn_large(max(map(len, more)))
            more = tuple(line for line in more if len(line) <= limit)
        self._live.offer(Emitted(data, envelope, related, incarnation, more))
        return self._uncommitted() if machine.outbox.pending > _PENDING else None

    async def _uncommitted(self) -> None:
        live = self._live
        while live.machine.outbox.pending > _PENDING and not live.stale:
            with suppress(StorageFault):  # it is being tried again; until then the backend waits
                await live.durable()

    def _warn_large(self, size: int) -> str:
        limit = self._machine.limits.max_message_bytes
        text = f"the server's message of {size} bytes is above the limit of {limit}"
        _log.warning("session %s: %s", self._live.name, text)
        return text

    async def _refuse_large(self, size: int, envelope: Envelope, incarnation: int) -> None:
        """W5: above the limit nothing is sent; a result becomes an error on its own request."""
        text = self._warn_large(size)
        error = error_response(envelope.id, -32603, text, {"reason": Reason.TOO_LARGE.value})
        match envelope.kind:
            case Kind.RESPONSE:
                answer = Envelope(Kind.RESPONSE, id=envelope.id)
                self._live.offer(Emitted(error, answer, None, incarnation))
            case Kind.REQUEST if self._backend is not None:
                await self._backend.send(error, Envelope(Kind.RESPONSE, id=envelope.id))
            case _:
                pass

    # Its end, and the next one -------------------------------------------------------------------

    def lose(self, message: str, incarnation: int, untaken: frozenset[RequestId] = frozenset()) -> None:
        """The backend of that number is gone: what it had is settled, and a fresh one begins (L7, N2)."""
        live, carried = self._held, self._machine.carried
        if live is None or incarnation != carried.incarnation or carried.phase is Phase.DOWN:
            return
        _log.warning("session %s: %s", live.name, message)
        self.stop()
        unsent = (item.envelope for _, item in self._dispatches if item.incarnation == incarnation)
        untaken |= {
            envelope.id for envelope in unsent if envelope.kind is Kind.REQUEST and envelope.id is not None
        }
        live.offer(Lost(message, untaken=untaken))
        self._go_on()

    async def take_over(self) -> None:
        """Go on with a session of an earlier process, which is gone with its backend (N2).

        Raises:
            StorageFault: the log refused it just now.
        """
        try:
            text = "the server was restarted, and its MCP server with it"
            await self._live.put(Lost(text, taken_over=True))
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if self._machine.reason is None and not self._closed:
            self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        """Start a fresh backend with what the last one was told."""
        live = self._live
        carried = live.machine.carried
        incarnation = carried.incarnation
        if carried.futile:
            await asyncio.sleep(_BACKOFF * 4 ** (carried.futile - 1))
        revival: Revive | None = None
        while revival is None:
            try:
                await live.durable()
                revival = Revive(await self._orders(), await self._entries(carried.untaken))
            except (StorageFault, StorageError):
                if live.stale:
                    return
                await asyncio.sleep(RETRY_STORAGE)
        # Where all sessions begin anew at once, each is to have its time, or all of them would be late.
        async with self._revivals:
            self._replayed = asyncio.Event()
            live.offer(revival)
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPLAY):
                    await self._replayed.wait()
        if carried.incarnation == incarnation and carried.phase is Phase.REPLAYING:
            message = f"a fresh MCP server did not take in {_REPLAY:.0f} s what the last one had been told"
            self.lose(message, incarnation)

    def moved(self) -> None:
        """The session has taken an input: a fresh backend may have been told all."""
        if self._replayed is not None and self._machine.carried.phase is not Phase.REPLAYING:
            self._replayed.set()

    async def _orders(self) -> tuple[Waiting, ...]:
        """What a fresh backend is told, in the order in which the client said it."""
        machine = self._machine
        listens = (request.number for request in machine.inbox.open.values() if request.method == LISTEN)
        told = {n for n in (*machine.carried.orders.values(), *listens) if n <= machine.dispatched}
        return await self._entries(told)

    async def _entries(self, numbers: Iterable[int]) -> tuple[Waiting, ...]:
        """Messages as the log has them, in order."""
        log, key = self._live.log, self._live.key
        found = [await log.entries(key, number - 1, 1) for number in sorted(numbers)]
        return tuple(Waiting(entry.number, entry.data, peek(entry.data)) for (entry,) in found)

    def stop(self) -> None:
        """Begin to close the backend, if there is one; that is bounded, and `close` waits for it."""
        backend, self._backend = self._backend, None
        if backend is not None:
            closing = asyncio.create_task(self._put_away(backend))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _put_away(self, backend: Backend) -> None:
        try:
            await backend.close()
        except Exception:  # nobody is there to be told but whoever reads the log
            _log.exception("session %s: its MCP server did not close", self._name)

    async def close(self) -> None:
        """Hand over nothing more, begin nothing anew, close the backend."""
        self._closed = True
        tasks = [task for task in (self._dispatcher, self._reviving) if task is not None]
        for task in tasks:
            task.cancel()
        self.stop()
        await asyncio.gather(*tasks, return_exceptions=True)  # one may be starting a backend
        await asyncio.gather(*self._closing)
        self._held = None


class _Voice:
    """One incarnation of a backend, as its session hears it (`Sink`)."""

    def __init__(self, carrier: Carrier, incarnation: int) -> None:
        self._carrier = carrier
        self._incarnation = incarnation

    def emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
    ) -> Awaitable[None] | None:
        return self._carrier.emit(data, envelope, related, self._incarnation, more)

    async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
        self._carrier.lose(message, self._incarnation, untaken)
