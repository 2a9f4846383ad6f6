"""An MCP server over stdio that says all it can, from the first call on, and never listens again.

`flooding_server.py BYTES`: of padding in each log message. It needs no SDK, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any


def say(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def flood(size: int) -> None:
    """Until nobody reads it any more."""
    rung = 0
    with suppress(BrokenPipeError):
        while True:
            rung += 1
            data = {"rung": rung, "pad": "." * size}
            say(method="notifications/message", params={"level": "info", "data": data})
    os._exit(0)  # or what could not be said is tried again


def main(size: int) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        id, params = message.get("id"), message.get("params", {})
        match message.get("method"):
            case "initialize":
                about = {"name": "flooding", "version": "1"}
                version = params["protocolVersion"]
                result = {"protocolVersion": version, "capabilities": {"logging": {}}, "serverInfo": about}
                say(id=id, result=result)
            case "tools/call":
                flood(size)
            case _:
                pass


main(int(sys.argv[1]))
