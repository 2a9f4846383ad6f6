"""The ladder over stdio, without an SDK: a session's MCP server starts in a tenth of a second.

`child.py`, with the file of its journal in the variable LADDER_JOURNAL.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from gapless.protocol.jsonrpc import RequestId
from tests.torture.naive_ladder import NaiveLadder


class Journal(list[str]):
    """What was begun, by any of these processes: it is on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, run: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{run}\n")

    def count(self, run: str) -> int:
        with self._path.open() as file:
            return sum(line == f"{run}\n" for line in file)


def say(message: dict[str, Any], related: RequestId | None) -> None:
    try:
        sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)  # nobody listens any more


async def main() -> None:
    """Serve until stdin ends."""
    ladder = NaiveLadder(say, Journal(Path(os.environ["LADDER_JOURNAL"])))
    reader = asyncio.StreamReader(limit=16 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        ladder.take(json.loads(line))
    ladder.close()


asyncio.run(main())
