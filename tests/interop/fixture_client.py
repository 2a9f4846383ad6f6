"""The client that the suite's client scenarios judge: the official SDK's, on our transport.

    MCP_CONFORMANCE_SCENARIO=tools_call python fixture_client.py http://localhost:8000/mcp

The suite's servers are standard ones, and our transport speaks to Gapless. So a `gapless serve --upstream`
is between the two, and what is judged is how that behaves towards them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mcp import Client
from mcp_types import ElicitResult

import gapless
from tests.interop import processes

__all__ = ["main"]


async def _accept(context: Any, params: Any) -> ElicitResult:
    """Accept with nothing filled in but the defaults."""
    properties = params.requested_schema.get("properties", {})
    defaults = {name: about["default"] for name, about in properties.items() if "default" in about}
    return ElicitResult(action="accept", content=defaults)


async def _use(client: Client, scenario: str) -> None:
    tools = [tool.name for tool in (await client.list_tools()).tools]
    match scenario:
        case "tools_call":
            await client.call_tool("add_numbers", {"a": 2, "b": 3})
        case "elicitation-sep1034-client-defaults":
            await client.call_tool("test_client_elicitation_defaults", {})
        case "sse-retry":
            result = await client.call_tool("test_reconnection", {})
            assert not result.is_error, result
        case _:
            assert isinstance(tools, list)


async def main(url: str, scenario: str) -> None:
    """Do what a scenario asks of a client."""
    async with processes.serving(processes.gapless("--upstream", url)) as through:
        connection = gapless.connect(through, upgrade="never")
        async with Client(connection, mode="legacy", elicitation_callback=_accept) as client:
            await _use(client, scenario)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1], os.environ.get("MCP_CONFORMANCE_SCENARIO", "")))
