"""The client's event stream: one GET, read block by block, no faster than the machine takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final

import httpx2

from gapless.client.http import refused
from gapless.client.network import TROUBLE
from gapless.errors import MalformedError, TooLargeError
from gapless.protocol.block import BLOCK_OVERHEAD, Block, BlockDecoder
from gapless.protocol.cursor import EventId
from gapless.protocol.media import STREAM, media_type
from gapless.protocol.moves import Failed, Input, StreamEnded, StreamOpened

__all__ = ["DEFAULT_LIMIT", "read_stream"]

DEFAULT_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of a message where the server has not said."""
_ERROR_MOST: Final = 64 * 1024
_LIFE: Final = (None,)
"""A comment, or part of a block: somebody is there."""


async def read_stream(
    client: httpx2.AsyncClient,
    url: str,
    process: str,
    attempt: int,
    cursor: EventId,
    *,
    limit: int,
    timeout: float,
    put: Callable[[Input], None],
    read: Callable[[int, Sequence[Block | None]], Awaitable[None]],
) -> None:
    """GET the events after `cursor` and put in what arrives, until the stream ends or breaks.

    `read` puts in blocks, and returns when there may be more (U10). The answer has `timeout` seconds to
    come, once it is asked for: what authorizes may ask a user. Silence after it is the machine's to
    notice (C8).
    """
    # A proxy that compresses may hold back what it has until there is more.
    plain = {"Accept": STREAM, "Accept-Encoding": "identity"}
    headers = {**plain, "Last-Event-ID": str(cursor), "Mcp-Client": process}
    request = client.build_request("GET", url, headers=headers, timeout=httpx2.Timeout(timeout, read=None))
    opened = False
    try:
        response = await _answer(client, request, timeout)
        async with aclosing(response):
            if response.status_code != 200:
                body = b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > _ERROR_MOST:
                        break
                put(refused(attempt, response.status_code, body, response.headers.get("retry-after")))
                return
            kind = media_type(response.headers)
            if kind != STREAM:
                put(Failed(attempt, f"the event stream is {kind or 'of no type'}"))
                return
            opened = True
            put(StreamOpened(attempt))
            decoder = BlockDecoder(limit + BLOCK_OVERHEAD)
            async for chunk in response.aiter_bytes():
                await read(attempt, decoder.feed(chunk) or _LIFE)
    except (*TROUBLE, TimeoutError, MalformedError, TooLargeError) as error:
        if not opened:
            put(Failed(attempt, f"GET events: {str(error) or type(error).__name__}"))
            return
    put(StreamEnded(attempt))


async def _answer(client: httpx2.AsyncClient, request: httpx2.Request, timeout: float) -> httpx2.Response:
    """The answer, its body unread. Every request that is made for it has `timeout` seconds."""
    auth = client.auth or httpx2.Auth()
    async with aclosing(auth.async_auth_flow(request)) as flow:
        asked = await anext(flow)
        while True:
            async with asyncio.timeout(timeout):
                response = await client.send(asked, stream=asked is request, auth=None)
            try:
                asked = await flow.asend(response)
            except StopAsyncIteration:
                return response
            except BaseException:
                await response.aclose()
                raise
            await response.aclose()
