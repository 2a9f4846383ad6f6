"""MCP servers over stdio: one process per session, a JSON-RPC message a line.

Nothing that a server does costs more than its own session: whatever it prints is bounded in
memory, what is no JSON-RPC is skipped, its end is reported, and it does not outlive Gapless, whichever
way either ends (see `reaper.py`). POSIX only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Final

from gapless.backends.base import Backend, Sink
from gapless.errors import BackendError, MalformedError, UsageError
from gapless.protocol.jsonrpc import Envelope, Kind, error_response, peek_lines
from gapless.protocol.lines import Lines, addressed

__all__ = ["MAX_MESSAGE_BYTES", "StdioBackends"]

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""The default limit on a server's message: 4 MiB."""

_log: Final = logging.getLogger("gapless.backends.stdio")

_REAPER: Final = str(Path(__file__).resolve().with_name("reaper.py"))
_CHUNK: Final = 64 * 1024
_SHOWN: Final = 200
_PATIENCE: Final = 4.0
"""Seconds for the reaper's two steps, of one second each, and then some."""

_INVALID_REQUEST: Final = -32600
_INTERNAL_ERROR: Final = -32603


class StdioBackends:
    """Starts `command` anew for each session.

    What the command writes to stderr goes to ours. Lines on its stdout that are no JSON-RPC
    messages (banners, prints) are logged, cut to 200 characters, and skipped.

    Args:
        command: the program, looked up in the PATH, and its arguments; no shell is involved.
        env: the whole environment of the command; ours, if `None`.
        cwd: the directory it starts in; ours, if `None`.
        max_message_bytes: what one of its messages may have. A longer one is never held in memory:
            an error under its ID takes its place (W5).
        log: told, as warnings, what was skipped.

    Raises:
        UsageError: `command` is empty.
    """

    spawns = True

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        log: logging.Logger = _log,
    ) -> None:
        if not command:
            raise UsageError("an empty command", hint="name the program to run")
        self._command = tuple(command)
        self._env = env
        self._cwd = os.fspath(cwd or "")
        self._limit = max_message_bytes
        self._log = log

    async def start(self) -> None:
        """Do nothing: processes share nothing."""

    async def open(self, sink: Sink) -> Backend:
        """Start the command.

        Raises:
            BackendError: it cannot be started (not found, not executable, no such `cwd`).
        """
        try:
            child = await _Child.start(self._command, self._env, self._cwd)
        except OSError as error:  # there is no process or descriptor to be had
            raise BackendError(f"cannot start {self._command[0]!r}: {error}") from None
        return _StdioBackend(child, sink, self._limit, self._log)

    async def close(self) -> None:
        """Do nothing: processes share nothing."""


Spoken = tuple[bytes, Envelope, tuple[bytes, ...]]
"""A message, and those that follow it and are as it."""


