"""Our client's bearer tokens: on every request, on the handshake, and a fresh one where one does no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification

import gapless
from gapless.auth.base import DeniedError, Principal, Verifier
from gapless.client.driver import Observation
from gapless.client.network import Token
from gapless.errors import GaplessError, UsageError
from gapless.protocol.client import Retry
from tests.server.harness import Scripted, Serve, Server, note, soon


class Rotating(Verifier):
    """Takes one token, which changes."""

    def __init__(self) -> None:
        self.good = "first"

    async def verify(self, token: str) -> Principal:
        if token != self.good:
            raise DeniedError("that was yesterday's")
        return Principal("ann")


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    serve = Serve("uvicorn")
    yield serve
    await serve.close()


@asynccontextmanager
async def following(
    server: Server, *, token: Token | None = None, auth: Any = None, steps: Any = 1
) -> AsyncGenerator[tuple[Any, Scripted, asyncio.Event]]:
    """A session of our client, its backend, and an event: it is on a WebSocket."""
    bound = asyncio.Event()

    def observe(seen: Observation) -> None:
        if seen.transport == "websocket":
            bound.set()

    url = f"http://{server.host}/mcp"
    options: dict[str, Any] = {"token": token, "auth": auth, "steps": steps, "observe": observe}
    async with gapless.connect(url, **options) as (read, write):
        hello = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
        await soon(write.send(SessionMessage(hello)))
        yield read, await server.backends.opened(), bound


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_fresh_token_is_asked_for_once_where_the_last_does_no_more(serve: Serve, steps: int) -> None:
    verifier, asked = Rotating(), list[str]()

    async def token() -> str:
        asked.append(verifier.good)
        return verifier.good

    server = await serve(verifier=verifier)
    async with following(server, token=token, steps=steps) as (read, backend, bound):
        assert asked == ["first"]
        verifier.good = "second"  # before it goes to the door, where a handshake is refused first
        await backend.say(note(step=1))
        assert (await soon(read.receive())).message.params == {"step": 1}
        await soon(bound.wait())
    assert asked == ["first", "second"]


async def test_what_authorizes_requests_authorizes_the_handshake(serve: Serve) -> None:
    verifier = Rotating()

    class Asking(httpx2.Auth):
        """Has to ask elsewhere before it knows what to send, as OAuth does."""

        async def async_auth_flow(
            self, request: httpx2.Request
        ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
            known = yield httpx2.Request("GET", f"http://{server.host}/healthz")
            assert await known.aread() == b"ok\n"
            request.headers["Authorization"] = f"Bearer {verifier.good}"
            yield request

    server = await serve(verifier=verifier)
    async with following(server, auth=Asking()) as (read, backend, bound):
        await backend.say(note(step=1))
        await soon(read.receive())
        await soon(bound.wait())


async def test_a_user_may_take_longer_to_authorize_than_a_server_may_to_answer(serve: Serve) -> None:
    verifier = Rotating()

    class User(httpx2.Auth):
        """Sits at a browser, and is asked when the events are."""

        async def async_auth_flow(
            self, request: httpx2.Request
        ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
            if request.method == "GET":
                await asyncio.sleep(1.5)
            request.headers["Authorization"] = f"Bearer {verifier.good}"
            yield request

    server = await serve(verifier=verifier)
    url, retry = f"http://{server.host}/mcp", Retry(first=0.01, most=0.01, attempts=2)
    connection = gapless.connect(url, auth=User(), upgrade="never", retry=retry, answer_timeout=1.0)
    async with connection as (read, write):
        hello = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
        await soon(write.send(SessionMessage(hello)))
        backend = await server.backends.opened()
        await backend.say(note(step=1))
        received: Any = await soon(read.receive())
        assert received.message.params == {"step": 1}


async def test_a_token_that_does_not_do_ends_it_with_the_reason(serve: Serve) -> None:
    server = await serve(verifier=Rotating())
    connection = gapless.connect(f"http://{server.host}/mcp", token="another")
    async with connection as (read, write):
        hello = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
        await soon(write.send(SessionMessage(hello)))
        with pytest.raises(Exception):  # noqa: B017, PT011
            await soon(read.receive())
    assert isinstance(connection.error, GaplessError)
    assert connection.error.code == "unauthenticated"


async def test_who_has_no_token_to_give_is_asked_a_bounded_number_of_times(serve: Serve) -> None:
    server, asked = await serve(verifier=Rotating()), list[None]()

    async def token() -> str:
        asked.append(None)
        raise LookupError("nobody is logged in")

    retry = Retry(first=0.01, most=0.01, attempts=3)
    connection = gapless.connect(f"http://{server.host}/mcp", token=token, retry=retry)
    async with connection as (read, write):
        hello = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
        await soon(write.send(SessionMessage(hello)))
        with pytest.raises(Exception):  # noqa: B017, PT011
            await soon(read.receive())
    assert connection.error is not None
    assert connection.error.code == "gave-up"
    assert 3 <= len(asked) <= 5


def test_two_credentials_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="both token and auth"):
        gapless.connect("http://127.0.0.1/mcp", token="a", auth=("a", "b"))
