"""The ladder, and a tool that only ends when it is cancelled: what every client is tried on."""

from __future__ import annotations

import asyncio

from mcp.server.mcpserver import Context

from examples.ladder_server import server

__all__ = ["server"]

_cancelled: list[str] = []


@server.tool()
async def linger(ctx: Context) -> str:
    """Report progress once, and wait until it is cancelled."""
    await ctx.report_progress(1, 1, "lingering")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        _cancelled.append(str(ctx.request_id))
        raise
    return "nobody cancelled"


@server.tool()
async def cancellations() -> str:
    """How many calls of `linger` were cancelled."""
    return str(len(_cancelled))