class _StdioBackend(Backend):
    """One process. `_pumping` alone calls the sink, so its order and its `lost` need no lock."""

    def __init__(self, child: _Child, sink: Sink, limit: int, log: logging.Logger) -> None:
        self._child = child
        self._sink = sink
        self._limit = limit
        self._log = log
        self._closing: asyncio.Task[None] | None = None
        self._reading = True
        self._discarding = False
        self._pumping = asyncio.create_task(self._pump())

    async def send(self, data: bytes, envelope: Envelope) -> None:
        await self._child.write(data + b"\n")

    async def close(self) -> None:
        if self._closing is None:
            # The sink may close us from within: its task then ends by itself, once that returns.
            from_within = asyncio.current_task() is self._pumping
            self._closing = asyncio.create_task(self._close(from_within))
        await asyncio.shield(self._closing)

    async def _close(self, from_within: bool) -> None:
        if from_within:
            await self._child.stop()
            return
        self._discarding = True
        self._pumping.cancel()
        await asyncio.wait({self._pumping})
        if not self._reading:  # it has closed its stdout already
            await self._child.stop()
            return
        # What it says while it ends is read and dropped: a broken pipe is no way to say goodbye.
        discarding = asyncio.create_task(self._discard())
        await self._child.stop()
        discarding.cancel()
        await asyncio.wait({discarding})
        self._child.close_stdout()

    async def _discard(self) -> None:
        while await self._child.read():
            pass

    async def _pump(self) -> None:
        """Hand over what the process writes, to its end; then say how it ended, unless closed."""
        lines = Lines(self._limit)
        try:
            while data := await self._child.read():
                for line, envelope, more in self._messages(lines.feed(data)):
                    full = self._sink.emit(line, envelope, None, more)
                    if full is not None:
                        await full
                    if self._closing is not None:
                        return
        finally:
            if not self._discarding:
                self._reading = False
                self._child.close_stdout()
        if lines.size:
            self._warn("an unfinished line at the end of stdout", lines.rest)
        # Whoever has closed its stdout will say nothing more, even if it still runs.
        ending = await self._child.stop()
        await self._sink.lost(f"the MCP server {self._child.name!r} {ending}")

    def _messages(self, lines: Iterable[tuple[bytes, int]]) -> Iterator[Spoken]:
        """The messages in these lines, as the sink takes them: plain ones in runs."""
        found = [*lines]
        run: list[bytes] = []
        of: Envelope | None = None
        for (line, size), (message, said) in zip(found, peek_lines([line for line, _ in found]), strict=True):
            told = said
            if size > self._limit:
                told = MalformedError(f"{size} bytes, which is above the limit of {self._limit}")
            if told is None:
                continue  # white space
            if isinstance(told, Envelope) and told.plain:
                run.append(message)
                of = of or told
                continue
            if of is not None:
                yield run[0], of, tuple(run[1:])
                run, of = [], None
            if isinstance(told, Envelope):
                yield message, told, ()
            elif instead := self._refuse(line, str(told)):
                yield *instead, ()
        if of is not None:
            yield run[0], of, tuple(run[1:])

    def _refuse(self, line: bytes, trouble: str) -> tuple[bytes, Envelope] | None:
        """What takes the place of a message that nobody may see (W4, W5); `None` if no one waits for it."""
        self._warn(trouble, line)
        refused = addressed(line)
        if refused is None:
            return None
        if refused.kind is Kind.RESPONSE:
            told = f"unusable answer of the MCP server: {trouble}"
            return error_response(refused.id, _INTERNAL_ERROR, told), Envelope(Kind.RESPONSE, id=refused.id)
        answer = error_response(refused.id, _INVALID_REQUEST, f"unusable request: {trouble}")
        self._child.write_soon(answer + b"\n")
        return None

    def _warn(self, trouble: str, line: bytes) -> None:
        shown = line[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
        self._log.warning("%s: skipped from stdout: %s: %r", self._child.name, trouble, shown)


class _Child:
    """A running command: its pipes, and the reaper's word on its end."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        control: asyncio.StreamWriter,
        stdout: int,
    ) -> None:
        assert process.stdin is not None
        self.name: Final = name  # without the arguments, which may hold secrets
        self._process = process
        self._stdin = process.stdin
        self._control = control
        self._stdout = stdout
        self._said: bytes | None = None
        self._watched = False
        self._pid: int | None = None
        self._trouble = ""
        self._begun = asyncio.Event()
        self._wake = asyncio.Event()
        self._ended = asyncio.create_task(self._follow(reader))
        self._ended.add_done_callback(lambda _: self._wake.set())

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str] | None, cwd: str) -> _Child:
        """Start `command` in a process group of its own, under a reaper.

        Raises:
            BackendError: the reaper could not start it.
            OSError: not even the reaper could be started.
        """
        async with AsyncExitStack() as undo:
            child = await cls._spawn(command, env, cwd)
            undo.push_async_callback(child.stop)
            undo.callback(child.close_stdout)
            await child._begun.wait()
            if child._pid is None:
                raise BackendError(f"cannot start {command[0]!r}: {child._trouble}")
            undo.pop_all()
        return child

    @classmethod
    async def _spawn(cls, command: Sequence[str], env: Mapping[str, str] | None, cwd: str) -> _Child:
        with ExitStack() as undo, ExitStack() as passed:
            ours, theirs = socket.socketpair()
            passed.callback(theirs.close)  # the reaper alone may hold it: its death is an end of file
            reader, control = await asyncio.open_unix_connection(sock=ours)
            undo.callback(control.close)
            stdout, written = os.pipe()
            passed.callback(os.close, written)
            undo.callback(os.close, stdout)
            os.set_blocking(stdout, False)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _REAPER, str(theirs.fileno()), cwd),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=written,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C in our terminal is ours to handle
                env=env,
            )
            undo.pop_all()
        return cls(command[0], process, reader, control, stdout)

    async def read(self) -> bytes:
        """The next bytes of stdout, at most 64 KiB; none once nothing more can come."""
        while self._said is None:
            if self._ended.done():
                # All it wrote is read, and no more: somebody outside its group may hold the pipe for ever.
                await asyncio.sleep(0)  # and may fill it without a pause, which must not starve the others
                self._watch(False)
                self._readable()
                break
            self._wake.clear()
            self._watch(True)
            await self._wake.wait()
        said, self._said = self._said, None
        return said or b""

    def _readable(self) -> None:
        """Read one chunk ahead of whoever takes it. Then the pipe fills, and the server waits."""
        if self._said is not None:
            self._watch(False)
            return
        with suppress(BlockingIOError):
            self._said = os.read(self._stdout, _CHUNK)
            self._wake.set()

    def _watch(self, watched: bool) -> None:
        if watched != self._watched:
            self._watched = watched
            loop = asyncio.get_running_loop()
            if watched:
                loop.add_reader(self._stdout, self._readable)
            else:
                loop.remove_reader(self._stdout)

    def close_stdout(self) -> None:
        """Read no more. Not idempotent."""
        self._watch(False)
        os.close(self._stdout)

    async def write(self, data: bytes) -> None:
        """Write to stdin; returns when no more than 64 KiB are waiting for the server to read.

        Raises:
            BackendError: nobody will read it.
        """
        self.write_soon(data)
        with suppress(ConnectionError):
            await self._stdin.drain()
        if self._stdin.is_closing():
            raise BackendError(f"the MCP server {self.name!r} is gone")

    def write_soon(self, data: bytes) -> None:
        """Write to stdin without waiting for a server which may itself be waiting for us."""
        if not self._stdin.is_closing():
            self._stdin.write(data)

    async def stop(self) -> str:
        """End it, if it still runs; returns how it ended, within 5 seconds. May be called again."""
        if not self._stdin.is_closing():
            # Not `close`: what it has not read by now would keep the end of file from it.
            self._stdin.transport.abort()
        if not self._ended.done():
            with suppress(OSError):  # it ends this very moment
                self._control.write_eof()
        await asyncio.wait({self._ended}, timeout=_PATIENCE)
        if not self._ended.done():  # the reaper hangs, or what it kills cannot die now
            with suppress(ProcessLookupError):
                self._process.kill()
        ending = await asyncio.shield(self._ended)
        self._control.close()
        for pipe in (self._control, self._stdin):
            with suppress(ConnectionError):
                await pipe.wait_closed()
        await self._process.wait()
        return ending

    async def _follow(self, reader: asyncio.StreamReader) -> str:
        """Note whether the command has started; returns how it ended."""
        said, about = await _word(reader)
        if said == "started":
            self._pid = int(about)
        else:
            self._trouble = about or "its supervisor died"
        self._begun.set()
        said, about = await _word(reader)
        if said == "exited":
            return _ending(int(about))
        if self._pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        return "was killed, for its supervisor died"


async def _word(reader: asyncio.StreamReader) -> tuple[str, str]:
    said, _, about = (await reader.readline()).decode().strip().partition(" ")
    return said, about


def _ending(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    names = {known.value: known.name for known in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"
