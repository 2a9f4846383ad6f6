"""Gapless inside somebody's application: its paths, its lifespan, and the application's own routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from mcp import Client
from mcp.server import MCPServer
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Message

import gapless
from examples.ladder_server import server as ladder
from gapless.client.transport import Connection
from gapless.errors import UsageError
from gapless.server.app import Gapless, Settings
from tests.server.harness import Uvicorn, listening


async def health(request: Request) -> Response:
    return PlainTextResponse("ok")


class Seen(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers["X-Seen"] = "yes"
        return response


def mounted(*apps: Gapless, routes: list[BaseRoute], middleware: list[Middleware] | None = None) -> Starlette:
    """Somebody's application, which enters the lifespans of ours."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as entered:
            for app in apps:
                await entered.enter_async_context(app.router.lifespan_context(app))
            yield

    return Starlette(routes=[Route("/health", health), *routes], middleware=middleware, lifespan=lifespan)


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The URL at which uvicorn serves this."""
    sock = listening()
    uvicorn = Uvicorn(app, sock)
    await uvicorn.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await uvicorn.stop()


async def climbed(by: Connection | str, mode: str = "auto") -> tuple[list[int], str]:
    """A climb of three steps: what was reported, and the result."""
    steps: list[int] = []

    async def reported(progress: float, total: float | None, message: str | None) -> None:
        steps.append(int(progress))

    async with Client(by, mode=mode) as client:
        result = await client.call_tool("climb", {"steps": 3, "delay": 0.01}, progress_callback=reported)
    return steps, getattr(result.content[0], "text", "")


UNDER: dict[str, tuple[str, str, Callable[[Gapless], list[BaseRoute]]]] = {
    "under a prefix": ("/mcp", "/tools/mcp", lambda app: [Mount("/tools", app)]),
    "at the root": ("/mcp", "/mcp", lambda app: [Mount("/", app)]),
    "its routes among the application's": ("/mcp", "/mcp", lambda app: [*app.routes]),
    "with no path of its own": ("/", "/mcp", lambda app: [Mount("/mcp", app)]),
}
AROUND = {
    "nothing": [],
    "a middleware that wraps": [Middleware(Seen)],
    "compression": [Middleware(GZipMiddleware, minimum_size=1)],
}


@pytest.mark.parametrize("way", UNDER)
@pytest.mark.parametrize("around", AROUND)
async def test_mounted_it_answers_both_kinds_of_clients_and_leaves_the_applications_routes(
    way: str, around: str
) -> None:
    path, at, routes = UNDER[way]
    app = gapless.asgi(ladder, log="memory:", settings=Settings(path=path))
    async with served(mounted(app, routes=routes(app), middleware=AROUND[around])) as url:
        async with httpx2.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/health")).text == "ok"
        expected = ([1, 2, 3], "climbed 3 steps")
        assert await climbed(gapless.connect(url + at, upgrade="never")) == expected
        assert await climbed(gapless.connect(url + at, upgrade="require")) == expected
        assert await climbed(url + at, mode="legacy") == expected


async def test_two_servers_live_beside_each_other_with_a_log_each(tmp_path: Path) -> None:
    one, two = (gapless.asgi(ladder, log=f"sqlite:///{tmp_path}/{name}.db") for name in ("one", "two"))
    app = mounted(one, two, routes=[Mount("/one", one), Mount("/two", two)])
    async with served(app) as url:
        assert await climbed(gapless.connect(f"{url}/one/mcp")) == ([1, 2, 3], "climbed 3 steps")
        assert await climbed(gapless.connect(f"{url}/two/mcp")) == ([1, 2, 3], "climbed 3 steps")


async def test_the_mcp_servers_lifespan_is_entered_and_left_with_the_applications() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(_: MCPServer) -> AsyncIterator[None]:
        seen.append("entered")
        yield
        seen.append("left")

    app = gapless.asgi(MCPServer("lively", lifespan=lifespan), log="memory:")
    async with served(mounted(app, routes=[Mount("/tools", app)])):
        assert seen == ["entered"]
    assert seen == ["entered", "left"]


async def test_without_its_lifespan_it_says_what_is_missing() -> None:
    app = gapless.asgi(ladder, log="memory:")
    outer = Starlette(routes=[Mount("/tools", app)])

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/tools/mcp/session",
        "headers": [],
        "query_string": b"",
    }
    with pytest.raises(UsageError, match="enter its lifespan"):
        await outer.router(scope, receive, send)
