"""An MCP server over stdio that starts at once: the tools of the ladder, and nothing else.

`python -m tests.attack.child loses` or `repeats` is one whose every tenth message goes so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

from tests.torture.naive_ladder import NaiveLadder


async def main(manner: str) -> None:
    count = itertools.count(1)

    def emit(message: dict[str, Any], _: object) -> None:
        line = json.dumps({"jsonrpc": "2.0", **message})
        struck = "method" in message and "id" not in message and next(count) % 10 == 0
        for _ in range({"loses": 0, "repeats": 2}.get(manner, 1) if struck else 1):
            print(line, flush=True)

    reader = asyncio.StreamReader(limit=16 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    ladder = NaiveLadder(emit, [])
    while line := await reader.readline():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):  # a number of more digits than Python reads, say
            os._exit(1)
        params = message.get("params") or {}
        good = isinstance(params, dict) and isinstance(params.get("_meta") or {}, dict)
        if good and isinstance(message.get("id", ""), str | int):
            ladder.take(message)
        elif isinstance(message.get("id"), str | int) and "method" in message:
            emit({"id": message["id"], "error": {"code": -32602, "message": "no such parameters"}}, None)
    ladder.close()


if __name__ == "__main__":
    asyncio.run(main((sys.argv[1:] or [""])[0]))
