"""What `gapless torture` is aimed at: a server that runs, or one that it serves itself for as long."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from gapless.errors import TargetError, UsageError

if TYPE_CHECKING:
    from gapless.log.snapshot import Snapshot

__all__ = ["Aim", "Mortal", "aim", "aimed", "mortal", "serving"]

_STARTING: Final = 30.0
_LAST_WORDS: Final = 1.0
_BINDINGS: Final = 5
_BINDING: Final = 0.2
_STOPPING: Final = 10.0
_LISTENS: Final = re.compile(rb"http://127\.0\.0\.1:\d+\S*(?=,)")


@dataclass(frozen=True, slots=True)
class Aim:
    """A target as the command line names it: a URL, or the arguments of `gapless serve`."""

    url: str | None
    served: tuple[str, ...]

    @property
    def command(self) -> bool:
        """Whether it is a stdio server's command, which is started anew for every session."""
        return self.served[:1] == ("--",)

    @property
    def words(self) -> list[str]:
        """The end of a command line that names it again."""
        if self.url is not None:
            return [self.url]
        return list(self.served) if self.command else ["--app", *self.served]

    def __str__(self) -> str:
        return self.url or "gapless serve " + shlex.join(self.served)


def aim(words: Sequence[str], app: str | None) -> Aim:
    """Read the target of a command line.

    Raises:
        UsageError: there is none, or more than one.
    """
    hint = "gapless torture URL, gapless torture --app module:attr, or gapless torture -- CMD ARGS"
    if app is not None:
        if words:
            raise UsageError("both --app and another target are given", hint=hint)
        return Aim(None, (app,))
    if not words:
        raise UsageError("nothing to torture", hint=hint)
    if words[0].startswith(("http://", "https://")):
        if len(words) > 1:
            raise UsageError(f"{words[1]!r} follows the URL", hint=hint)
        if words[0].startswith("https://"):
            raise UsageError(
                "the faults are done to plain TCP, and https hides what they strike at",
                hint="use the http:// address behind the TLS proxy",
            )
        if not _is_address(words[0]):
            raise UsageError(f"{words[0]!r} is no address of a server", hint=hint)
        return Aim(words[0], ())
    return Aim(None, ("--", *words))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@asynccontextmanager
async def aimed(target: Aim, options: Sequence[str]) -> AsyncGenerator[tuple[str, int | None]]:
    """The target's URL and its process, if it is ours: served, with these options, until the block ends.

    Raises:
        TargetError: it does not start.
    """
    if target.url is not None:
        yield target.url, None
        return
    with tempfile.TemporaryDirectory(prefix="gapless-torture-") as folder:
        log = ("--log", f"sqlite:///{Path(folder) / 'torture.db'}")
        journal = str(Path(folder) / "journal")
        async with serving((*log, *options, *target.served), LADDER_JOURNAL=journal) as served:
            yield served


@asynccontextmanager
async def serving(arguments: Sequence[str], **environment: str) -> AsyncGenerator[tuple[str, int]]:
    """`gapless serve` with these arguments, on a free port, until the block ends: its URL and its process.

    Raises:
        TargetError: it does not start.
    """
    process = await _serve(("--port", "0", *arguments), environment)
    assert process.stderr is not None
    reading: asyncio.Task[None] | None = None
    try:
        url = await _listening(process.stderr)
        reading = asyncio.create_task(_drain(process.stderr))
        yield url, process.pid
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOPPING):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if reading is not None:
            await asyncio.wait({reading}, timeout=_LAST_WORDS)  # whoever it has started may hold the pipe
            reading.cancel()


class Mortal:
    """`gapless serve` on one log and one port: a process that may be killed, and started again.

    Attributes:
        folder: everything of it is in there, and goes with the block.
        url: of its MCP endpoint.
        journal: the file in which its ladder notes every climb that it begins.
        kept: the folder is to be left behind.
    """

    def __init__(self, target: Aim, options: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.kept = False
        self._log = folder / "torture.db"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}/mcp"
        self._arguments = ("--port", str(port), "--log", f"sqlite:///{self._log}", *options, *target.served)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start a process. It does not listen yet."""
        self._process = await _serve(self._arguments, {"LADDER_JOURNAL": str(self.journal)})

    async def listens(self) -> None:
        """Wait until it listens; if the dead one holds the port still, it is started again.

        Raises:
            TargetError: it has ended, or does not listen after half a minute.
        """
        for attempt in range(_BINDINGS):
            assert self._process is not None
            assert self._process.stderr is not None
            try:
                await _listening(self._process.stderr)
            except TargetError as error:
                if "is in use" not in str(error) or attempt == _BINDINGS - 1:
                    raise
                await asyncio.sleep(_BINDING)
                await self.start()
            else:
                self._reading = asyncio.create_task(_drain(self._process.stderr))
                return

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone; what its children complain of then is of no interest."""
        if self._process is None:
            return
        assert self._process.stderr is not None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.stderr.read(), _LAST_WORDS)
        self._process = self._reading = None

    def log(self) -> AbstractContextManager[Snapshot]:
        """Its log as it is now."""
        from gapless.log.snapshot import snapshot

        return snapshot(self._log)


@asynccontextmanager
async def mortal(target: Aim, options: Sequence[str]) -> AsyncGenerator[Mortal]:
    """A target that we serve, not started yet; what runs of it when the block ends is killed."""
    folder = Path(tempfile.mkdtemp(prefix="gapless-torture-"))
    server = Mortal(target, options, folder)
    try:
        yield server
    finally:
        await server.kill()
        if not server.kept:
            shutil.rmtree(folder)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def _serve(arguments: Sequence[str], environment: Mapping[str, str]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gapless", "serve", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def _listening(stream: asyncio.StreamReader) -> str:
    """Wait until the server says where it listens.

    Raises:
        TargetError: it ends before that, or says nothing of the kind for too long.
    """
    said = b""
    try:
        async with asyncio.timeout(_STARTING):
            while (found := _LISTENS.search(said)) is None:
                chunk = await stream.read(4096)
                if not chunk:
                    raise TargetError(f"gapless serve ended: {said.decode(errors='replace').strip()}")
                said += chunk
    except TimeoutError:
        raise TargetError(f"gapless serve does not listen after {_STARTING:.0f} s") from None
    return found[0].decode()


async def _drain(stream: asyncio.StreamReader) -> None:
    """What the server says after it listens is passed on, for whoever looks for a reason."""
    while chunk := await stream.read(4096):
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
