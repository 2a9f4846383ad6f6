"""A Gapless around the ladder server, in process, on a real socket; and one behind a fault proxy."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import gapless
from examples.ladder_server import server as ladder
from gapless.server.app import Gapless, Settings
from gapless.torture.faults import FaultProxy
from tests.server.harness import Uvicorn, listening

__all__ = ["proxied", "served"]


@asynccontextmanager
async def served(
    log: str = "memory:", backend: Any = ladder, **limits: Any
) -> AsyncGenerator[tuple[str, Gapless]]:
    """A running server: its URL and its application."""
    app = gapless.asgi(backend, log=log, settings=Settings(limits=gapless.Limits(**limits)))
    sock = listening()
    runner = Uvicorn(app, sock)
    port = sock.getsockname()[1]
    await runner.start()
    try:
        yield f"http://127.0.0.1:{port}/mcp", app
    finally:
        await runner.stop()


@asynccontextmanager
async def proxied(url: str) -> AsyncGenerator[tuple[str, FaultProxy]]:
    """The same URL through a fault proxy."""
    port = int(url.split(":")[2].split("/", maxsplit=1)[0])
    proxy = FaultProxy("127.0.0.1", port)
    await proxy.start()
    try:
        yield f"http://127.0.0.1:{proxy.port}/mcp", proxy
    finally:
        await proxy.close()
