"""Has a client run in another process, for whoever can only run a command: PORT URL."""

from __future__ import annotations

import json
import os
import socket
import sys

port, url = sys.argv[1:]
scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
with socket.create_connection(("127.0.0.1", int(port))) as connection:
    connection.sendall(json.dumps([url, scenario, context]).encode() + b"\n")
    sys.exit(connection.makefile(encoding="utf-8").read() or 0)
