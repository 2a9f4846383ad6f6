"""Real `gapless serve` processes on one log, which can be stopped and killed; and a balancer before them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, cast

import apsw

from tests.server.harness import Server, listening

__all__ = ["Balancer", "Journal", "Node", "alive", "nodes"]

COUNTING = Path(__file__).with_name("counting_server.py")
STARTING = 30.0


def alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


class Journal:
    """What the counting servers have run, by what is on the disk: a line for each, `pid run`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[tuple[int, str]]:
        """Every run, in order."""
        if not self.path.exists():
            return []
        return [(int(pid), run) for pid, run in map(str.split, self.path.read_text().splitlines())]

    def runs(self) -> Counter[str]:
        """How often each was begun."""
        return Counter(run for _, run in self.lines())


class Node:
    """One server process, on a port of its own that it has again when it is started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: Process | None = None
        self._draining: asyncio.Task[None] | None = None
        self.stopped = False
        self.said = b""
        with listening() as free:
            self.port = int(free.getsockname()[1])
        # What speaks to it over the wire; there is nothing of it in this process.
        self.server = Server(cast(Any, None), cast(Any, None), cast(Any, None), self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self) -> None:
        """Start it; returns when it listens."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gapless", "serve", "--port", str(self.port)),
            *("--log", f"sqlite:///{self._folder / 'log.db'}", *self._options),
            *("--", sys.executable, "-I", "-S", str(COUNTING), str(self._folder / "journal")),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
        )
        listens = asyncio.Event()
        self._draining = asyncio.create_task(self._drain(self._process, listens))
        async with asyncio.timeout(STARTING):
            await listens.wait()
        assert self._process.returncode is None, self.said.decode()

    async def _drain(self, process: Process, listens: asyncio.Event) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(4096):
            self.said += chunk
            if b"is served at" in self.said:
                listens.set()
        await process.wait()  # so that who waits sees that it has ended
        listens.set()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)
        self.stopped = number == signal.SIGSTOP

    async def stand_still(self, *, committing: bool = False) -> None:
        """Stop it outside of a commit, or within one: then it keeps everybody else from writing."""
        assert self._process is not None
        async with asyncio.timeout(STARTING):
            while True:
                self.signal(signal.SIGSTOP)
                await asyncio.to_thread(os.waitid, os.P_PID, self._process.pid, os.WSTOPPED)
                if self._commits() == committing:
                    return
                self.signal(signal.SIGCONT)

    def _commits(self) -> bool:
        """Whether somebody holds the log's write lock."""
        with closing(apsw.Connection(str(self._folder / "log.db"))) as log:
            try:
                log.execute("BEGIN IMMEDIATE")
            except apsw.BusyError:
                return True
            log.execute("ROLLBACK")
            return False

    async def end(self, number: int) -> None:
        """Send it a signal that ends it, and wait until it is gone. No error if it is already."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self.signal(number)
        self.stopped = False
        async with asyncio.timeout(STARTING):
            await self._process.wait()
        self._process = None


@asynccontextmanager
async def nodes(folder: Path, count: int, *options: str) -> AsyncGenerator[list[Node]]:
    """Some servers on one log; what runs of them when the block ends is killed."""
    made = [Node(folder, *options) for _ in range(count)]
    try:
        await asyncio.gather(*(node.start() for node in made))
        yield made
    finally:
        await asyncio.gather(*(node.end(signal.SIGKILL) for node in made))
        for node in made:
            for drop in node.server.drops:
                drop()


class Balancer:
    """Gives every connection to one of the nodes, whichever; one that refuses is not asked again for it."""

    def __init__(self, made: list[Node], rng: random.Random) -> None:
        self._nodes = made
        self._rng = rng
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; the URL."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/mcp"

    async def close(self) -> None:
        """Cut everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            for node in self._rng.sample(self._nodes, len(self._nodes)):
                with suppress(OSError):
                    back, far = await asyncio.open_connection("127.0.0.1", node.port)
                    pumps = [asyncio.create_task(_pump(*way)) for way in ((reader, far), (back, writer))]
                    try:
                        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for pump in pumps:
                            pump.cancel()
                        await asyncio.gather(*pumps, return_exceptions=True)
                    return
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
