"""FastMCP, with its event store.

https://gofastmcp.com/deployment/http#sse-polling-for-long-running-operations: to make streams
resumable, `mcp.http_app(event_store=EventStore())`. The page's `retry_interval=2000` only asks
clients to wait for two seconds; it is left out, as in all the set-ups, so that all are resumed as
soon.

    python server.py PORT DIRECTORY
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import sys

import uvicorn
from fastmcp import Context, FastMCP
from fastmcp.server.event_store import EventStore

from examples.ladder_server import ladder, runs

ladder.__annotations__["ctx"] = Context  # FastMCP's own, which has all that the ladder needs

server = FastMCP("ladder")
server.tool(ladder)
server.tool(runs)

app = server.http_app(event_store=EventStore())
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
