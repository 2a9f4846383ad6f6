"""A client that is measured: ours or the SDK's. It calls `burst` again and again, and says how fast it read.

    python reader.py KIND URL EVENTS CALLS

KIND is `sdk` or `ours`, read from the stream of messages that the SDK's sessions take, or `raw`: ours, as
bytes, without the SDK. Printed are the events per second of each call, one to a line. It ends with status 1
if events were lost or out of order.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvloop
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, jsonrpc_message_adapter

import gapless
from benchmarks.load import DONE, INITIALIZE, call, check
from gapless.client.driver import Driver
from gapless.client.network import Network
from gapless.protocol.client import Client
from gapless.protocol.jsonrpc import peek

PATIENCE = 60.0

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def stream(transport: Any):
    """A transport of the SDK's kind, as it hands messages to a session."""
    async with transport as (read, write):

        async def send(message: dict[str, Any]) -> None:
            await write.send(SessionMessage(jsonrpc_message_adapter.validate_python(message)))

        async def receive() -> Any:
            return (await read.receive()).message

        yield send, receive


@asynccontextmanager
async def raw(url: str):
    """Our driver, without the SDK above it."""
    process = "reader"

    def over(error: Exception | None) -> None:
        if error is not None:
            raise error

    async with httpx2.AsyncClient(trust_env=False, timeout=httpx2.Timeout(PATIENCE)) as http:
        driver = Driver(
            Client("auto", steps=1, process=process),
            url,
            process,
            Network(http, {}, httpx2.Auth(), None, False, PATIENCE),
            over=over,
            saving=lambda now: None,
            observe=None,
            receipts=None,
        )
        running = asyncio.create_task(driver.run())

        async def send(message: dict[str, Any]) -> None:
            data = json.dumps(message).encode()
            await driver.submit(data, peek(data))

        async def receive() -> bytes:
            data = await driver.next()
            driver.accepted()
            return data or b""

        yield send, receive
        await driver.leave()
        running.cancel()


def as_bytes(message: Any) -> bytes:
    """What a message says, whatever the client makes of it."""
    if isinstance(message, bytes):
        return message
    if isinstance(message, JSONRPCNotification):
        return b'"n":%d' % message.params["data"]["n"] if message.params else b""
    return message.model_dump_json(by_alias=True, exclude_unset=True).encode()


async def main(kind: str, url: str, events: int, calls: int) -> None:
    """Read so many events so many times."""
    match kind:
        case "sdk":
            opened = stream(streamable_http_client(url))
        case "ours":
            opened = stream(gapless.connect(url))
        case _:
            opened = raw(url)
    async with asyncio.timeout(4 * PATIENCE), opened as (send, receive):
        await send({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})
        await receive()
        await send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        for id in range(1, calls + 1):
            begun = time.perf_counter()
            await send(call(id, "burst", {"count": events}))
            got = [await receive() for _ in range(events + 1)]
            taken = time.perf_counter() - begun
            data = b"".join(as_bytes(message) for message in got)
            check(data, events)
            assert DONE in data
            print(events / taken, flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
