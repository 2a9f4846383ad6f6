"""What the tests of backends share: a sink that remembers, and a way to see processes die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import pytest

from gapless.protocol.jsonrpc import Envelope, RequestId, peek

T = TypeVar("T")


async def soon(awaitable: Awaitable[T], seconds: float = 20) -> T:
    """Its result; a test that would wait for ever fails."""
    async with asyncio.timeout(seconds):
        return await awaitable


class Recorder:
    """A sink. While `gate` is closed, it takes a message and does not return."""

    def __init__(self) -> None:
        self.emitted: list[tuple[dict[str, Any], RequestId | None]] = []
        self.losses: list[str] = []
        self.untaken: frozenset[RequestId] = frozenset()
        self.gate = asyncio.Event()
        self.gate.set()
        self._changed = asyncio.Condition()
        self._read = 0

    async def emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
    ) -> None:
        assert envelope == peek(data)
        assert not self.losses
        async with self._changed:
            self.emitted += [(json.loads(line), related) for line in (data, *more)]
            self._changed.notify_all()
        await self.gate.wait()

    async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
        async with self._changed:
            self.losses.append(message)
            self.untaken = untaken
            self._changed.notify_all()

    async def next(self) -> dict[str, Any]:
        """The next message."""
        return (await self.next_related())[0]

    async def next_related(self) -> tuple[dict[str, Any], RequestId | None]:
        """The next message, and the request it belongs to."""
        async with self._changed:
            await soon(self._changed.wait_for(lambda: len(self.emitted) > self._read))
        self._read += 1
        return self.emitted[self._read - 1]

    async def loss(self) -> str:
        """What `lost` was told."""
        async with self._changed:
            await soon(self._changed.wait_for(lambda: self.losses))
        return self.losses[0]


class Lifelines:
    """Processes connect, say their names, and are dead once their connections end."""

    def __init__(self) -> None:
        self.port = 0
        self._lines: dict[str, asyncio.StreamReader] = {}
        self._changed = asyncio.Condition()

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        async with self._changed:
            self._lines[name] = reader
            self._changed.notify_all()

    async def born(self, *names: str) -> None:
        async with self._changed:
            await soon(self._changed.wait_for(lambda: self._lines.keys() >= {*names}))

    async def said(self, name: str) -> str:
        return (await soon(self._lines[name].readline())).decode().strip()

    async def dead(self, *names: str) -> None:
        for name in names:
            await soon(self._lines[name].read())


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


@pytest.fixture
async def lifelines() -> AsyncIterator[Lifelines]:
    lines = Lifelines()
    writers: list[asyncio.StreamWriter] = []

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await lines.welcome(reader, writer)

    server = await asyncio.start_server(welcome, "127.0.0.1", 0)
    lines.port = server.sockets[0].getsockname()[1]
    yield lines
    # Also ends what a failed test has left behind: it waits for this.
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()
