"""FastMCP's client, over its own Streamable HTTP."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import asyncio
import sys
from typing import Any

from fastmcp import Client
from steps import Notes, cancelled, expect, settled, text


async def main(url: str) -> None:
    notes = Notes()

    async def answer(message: str, response_type: Any, params: Any, context: Any) -> Any:
        return {"metres": 3}

    async with Client(url, elicitation_handler=answer) as client:
        notes.passed("initialize")
        async with notes.step("list"):
            expect("climb" in [tool.name for tool in await client.list_tools()], "climb is not listed")
        for step, rungs in (("progress", 4), ("resume", 12)):
            async with notes.step(step):
                seen: list[float] = []

                async def climbed(
                    progress: float, total: float | None, message: str | None, seen=seen
                ) -> None:
                    seen.append(progress)

                arguments = {"steps": rungs, "delay": 0.05}
                result = await client.call_tool("climb", arguments, progress_handler=climbed)
                expect(text(result) == f"climbed {rungs} steps", f"it ended with {text(result)}")
                await settled(seen, rungs)
        async with notes.step("question"):
            expect(text(await client.call_tool("ask", {})) == "a ladder of 3 m", "the answer was lost")
        async with notes.step("cancellation"):
            begun = asyncio.Event()

            async def lingering(progress: float, total: float | None, message: str | None) -> None:
                begun.set()

            call = asyncio.create_task(client.call_tool("linger", {}, progress_handler=lingering))
            await asyncio.wait_for(begun.wait(), 10)
            call.cancel()
            await cancelled(lambda: client.call_tool("cancellations", {}))
    notes.tell()


asyncio.run(main(sys.argv[1]))
