"""Servers in processes of their own, on free ports, with a fault proxy in front where one is wanted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gapless.torture.faults import Direction, FaultProxy, Link
from tests.interop.installed import ROOT

__all__ = ["PORT", "Cut", "Ended", "gapless", "run", "serving", "through"]

PORT: Final = "{port}"
"""Stands for a free port in the command of a server."""

_START: Final = 30.0
"""Seconds that a server has until it accepts connections."""

_END: Final = 10.0
"""Seconds that a process has to end once it is asked to."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a process: its exit status, `None` if it took too long, and what it wrote."""

    status: int | None
    stdout: str
    stderr: str


def gapless(*words: str) -> list[str]:
    """The command for `gapless serve` in front of what `words` name."""
    return [sys.executable, "-m", "gapless", "serve", "--port", PORT, "--log", "memory:", *words]


@asynccontextmanager
async def serving(command: Sequence[str]) -> AsyncGenerator[str]:
    """Run a server, on a free port in place of `PORT`. Its URL.

    Raises:
        RuntimeError: it ended, or accepted nothing in time.
    """
    port = _free_port()
    process = await asyncio.create_subprocess_exec(
        *[str(port) if word == PORT else word for word in command],
        cwd=ROOT,
        env=_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    told = asyncio.create_task(process.stderr.read())
    try:
        await _accepts(port, process)
        yield f"http://127.0.0.1:{port}/mcp"
    except _NotServing as error:
        await _end(process)
        raise RuntimeError(f"{error}: {(await told).decode(errors='replace')[-400:]}") from None
    finally:
        await _end(process)
        await told


async def run(
    command: Sequence[str], seconds: float, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its end, for so long at most."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**_environment(), **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    talk = asyncio.create_task(process.communicate())
    done, _ = await asyncio.wait({talk}, timeout=seconds)
    if not done:
        await _end(process)
    stdout, stderr = await talk
    status = process.returncode if done else None
    return Ended(status, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


class Cut:
    """A proxy in front of a server, that can reset the connection on which something is about to pass.

    Attributes:
        url: of the server, through the proxy.
        struck: whether a connection was reset.
        resumed: whether a client came back since, and said where it was.
    """

    def __init__(self, port: int) -> None:
        self.url = ""
        self.struck = False
        self.resumed = False
        self.proxy = FaultProxy("127.0.0.1", port, self._asked)
        self._pattern = b""

    def aim(self, pattern: bytes) -> None:
        """Strike once, where `pattern` is about to pass to the client, be it on a connection that is open."""
        self._pattern = pattern
        for link in self.proxy.links:
            self._arm(link)

    def _asked(self, link: Link) -> None:
        if self.struck:
            self.resumed |= link.request.startswith("GET") and "last-event-id" in link.headers
        elif self._pattern:
            self._arm(link)

    def _arm(self, link: Link) -> None:
        link.arm(Direction.TO_CLIENT, self._pattern, self._strike, before=True)

    def _strike(self, link: Link) -> None:
        if not self.struck:
            self.struck = True
            link.reset()


@asynccontextmanager
async def through(url: str) -> AsyncGenerator[Cut]:
    """The same server through a proxy that can cut."""
    cut = Cut(int(url.split(":")[2].split("/", maxsplit=1)[0]))
    await cut.proxy.start()
    cut.url = f"http://127.0.0.1:{cut.proxy.port}/mcp"
    try:
        yield cut
    finally:
        await cut.proxy.close()


class _NotServing(Exception):
    pass


async def _accepts(port: int, process: asyncio.subprocess.Process) -> None:
    for _ in range(int(_START / 0.1)):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        if process.returncode is not None:
            raise _NotServing(f"the server ended with status {process.returncode}")
        await asyncio.sleep(0.1)
    raise _NotServing(f"the server accepted nothing within {_START:g} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    for asked in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, asked)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END):
                await process.wait()


def _environment() -> dict[str, str]:
    """Ours; the project's modules are found from anywhere, and deprecations of the SDK are no news."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
