"""The official Python SDK 1.x, over its own Streamable HTTP."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportAssignmentType=false
from __future__ import annotations

import asyncio
import sys
from typing import Any

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CancelledNotification, CancelledNotificationParams, ClientNotification, ElicitResult
from steps import Notes, walk


async def main(url: str) -> None:
    notes = Notes()
    number = 0

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"metres": 3})

    async with (
        streamable_http_client(url) as (read, write, _),
        ClientSession(read, write, elicitation_callback=answer) as session,
    ):
        async with notes.step("initialize"):
            await session.initialize()

        async def listed() -> list[Any]:
            return (await session.list_tools()).tools

        async def call(tool: str, arguments: dict[str, Any], progress: Any = None) -> Any:
            nonlocal number
            number = session._request_id  # 1.x has no other way to learn the ID of a call
            return await session.call_tool(tool, arguments, progress_callback=progress)

        async def cancel(task: asyncio.Task[Any]) -> None:
            params = CancelledNotificationParams(requestId=number)
            await session.send_notification(ClientNotification(CancelledNotification(params=params)))

        await walk(notes, listed, call, cancel)
    notes.tell()


asyncio.run(main(sys.argv[1]))
