"""FastMCP's client, over its own Streamable HTTP."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import asyncio
import sys
from typing import Any

from fastmcp import Client
from steps import Notes, walk


async def main(url: str) -> None:
    notes = Notes()

    async def answer(message: str, response_type: Any, params: Any, context: Any) -> Any:
        return {"metres": 3}

    async with Client(url, elicitation_handler=answer) as client:
        notes.passed("initialize")

        async def call(tool: str, arguments: dict[str, Any], progress: Any = None) -> Any:
            return await client.call_tool(tool, arguments, progress_handler=progress)

        async def cancel(task: asyncio.Task[Any]) -> None:
            task.cancel()

        await walk(notes, client.list_tools, call, cancel)
    notes.tell()


asyncio.run(main(sys.argv[1]))
