"""What the clients by hand share: how they ask, and how they read what comes, whoever sent it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import httpx2
import msgspec

from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import Block, BlockDecoder

__all__ = [
    "ANSWER",
    "ASKED",
    "IDLE",
    "LIMIT",
    "Answer",
    "http_client",
    "json_object",
    "message_of",
    "sequence_of",
]

IDLE: Final = 2.0
"""Seconds of nothing at all, not even a comment, after which a stream is taken for dead."""

ASKED: Final = 30.0
"""Seconds that an answer may take where no fault is done: a server may have a process to start first."""

ANSWER: Final = 5.0
"""Seconds that a response may take to begin."""

_BODY: Final = 5.0
"""Seconds that a body may take."""

LIMIT: Final = 16 * 1024 * 1024
"""Bytes of a block, or of a frame."""


def http_client() -> httpx2.AsyncClient:
    """For a client that faults are done to.

    No connection is used twice: one that a fault has broken must not fail the next request too. Nothing
    is compressed: the faults look for patterns in what passes.
    """
    return httpx2.AsyncClient(
        transport=_Transport(
            verify=False, trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0)
        ),
        trust_env=False,
        timeout=httpx2.Timeout(ANSWER, read=None),
        headers={"Accept-Encoding": "identity"},
    )


class _Transport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            # With uvloop, anyio trips over a connection that is reset as it is made: nothing was sent on it.
            raise httpx2.ConnectError(str(error), request=request) from error


def json_object(data: bytes | None) -> dict[str, Any] | None:
    """The JSON object that some bytes are, if they are one."""
    try:
        return msgspec.json.decode(data or b"", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def message_of(block: Block) -> dict[str, Any] | None:
    """The JSON object in a block, if there is one."""
    return json_object(block.data)


def sequence_of(id: str | None) -> int | None:
    """The number that an event ID begins with, if it does; one of more than 18 digits is none."""
    digits = (id or "").partition(".")[0]
    return int(digits) if digits.isdecimal() and len(digits) <= 18 else None


class Answer:
    """An HTTP response, read as far as its head."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.streams = response.headers.get("content-type", "").startswith("text/event-stream")

    async def body(self) -> bytes:
        """The whole body, of an answer that is no stream.

        Raises:
            TimeoutError: it is not over after 5 s.
            httpx2.HTTPError: the connection broke.
        """
        async with asyncio.timeout(_BODY):
            return await self._response.aread()

    async def blocks(self, idle: float = IDLE) -> AsyncGenerator[Block]:
        """Blocks until the stream ends, or is not one any more.

        Raises:
            TimeoutError: nothing at all came for `idle` seconds.
            httpx2.HTTPError: the connection broke.
        """
        decoder = BlockDecoder(LIMIT)
        chunks = self._response.aiter_bytes()
        while True:
            async with asyncio.timeout(idle):
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
            try:
                blocks = decoder.feed(chunk)
            except (MalformedError, TooLargeError):
                return
            for block in blocks:
                yield block
