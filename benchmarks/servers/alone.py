"""The SDK's server object without a transport: what it writes is dropped. Nothing before it can be cheaper.

    python alone.py events
    python alone.py sessions

For each line that it reads it emits so many events, and prints the seconds of CPU that each cost; or opens so
many sessions, and prints the bytes of memory that each holds once its handshake is done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import anyio
import uvloop
from mcp.server.runner import serve_dual_era_loop
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse, jsonrpc_message_adapter

from benchmarks.harness import memory
from benchmarks.load import INITIALIZE, call
from benchmarks.servers.emitter import server

YIELD = 64
"""Every so many messages the loop has a turn."""


class Nowhere:
    """What the server writes to: answers are counted, all else is dropped."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self._taken = 0

    async def send(self, item: SessionMessage, /) -> None:
        """Drop it."""
        self._taken += 1
        if isinstance(item.message, JSONRPCResponse):
            self.answered.set()
        elif self._taken % YIELD == 0:
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Nothing to close."""

    async def __aenter__(self) -> Nowhere:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing to close."""


class Session:
    """One session with the object. It is held until the process ends."""

    def __init__(self, low: Any, state: Any) -> None:
        self._nowhere: Any = Nowhere()
        self._to_server, from_client = anyio.create_memory_object_stream[Any]()
        self._serving = asyncio.create_task(
            serve_dual_era_loop(low, from_client, self._nowhere, lifespan_state=state)
        )

    async def ask(self, message: dict[str, Any]) -> None:
        """Send a message; of a request, wait for the answer."""
        self._nowhere.answered.clear()
        await self._to_server.send(SessionMessage(jsonrpc_message_adapter.validate_python(message)))
        if "id" in message:
            await self._nowhere.answered.wait()

    async def handshake(self) -> None:
        """Be initialized."""
        await self.ask({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})
        await self.ask({"jsonrpc": "2.0", "method": "notifications/initialized"})


async def main(what: str) -> None:
    """Emit, or open sessions, whenever somebody asks for it."""
    low: Any = server._lowlevel_server  # as Gapless takes it, and the SDK's own in-memory transport
    async with low.lifespan(low) as state:
        sessions = [Session(low, state)]
        await sessions[0].handshake()
        for id, line in enumerate(sys.stdin, 1):
            count = int(line)
            if what == "events":
                begun = time.process_time()
                await sessions[0].ask(call(id, "burst", {"count": count}))
                print((time.process_time() - begun) / count, flush=True)
                continue
            before = memory(os.getpid())
            for _ in range(count):
                sessions.append(Session(low, state))
                await sessions[-1].handshake()
            print((memory(os.getpid()) - before) / count, flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
