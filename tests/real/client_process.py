"""A client process with a state file, to be killed: tells what it sees on stdout, a line each."""

from __future__ import annotations

import asyncio
import json
import sys

from mcp import Client

import gapless


async def main(url: str, state: str, act: str, mode: str) -> None:
    moved = asyncio.Event()
    connection = gapless.connect(url, state=state, observe=lambda _: moved.set())

    async def progressed(progress: float, total: float | None, message: str | None) -> None:
        print(json.dumps({"step": int(progress), "cursor": connection.cursor}), flush=True)

    async with Client(connection, mode=mode) as client:
        print(json.dumps({"connected": connection.session, "cursor": connection.cursor}), flush=True)
        if act == "die":
            await client.call_tool("climb", {"steps": 40, "delay": 0.05}, progress_callback=progressed)
            return
        result = await client.call_tool("climb", {"steps": 3, "delay": 0.01}, progress_callback=progressed)
        print(json.dumps({"result": getattr(result.content[0], "text", "")}), flush=True)
        async with asyncio.timeout(20):
            while not connection.recovered:
                moved.clear()
                await moved.wait()
        print(json.dumps({"recovered": connection.recovered, "cursor": connection.cursor}), flush=True)


asyncio.run(main(*sys.argv[1:]))
