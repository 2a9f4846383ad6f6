"""mcp-persist with SQLite, by its quickstart.

https://pypi.org/project/mcp-persist/ "Quickstart: with_persistence()": the fastest way to add
resumability to an MCPServer, `with_persistence(mcp, backend="sqlite", url="events.db", ttl=3600)`.

    python server.py PORT DIRECTORY
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from mcp_persist import with_persistence

from examples.ladder_server import server

app = with_persistence(server, backend="sqlite", url=str(Path(sys.argv[2]) / "events.db"), ttl=3600)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
