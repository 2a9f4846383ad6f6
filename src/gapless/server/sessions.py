"""All sessions of one server: open, find, expire, bury."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gapless.backends.base import BackendFactory
from gapless.errors import StorageError
from gapless.log.base import Log, SessionKey, Stored
from gapless.protocol.cursor import LINK_BYTES, Link
from gapless.protocol.record import read_record, restore, write_record
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from gapless.server.live import Live, StorageFault

__all__ = ["Sessions", "own"]

_log: Final = logging.getLogger("gapless.sessions")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An ended session: its reason is told until `until` (B4)."""

    principal: str
    refusal: Refusal
    until: float


class Sessions:
    """All sessions of one server."""

    def __init__(self, log: Log, backends: BackendFactory, limits: Limits) -> None:
        self.log = log
        self.backends = backends
        self.limits = limits
        self._live: dict[SessionKey, Live] = {}
        self._tombstones: dict[SessionKey, Tombstone] = {}
        self._loading: dict[SessionKey, asyncio.Task[None]] = {}
        self._janitor: asyncio.Task[None] | None = None
        self.draining = False

    async def start(self) -> None:
        """Open the log and whatever the backends share."""
        await self.log.start()
        await self.backends.start()
        self._janitor = asyncio.create_task(self._clean())

    async def close(self) -> None:
        """Close every backend and the log. Connections have been told to go by `drain`."""
        if self._janitor is not None:
            self._janitor.cancel()
        try:
            await asyncio.gather(*(live.close() for live in self._live.values()))
            await self.backends.close()
        finally:
            await self.log.close()

    def drain(self, code: int) -> None:
        """Tell every connection to go: event streams end after `retry:`, sockets close with `code`."""
        self.draining = True
        for live in self._live.values():
            for delivery in live.machine.connections.values():
                delivery.close = delivery.close or code
                delivery.retry = delivery.retry or live.machine.limits.retry
            live.wake()

    async def open(self, view: View, principal: str) -> tuple[str, Live]:
        """Open a session; its token is told once and stored only as a hash (§9).

        Raises:
            StorageError: the log could not take it.
        """
        token = secrets.token_urlsafe(32)
        key = _key(token)
        link = Link(secrets.token_bytes(LINK_BYTES))
        now = asyncio.get_running_loop().time()
        machine = Session(view, link, self.limits, self.log.durability.value, now)
        await self.log.create(key, write_record(machine, principal, None), link)
        live = self._live[key] = Live(key, principal, machine, self.log, self.backends)
        return token, live

    async def find(self, token: str, principal: str) -> Live | Refusal:
        """The session behind a token, or why there is none: another principal's is as none (§9)."""
        key = _key(token)
        live = self._live.get(key)
        if live is not None and live.stale:
            del self._live[key]
            live = None
        if live is None and key not in self._tombstones:
            await self._load(key)
            live = self._live.get(key)
        if live is not None and live.principal == principal:
            return live
        stone = self._tombstones.get(key)
        if stone is not None and stone.principal == principal:
            return stone.refusal
        return Refusal(Reason.SESSION_UNKNOWN, "no such session")

    async def _load(self, key: SessionKey) -> None:
        """Find a session of an earlier process in the log, once for all who ask at the same time."""
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._take_over(key))
            loading.add_done_callback(lambda _: self._loading.pop(key))
        await asyncio.shield(loading)

    async def _take_over(self, key: SessionKey) -> None:
        """Own a session of an earlier process. Its backend is gone, so it ends (N2)."""
        stored = await self.log.load(key)
        if stored is None or key in self._live:
            return
        now = asyncio.get_running_loop().time()
        machine, principal, fence = await own(self.log, stored, self.limits, now)
        if key in self._live:
            return
        live = self._live[key] = Live(key, principal, machine, self.log, self.backends, fence)
        if machine.reason is None:
            await live.end(Reason.BACKEND_LOST, "the server was restarted and its MCP server with it")

    def all(self) -> Iterable[Live]:
        """The sessions that are live in this process."""
        return tuple(self._live.values())

    async def _clean(self) -> None:
        try:
            await self._sweep()
        except StorageError as error:
            _log.warning("the log could not be swept: %s", error.line)
        while True:
            await asyncio.sleep(min(5.0, self.limits.session_expiry / 4))
            await self.clean(asyncio.get_running_loop().time())

    async def _sweep(self) -> None:
        """Bury what earlier processes left in the log: the ended, and those that nobody came back for."""
        unix = time.time()
        for stored in await self.log.sessions():
            record = read_record(stored.record)
            if stored.key in self._live:
                continue
            if record.ended_at is not None:
                if unix >= record.ended_at + self.limits.tombstone:
                    await self.log.remove(stored.key)
            elif unix >= stored.updated + self.limits.session_expiry + self.limits.tombstone:
                await self._load(stored.key)

    async def clean(self, now: float) -> None:
        """Expire idle sessions, evict what is old, bury the ended and forget the buried (§8)."""
        for live in self.all():
            try:
                await self._look_after(live, now)
            except StorageFault as error:
                _log.warning("session %s: %s", live.key.hex()[:8], error)  # the next round tries again
        for key, stone in list(self._tombstones.items()):
            if now >= stone.until:
                try:
                    await self.log.remove(key)
                except StorageError as error:
                    _log.warning("session %s: %s", key.hex()[:8], error)
                else:
                    del self._tombstones[key]

    async def _look_after(self, live: Live, now: float) -> None:
        machine = live.machine
        if live.stale:
            await live.close()
            self._live.pop(live.key, None)
            return
        if machine.expired(now):
            await live.end(Reason.SESSION_EXPIRED)
        live.evict(now)
        over = machine.ended()
        if over is not None and not machine.connections:
            await live.durable()
            await live.close()
            self._tombstones[live.key] = Tombstone(live.principal, over.refusal, now + self.limits.tombstone)
            del self._live[live.key]


async def own(log: Log, stored: Stored, limits: Limits, now: float) -> tuple[Session, str, int]:
    """A session's machine, its principal, and the fence to write it under (N1).

    Whoever wrote it before writes no more from here on, unless it is over, when nobody does.

    Raises:
        StorageError: the log could not be read or written.
    """
    fence = stored.fence
    if read_record(stored.record).reason is None:
        fence = await log.acquire(stored.key)
        stored = await log.load(stored.key) or stored  # as it is now that nobody else can write
    record = read_record(stored.record)
    machine = restore(
        record,
        committed=stored.committed,
        link=stored.link,
        floor=stored.floor,
        floor_link=stored.floor_link,
        received=stored.received,
        limits=limits,
        durability=log.durability.value,
        now=now,
    )
    return machine, record.principal, fence


def _key(token: str) -> SessionKey:
    return SessionKey(hashlib.sha256(token.encode(errors="surrogateescape")).digest())
