"""A small MCP server to climb about on, for both of MCP's eras: the handshake, and 2026-07-28.

Nothing here knows of Gapless. Over stdio::

    python examples/ladder_server.py

In-process, its name is ``examples.ladder_server:server``.
"""

import asyncio
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import AcceptedElicitation, Elicit, ElicitationResult, Resolve
from pydantic import BaseModel

__all__ = ["server"]

server = MCPServer("ladder")


@server.tool()
async def climb(ctx: Context, steps: int = 40, delay: float = 0.05) -> str:
    """Climb, and say so at every step: a step lost or told twice would show."""
    for step in range(1, steps + 1):
        await asyncio.sleep(delay)
        await ctx.report_progress(step, steps, f"step {step}")
    return f"climbed {steps} steps"


@server.tool()
async def grow(ctx: Context, name: str) -> str:
    """Grow a tool called `name`, and say that the list of tools has changed."""

    def rung() -> str:
        return f"standing on {name}"

    server.add_tool(rung, name=name, description=f"Stand on {name}.")
    # To whom the client's era lets it be said: on the session itself, or to its subscriptions.
    await ctx.session.send_tool_list_changed()
    await ctx.notify_tools_changed()
    return f"grew {name}"


class Height(BaseModel):
    """What the user is asked for."""

    metres: int


def ask_for_height() -> Elicit[Height]:
    return Elicit("How high shall the ladder be, in metres?", Height)


@server.tool()
async def ask(height: Annotated[ElicitationResult[Height], Resolve(ask_for_height)]) -> str:
    """Ask the user how high the ladder shall be: by a request of ours, or by having the client call again."""
    if isinstance(height, AcceptedElicitation):
        return f"a ladder of {height.data.metres} m"
    return "no ladder"


if __name__ == "__main__":
    server.run()
