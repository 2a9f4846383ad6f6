"""The official Python SDK 2.x, over its own Streamable HTTP."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import asyncio
import sys
from typing import Any

from mcp import Client
from mcp_types import ElicitResult
from steps import Notes, walk


async def main(url: str) -> None:
    notes = Notes()

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"metres": 3})

    async with Client(url, elicitation_callback=answer) as client:
        notes.passed("initialize")

        async def listed() -> list[Any]:
            return (await client.list_tools()).tools

        async def call(tool: str, arguments: dict[str, Any], progress: Any = None) -> Any:
            return await client.call_tool(tool, arguments, progress_callback=progress)

        async def cancel(task: asyncio.Task[Any]) -> None:
            task.cancel()

        await walk(notes, listed, call, cancel)
    notes.tell()


asyncio.run(main(sys.argv[1]))
