"""The official Python SDK 1.x, over its own Streamable HTTP."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportAssignmentType=false
from __future__ import annotations

import asyncio
import sys
from typing import Any

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CancelledNotification, CancelledNotificationParams, ClientNotification, ElicitResult
from steps import Notes, cancelled, expect, settled, text


async def main(url: str) -> None:
    notes = Notes()

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"metres": 3})

    async with (
        streamable_http_client(url) as (read, write, _),
        ClientSession(read, write, elicitation_callback=answer) as session,
    ):
        async with notes.step("initialize"):
            await session.initialize()
        async with notes.step("list"):
            expect(
                "climb" in [tool.name for tool in (await session.list_tools()).tools], "climb is not listed"
            )
        for step, rungs in (("progress", 4), ("resume", 12)):
            async with notes.step(step):
                seen: list[float] = []

                async def climbed(
                    progress: float, total: float | None, message: str | None, seen=seen
                ) -> None:
                    seen.append(progress)

                arguments = {"steps": rungs, "delay": 0.05}
                result = await session.call_tool("climb", arguments, progress_callback=climbed)
                expect(text(result) == f"climbed {rungs} steps", f"it ended with {text(result)}")
                await settled(seen, rungs)
        async with notes.step("question"):
            expect(text(await session.call_tool("ask", {})) == "a ladder of 3 m", "the answer was lost")
        async with notes.step("cancellation"):
            begun = asyncio.Event()

            async def lingering(progress: float, total: float | None, message: str | None) -> None:
                begun.set()

            number = session._request_id  # 1.x has no other way to learn the ID of a call
            call = asyncio.create_task(session.call_tool("linger", {}, progress_callback=lingering))
            await asyncio.wait_for(begun.wait(), 10)
            params = CancelledNotificationParams(requestId=number)
            await session.send_notification(ClientNotification(CancelledNotification(params=params)))
            await cancelled(lambda: session.call_tool("cancellations", {}))
            call.cancel()
            await asyncio.wait({call})
    notes.tell()


asyncio.run(main(sys.argv[1]))
