"""One connection to the server, as raw as it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from tests.attack.answers import Answer, Answers

__all__ = ["Wire", "ask", "connect"]


class Wire(asyncio.Protocol):
    """Hands on what comes, and lets its owner wait for something to be so.

    Attributes:
        over: whether nothing more comes.
    """

    transport: asyncio.Transport

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._waiter: asyncio.Future[None] | None = None
        self.over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        self._take(data)
        self._wake()

    def eof_received(self) -> None:
        """Nothing more comes; the transport closes itself."""
        self.over = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def write(self, data: bytes) -> None:
        """Send, unless it is gone."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        if not self.transport.is_closing():
            self.transport.write_eof()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, or nothing more comes, or time is up; whether it is so."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition() and not self.over and (left := deadline - loop.time()) > 0:
            self._waiter = loop.create_future()
            timer = loop.call_later(left, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        return condition()

    async def ended(self, seconds: float) -> bool:
        """Wait until nothing more comes."""
        return await self.until(lambda: self.over, seconds) or self.over


async def connect(port: int, take: Callable[[bytes], None]) -> Wire:
    """A connection to the server.

    Raises:
        OSError: there is none to be had.
    """
    _, wire = await asyncio.get_running_loop().create_connection(lambda: Wire(take), "127.0.0.1", port)
    return wire


async def ask(port: int, data: bytes, seconds: float = 15.0) -> Answer | None:
    """One good request, and its answer; `None` if there is none in time."""
    answers = Answers([data.partition(b" ")[0]])
    try:
        wire = await connect(port, answers.feed)
    except OSError:
        return None
    try:
        wire.write(data)
        if not await wire.until(lambda: bool(answers.whole), seconds):
            answers.end()
    finally:
        wire.transport.abort()
    return answers.whole[0] if answers.whole else None
