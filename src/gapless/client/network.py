"""How the server is reached: one set of options for the HTTP requests and for the WebSocket."""

from __future__ import annotations

import base64
import ssl
from typing import Any, cast

import httpx2

from gapless.client.driver import Network
from gapless.errors import UsageError

__all__ = ["check_url", "open_network"]


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

    `options` are httpx2's: `headers`, `auth`, `verify`, `proxy`, `trust_env`.
    """
    verify: ssl.SSLContext | bool = options.get("verify", True)
    if url.startswith("http://"):
        verify = False  # there is nothing to verify, and reading the CA bundle takes 20 ms
    given: dict[str, Any] = {**options, "verify": verify}
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(answer_timeout), **given)
    return Network(client, _socket_headers(options), _tls(url, verify), options.get("proxy"), answer_timeout)


def _socket_headers(options: dict[str, Any]) -> dict[str, str]:
    """The headers that the handshake carries: the caller's, and basic authentication."""
    headers = dict(options.get("headers") or {})
    auth = options.get("auth")
    if isinstance(auth, tuple):
        user, password = cast("tuple[str, str]", auth)
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    return headers


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
