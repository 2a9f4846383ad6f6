"""An MCP server over stdio that needs no SDK, so that it starts at once: it counts its runs in a file.

It does one thing at a time, and reads nothing meanwhile: what is sent to it then waits in its pipe.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def say(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def count(journal: int, id: Any, params: dict[str, Any]) -> None:
    """Note the run, then tell of it step by step."""
    arguments = params["arguments"]
    os.write(journal, f"{os.getpid()} {arguments['run']}\n".encode())
    token = params.get("_meta", {}).get("progressToken")
    for step in range(1, arguments.get("steps", 0) + 1):
        time.sleep(arguments.get("delay", 0))
        if token is not None:
            told = {"progressToken": token, "progress": step}
            say(method="notifications/progress", params=told)
    say(id=id, result={"content": [{"type": "text", "text": arguments["run"]}]})


def main(path: str) -> None:
    journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for line in sys.stdin:
        message = json.loads(line)
        id, params = message.get("id"), message.get("params", {})
        match message.get("method"):
            case "initialize":
                about = {"name": "counting", "version": "1"}
                version = params["protocolVersion"]
                say(
                    id=id,
                    result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about},
                )
            case "tools/list":
                say(id=id, result={"tools": [{"name": "count", "inputSchema": {"type": "object"}}]})
            case "tools/call":
                count(journal, id, params)
            case "ping":
                say(id=id, result={})
            case _ if id is not None and "method" in message:
                say(id=id, error={"code": -32601, "message": "no such method"})


main(sys.argv[1])
