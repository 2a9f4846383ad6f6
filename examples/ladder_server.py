"""A small MCP server to climb about on, for both of MCP's eras: the handshake, and 2026-07-28.

Nothing here knows of Gapless. Over stdio::

    python examples/ladder_server.py

In-process, its name is ``examples.ladder_server:server``.
"""

import asyncio
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import AcceptedElicitation, Elicit, ElicitationResult, Resolve
from mcp_types import (
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
    NotificationParams,
    ToolListChangedNotification,
)
from pydantic import BaseModel

__all__ = ["server"]

JOURNAL = Path(os.environ.get("LADDER_JOURNAL") or Path(tempfile.gettempdir()) / "ladder-journal")
"""Every climb leaves a line here as it begins: a call that is run twice leaves two."""

server = MCPServer("ladder")


@server.tool()
async def climb(ctx: Context, steps: int = 40, delay: float = 0.05) -> str:
    """Climb, and say so at every step: a step lost or told twice would show."""
    for step in range(1, steps + 1):
        await asyncio.sleep(delay)
        await ctx.report_progress(step, steps, f"step {step}")
    return f"climbed {steps} steps"


Kind = Literal["progress", "log", "changed", "stray", "ask"]


@server.tool()
async def ladder(
    ctx: Context,
    run: str,
    rungs: int = 20,
    delay: float = 0.01,
    kinds: list[Kind] = ["progress", "log"],  # noqa: B006
    pad: int = 0,
) -> str:
    """Climb rung by rung, each a numbered message of the next kind: what is lost on the way shows.

    `progress`, `log` and `ask` (a request to the client) belong to this call; `changed` (the list
    of tools) and `stray` (a log message) to no call. Log messages are made `pad` bytes longer.
    """
    with JOURNAL.open("a") as journal:  # noqa: ASYNC230
        journal.write(f"{run}\n")
    answers: list[int] = []
    for rung, kind in zip(range(1, rungs + 1), itertools.cycle(kinds), strict=False):
        await asyncio.sleep(delay)
        data = {"run": run, "rung": rung, **({"pad": "." * pad} if pad else {})}
        log = LoggingMessageNotification(
            params=LoggingMessageNotificationParams(level="info", logger="ladder", data=data)
        )
        match kind:
            case "progress":
                await ctx.report_progress(rung, rungs, run)
            case "log":
                await ctx.session.send_notification(log, related_request_id=ctx.request_id)
            case "stray":
                await ctx.session.send_notification(log)
            case "changed":
                params = NotificationParams.model_validate({"_meta": {"run": run, "rung": rung}})
                await ctx.session.send_notification(ToolListChangedNotification(params=params))
            case "ask":
                schema = {"type": "object", "properties": {"rung": {"type": "integer"}}}
                answer = await ctx.session.elicit_form(f"{run} {rung}", schema, ctx.request_id)
                answers.append(int(str((answer.content or {}).get("rung", 0))))
    return json.dumps({"run": run, "rungs": rungs, "answers": answers})


@server.tool()
async def runs(run: str) -> str:
    """How many times a climb was begun, by what is on the disk."""
    if not JOURNAL.exists():  # noqa: ASYNC240
        return "0"
    with JOURNAL.open() as journal:  # noqa: ASYNC230
        return str(sum(line == f"{run}\n" for line in journal))  # an hour of climbs is not to be held at once


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
