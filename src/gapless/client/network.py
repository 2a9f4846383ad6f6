"""How the server is reached: one set of options for the HTTP requests and for the WebSocket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, cast

import httpx2

from gapless.errors import UsageError

__all__ = ["TROUBLE", "Bearer", "Network", "Token", "check_url", "open_network"]

TROUBLE: Final = (httpx2.HTTPError, AttributeError)
"""What a request raises whose connection fails. The second: of a socket that is gone that very moment, anyio
asks `None` for its peer."""

Token = str | Callable[[], Awaitable[str]]
"""A bearer token; or who provides one, and is asked again once the server takes the last no more."""


@dataclass(frozen=True, slots=True)
class Network:
    """How to reach the server; the WebSocket gets what httpx2 gets.

    `answer_timeout` is how many seconds any request may go without an answer: the protocol has
    every one answered within a round trip, or one probe (B5).
    """

    client: httpx2.AsyncClient
    headers: Mapping[str, str]
    auth: httpx2.Auth
    tls: ssl.SSLContext | None
    proxy: str | bool | None
    answer_timeout: float


def check_url(url: str) -> str:
    """The URL of a server's endpoints, without a slash at its end.

    Raises:
        UsageError: it is not http(s).
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not an http or https URL", hint="for example http://127.0.0.1:8000/mcp")
    return url.rstrip("/")


def open_network(url: str, options: dict[str, Any], answer_timeout: float = 10.0) -> Network:
    """What the driver needs to reach `url`. Its `client` is to be closed.

    `options` are httpx2's: `headers`, `auth`, `verify`, `proxy`, `trust_env`. The WebSocket gets the same.
    """
    verify: ssl.SSLContext | bool = options.get("verify", True)
    if url.startswith("http://"):
        verify = False  # there is nothing to verify, and reading the CA bundle takes 20 ms
    auth: Any = options.get("auth") or httpx2.Auth()
    if isinstance(auth, tuple):
        auth = httpx2.BasicAuth(*cast("tuple[str, str]", auth))
    auth = _Failing(auth)
    given: dict[str, Any] = {**options, "verify": verify, "auth": auth}
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(answer_timeout), **given)
    headers = dict(options.get("headers") or {})
    proxy = options.get("proxy")
    if proxy is None and not options.get("trust_env", True):
        proxy = False  # nor does a WebSocket go by what the environment says
    return Network(client, headers, auth, _tls(url, verify), proxy, answer_timeout)


class Bearer(httpx2.Auth):
    """A bearer token on every request; a fresh one, once, where the last is taken no more (§8)."""

    def __init__(self, token: Token) -> None:
        self._given = token
        self._token: str | None = None
        self._asking = asyncio.Lock()

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """The request, and once more if it is answered 401 and there is another token."""
        token = await self._fresh(None)
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401:
            fresh = await self._fresh(token)
            if fresh != token:
                request.headers["Authorization"] = f"Bearer {fresh}"
                yield request

    async def _fresh(self, stale: str | None) -> str:
        """The token, or another one than `stale`; whoever asks meanwhile gets the same."""
        if isinstance(self._given, str):
            return self._given
        async with self._asking:
            if self._token is None or self._token == stale:
                self._token = await self._given()
            return self._token


class _Failing(httpx2.Auth):
    """Authorizes as another does; what goes wrong in it is a failure of the request, to be tried again."""

    def __init__(self, auth: httpx2.Auth) -> None:
        self._auth = auth

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        async with aclosing(self._auth.async_auth_flow(request)) as flow:
            try:
                asked = await anext(flow)
                while True:
                    response = yield asked
                    asked = await flow.asend(response)
            except StopAsyncIteration:
                return
            except httpx2.HTTPError:
                raise
            except Exception as error:
                told = f"the request could not be authorized: {type(error).__name__}: {error}"
                raise httpx2.RequestError(told) from error


def _tls(url: str, verify: ssl.SSLContext | bool) -> ssl.SSLContext | None:
    if not url.startswith("https://"):
        return None
    if isinstance(verify, ssl.SSLContext):
        return verify
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
