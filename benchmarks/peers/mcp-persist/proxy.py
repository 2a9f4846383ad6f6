"""mcp-persist's proxy with SQLite, in front of the official Python SDK without an event store.

https://pypi.org/project/mcp-persist/ "Resumability without touching the server": `mcp-persist-proxy`
starts the server, and keeps and replays its events itself.

    python proxy.py PORT DIRECTORY
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

with socket.create_server(("127.0.0.1", 0)) as free:
    upstream = str(free.getsockname()[1])

binaries = Path(sys.executable).parent
store = ["--backend", "sqlite", "--url", str(Path(sys.argv[2]) / "events.db")]
ports = ["--host", "127.0.0.1", "--port", sys.argv[1], "--upstream-port", upstream]
server = [str(binaries / "uvicorn"), "--factory", "examples.ladder_server:server.streamable_http_app"]
proxy = str(binaries / "mcp-persist-proxy")
os.execv(proxy, [proxy, *store, *ports, "--", *server, "--port", upstream, "--log-level", "warning"])
