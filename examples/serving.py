"""Starts `gapless serve` as a process of its own, and waits until it listens."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

__all__ = ["ROOT", "Served", "serve"]

ROOT = Path(__file__).resolve().parent.parent


class Served:
    """A running server: its URL, and its process."""

    def __init__(self, url: str, port: int, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self.port = port
        self.process = process


@asynccontextmanager
async def serve(options: Sequence[str], target: Sequence[str]) -> AsyncGenerator[Served]:
    """`gapless serve OPTIONS TARGET` on a free port, until the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gapless", "serve", "--port", "0", *options, *target),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    reading: asyncio.Task[None] | None = None
    try:
        said = b""
        while (found := re.search(rb"http://127\.0\.0\.1:(\d+)\S*", said)) is None:
            line = await asyncio.wait_for(process.stderr.readline(), 30)
            if not line:
                raise RuntimeError(f"gapless serve ended: {said.decode()}")
            said += line
        reading = asyncio.create_task(_drain(process.stderr))
        yield Served(found[0].decode(), int(found[1]), process)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 10)
        if reading is not None:
            await reading


async def _drain(stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        sys.stderr.buffer.write(line)
