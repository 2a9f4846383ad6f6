"""The MCP server object that the SDK's own transport and Gapless both serve: the tools of `child.py`."""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import LoggingMessageNotification, LoggingMessageNotificationParams

__all__ = ["server"]

server = MCPServer("emitter", log_level="WARNING")

PAD = "." * 201
"""Makes a notification 300 bytes long on the wire."""


@server.tool()
async def burst(ctx: Context, count: int) -> str:
    """Emit notifications as fast as they are taken."""
    session, id = ctx.session, ctx.request_id  # looked up once: each look builds something
    for n in range(count):
        params = LoggingMessageNotificationParams(level="info", data={"n": n, "pad": PAD})
        notification = LoggingMessageNotification(params=params)
        await session.send_notification(notification, related_request_id=id)
    return f"emitted {count}"


@server.tool()
async def echo(text: str = "") -> str:
    """Answer."""
    return f"emitted {text}"
