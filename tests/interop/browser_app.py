"""The desk server, mounted in an application that also serves a page for a browser to try it from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route

import gapless
from tests.interop.desk_server import server

__all__ = ["app"]

_PAGE: Final = Path(__file__).parent / "clients" / "browser.html"

_mounted: Final = gapless.asgi(server, log="memory:")
_found: Final = asyncio.Event()


async def _page(_: Request) -> Response:
    return FileResponse(_PAGE)


async def _hold(_: Request) -> Response:
    """An image that comes once the page has found out everything: until then it is not loaded."""
    await _found.wait()
    return Response(status_code=204)


async def _release(_: Request) -> Response:
    _found.set()
    return Response(status_code=204)


@asynccontextmanager
async def _lifespan(_: Starlette) -> AsyncGenerator[None]:
    async with _mounted.router.lifespan_context(_mounted):
        yield


app = Starlette(
    routes=[
        Route("/", _page),
        Route("/hold", _hold),
        Route("/release", _release, methods=["POST"]),
        Mount("/", _mounted),
    ],
    lifespan=_lifespan,
)
