"""A server process: `gapless serve` as its command runs it, on a simulated machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

import apsw
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gapless.errors import GaplessError, StorageError
from gapless.protocol.block import BLOCK_OVERHEAD
from gapless.protocol.refusal import CLOSE_RESTART
from gapless.protocol.settings import Limits
from gapless.server.app import Gapless, Settings, build
from tests.simulation.bench import Bench
from tests.simulation.disk import Disk
from tests.simulation.ledger import Ledger, RecordedLog
from tests.simulation.loop import Process
from tests.simulation.network import Address, Network

__all__ = ["Node"]

_GRACE: Final = 2
_PATIENCE: Final = 4.0
"""Seconds after which the command leaves whatever still runs."""
_LOG: Final = "log.db"
_SKEW: Final = 5.0
"""Seconds by which wall clocks may be wrong."""


class Node:
    """One server, over all its processes. Once started it is started again whenever it ends.

    Attributes:
        process: the present one, or the last.
        pause: seconds until the next one begins.
        starts: how many there have been.
    """

    process: Process
    app: Gapless
    bench: Bench

    def __init__(
        self,
        name: str,
        network: Network,
        disk: Disk,
        ledger: Ledger,
        random: Random,
        wrong: Callable[[str], None],
        *,
        at: Address,
        limits: Limits,
    ) -> None:
        self.name = name
        self.network = network
        self.disk = disk
        self.ledger = ledger
        self.random = random
        self.wrong = wrong
        self.at = at
        self.limits = limits
        self.pause = 0.0
        self.starts = 0
        self.retired = False
        self.stopping = False
        self.ready = False
        self._machine = False
        self._next: asyncio.Handle | None = None
        self._stop: asyncio.Event
        self._loop = network.loop

    @property
    def up(self) -> bool:
        """Whether there is a process that serves."""
        return self.ready and self.process.alive

    def start(self) -> None:
        """A process begins."""
        self.starts += 1
        self.ready = self.stopping = self._machine = False
        self._stop = asyncio.Event()
        skew = self.random.uniform(-_SKEW, _SKEW)
        self.process = self._loop.process(f"{self.name}.{self.starts}", self.random.randrange(10**6), skew)
        vfs = self.disk.mount(self.process)
        self.process.ends.append(self._ended)
        self.process.spawn(self._serve(vfs))

    def kill(self, pause: float, steps: int) -> None:
        """The process dies, `steps` callbacks from now; the next one begins after `pause` seconds."""
        self.network.trace.note(self.name, f"dies after {self.process.steps + steps} steps")
        self.pause = pause
        self.process.doom(steps)

    def lose_power(self) -> None:
        """The machine dies; it is for others to start it again."""
        self.network.trace.note(self.name, "dies with its machine")
        self._machine = True
        if self._next is not None:
            self._next.cancel()
        self.process.kill()

    def stop(self, pause: float) -> None:
        """It is asked to end, as by SIGTERM."""
        self.network.trace.note(self.name, "is asked to end")
        self.pause = pause
        self._stop.set()

    def retire(self) -> None:
        """It is asked to end for good."""
        self.retired = True
        if self._next is not None:
            self._next.cancel()
        self.stop(0.0)

    def _ended(self) -> None:
        self.ready = False
        self.network.died(self.process, machine=self._machine)
        if not self.retired and not self._machine:
            self._next = self._loop.schedule(self._loop.now + self.pause, self.start)

    async def _serve(self, vfs: str) -> None:
        log = RecordedLog(_LOG, inline=True, vfs=vfs, clock=lambda: time.time())
        log.place = log._path = _LOG  # where the test's directory lies must make no difference
        log.ledger = self.ledger
        self.bench = Bench(self.ledger, self.wrong)
        app = self.app = build(log, self.bench, Settings(limits=self.limits))
        try:
            await app.start()
        except GaplessError as error:
            self.network.trace.note(self.process, f"cannot start: {error}")
            self.pause = 0.5
            self.process.kill()
            await asyncio.sleep(0)
        server = self._server(app)
        listener = self.network.listen(
            self.at,
            self.process,
            lambda: HttpToolsProtocol(
                config=server.config, server_state=server.server_state, app_state={}, _loop=self._loop
            ),
        )
        self.ready = True
        self.network.trace.note(self.process, "serves")
        with suppress(StorageError):
            await log.audit()
        await self._stop.wait()
        self.stopping = True
        self._loop.schedule(self._loop.now + _PATIENCE, self.process.kill)
        app.sessions.drain(CLOSE_RESTART)
        listener.close()
        await server.shutdown()
        with suppress(apsw.Error):  # only where a VFS is in Python does SQLite fail to close for its errors
            await app.close()
        self.network.trace.note(self.process, "ends")
        left = [task for task in self._loop.tasks(self.process) if task is not asyncio.current_task()]
        if left:
            self.wrong(f"{self.process} ends, and leaves {left[0]!r}")
        self.process.kill()

    def _server(self, app: Gapless) -> uvicorn.Server:
        """As `gapless serve` configures it."""
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            ws_ping_interval=None,
            ws_max_size=self.limits.max_message_bytes + BLOCK_OVERHEAD + 64 * 1024,
            lifespan="off",
            access_log=False,
            server_header=False,
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=_GRACE,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        server.servers = []
        server.server_state.connections = _Ordered()  # type: ignore[assignment]
        return server


class _Ordered(dict[Any, None]):
    """A set of connections whose order is no accident."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]
