"""What `gapless torture` is aimed at: a server that runs, or one that it serves itself for as long."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gapless.errors import TargetError, UsageError

__all__ = ["Aim", "aim", "aimed", "serving"]

_STARTING: Final = 30.0
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
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gapless", "serve", "--port", "0", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
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
            await asyncio.wait({reading}, timeout=1.0)  # whoever it has started may hold the pipe
            reading.cancel()


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
