"""A host's side of `gapless bridge`, and what is seen between the bridge and its server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gapless.torture.faults import FaultProxy, Link
from tests.cli.harness import PATIENCE, environment
from tests.real.serving import proxied

BRIDGE = ["-W", "error", "-m", "gapless", "bridge"]
LEAVES_WITHIN = 5.0
"""Seconds in which the command ends once it was told to."""

T = TypeVar("T")


def request(id: int | str, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def call(id: int | str, tool: str, **arguments: Any) -> dict[str, Any]:
    return request(id, "tools/call", name=tool, arguments=arguments, _meta={"progressToken": f"of {id}"})


INITIALIZE = request(
    0,
    "initialize",
    protocolVersion="2025-11-25",
    capabilities={"elicitation": {}},
    clientInfo={"name": "host", "version": "1"},
)
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}


def customized(folder: Path, code: str) -> str:
    """A PYTHONPATH with which a process runs `code` first."""
    (folder / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(folder), *filter(None, [environment().get("PYTHONPATH")])])


async def soon(work: Awaitable[T], seconds: float = PATIENCE) -> T:
    return await asyncio.wait_for(work, seconds)


class Host:
    """A host's side of a bridge: it writes lines, and keeps all that it is told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stderr is not None
        self._stdin, self._stderr = process.stdin, process.stderr
        self._stdout = process.stdout or asyncio.StreamReader()
        self.err = ""
        self.told: list[dict[str, Any]] = []

    async def send(self, *messages: dict[str, Any] | bytes) -> None:
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode()
            self._stdin.write(line + b"\n")
        await soon(self._stdin.drain())

    async def line(self) -> bytes:
        """The next line; empty at the end of stdout."""
        return await soon(self._stdout.readline())

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read up to a message that is wanted."""
        while line := await self.line():
            self.told.append(json.loads(line))
            if wanted(self.told[-1]):
                return self.told[-1]
        raise AssertionError(f"stdout ended; stderr: {await self.says('')}")

    async def answer(self, id: int | str | None) -> dict[str, Any]:
        return await self.until(lambda told: "method" not in told and told["id"] == id)

    async def begin(self) -> None:
        await self.send(INITIALIZE)
        assert "result" in await self.answer(0)
        await self.send(INITIALIZED)

    async def says(self, words: str) -> str:
        """Wait until stderr has `words` in it, or has ended; all of it."""
        while not words or words not in self.err:
            more = await soon(self._stderr.read(4096))
            if not more:
                break
            self.err += more.decode()
        assert words in self.err, self.err
        return self.err

    def leave(self, last: bytes = b"") -> None:
        self._stdin.write(last)
        self._stdin.close()

    def deafen(self) -> None:
        """Close the reading end of its stdout."""
        transport = self._stdout._transport  # type: ignore[attr-defined]
        transport.close()

    async def ends(self, seconds: float = PATIENCE) -> int:
        """Read what is left; the exit status."""
        await soon(self.says(""), seconds)
        while self.process.stdout is not None and (line := await self.line()):
            self.told.append(json.loads(line))
        return await soon(self.process.wait())

    def steps(self, id: int | str) -> list[int]:
        """The progress of a call, in the order told."""
        reports = [told["params"] for told in self.told if told.get("method") == "notifications/progress"]
        return [report["progress"] for report in reports if report["progressToken"] == f"of {id}"]


Bridged = Callable[..., Awaitable[Host]]


class World:
    """What passes between a bridge and its server."""

    proxy: FaultProxy

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.straight = ""

    @classmethod
    @asynccontextmanager
    async def before(cls, url: str) -> AsyncGenerator[World]:
        """In front of the server at `url`."""
        made = cls()
        made.straight = url
        async with proxied(url) as (made.url, made.proxy):
            made.proxy.on_request = made._seen
            yield made

    def _seen(self, link: Link) -> None:
        self.asked.append(link.request)
        self.headers.append(dict(link.headers))

    def cut(self) -> int:
        """Reset what carries events; how many that were."""
        links = [link for link in self.proxy.links if link.carries_events]
        for link in links:
            link.reset()
        return len(links)

    @property
    def session(self) -> str:
        """The path of the session, as the bridge asked for it."""
        return next(found[0] for asked in self.asked if (found := re.search(r"/mcp/session/[^/ ?]+", asked)))

    @property
    def deleted(self) -> bool:
        return any(asked.startswith("DELETE /mcp/session/") for asked in self.asked)


async def delete(url: str, path: str) -> None:
    """End a session behind its client's back."""
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"DELETE {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert b" 204 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


def memory(host: Host) -> int:
    """Bytes that a bridge has now."""
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(host.process.pid)], stdout=subprocess.PIPE, check=True
    )
    return int(shown.stdout) * 1024


class Pile:
    """What waits for a host that does not read."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    async def line(self) -> dict[str, Any]:
        return json.loads(await soon(asyncio.to_thread(self._pipe.readline)))

    async def rest(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in await soon(asyncio.to_thread(self._pipe.readlines))]


@asynccontextmanager
async def unread(bridge: Bridged, *args: str) -> AsyncGenerator[tuple[Host, Pile]]:
    """A bridge whose host reads nothing but what the test does; it has begun a talk."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        host, pile = await bridge(*args, stdout=writing), Pile(pipe)
        os.close(writing)
        await host.send(INITIALIZE)
        assert "result" in await pile.line()
        await host.send(INITIALIZED, call(1, "talk"))
        yield host, pile
