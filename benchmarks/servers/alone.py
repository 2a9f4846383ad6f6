"""The SDK's server object without a transport: what it writes is dropped. Nothing before it can be cheaper.

    python alone.py

For each line that it reads it emits so many events, and prints the seconds of CPU that each cost.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import anyio
import uvloop
from mcp.server.runner import serve_dual_era_loop
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse, jsonrpc_message_adapter

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


async def main() -> None:
    """Emit whenever somebody asks for it."""
    low: Any = server._lowlevel_server  # as Gapless takes it, and the SDK's own in-memory transport
    nowhere: Any = Nowhere()
    to_server, from_client = anyio.create_memory_object_stream[Any]()
    async with low.lifespan(low) as state:
        serving = asyncio.create_task(serve_dual_era_loop(low, from_client, nowhere, lifespan_state=state))

        async def ask(message: dict[str, Any]) -> None:
            nowhere.answered.clear()
            await to_server.send(SessionMessage(jsonrpc_message_adapter.validate_python(message)))
            if "id" in message:
                await nowhere.answered.wait()

        await ask({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})
        await ask({"jsonrpc": "2.0", "method": "notifications/initialized"})
        for id, line in enumerate(sys.stdin, 1):
            begun = time.process_time()
            await ask(call(id, "burst", {"count": int(line)}))
            print((time.process_time() - begun) / int(line), flush=True)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(main())
