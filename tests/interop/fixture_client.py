"""The client that the suite's client scenarios judge: the official SDK's, on our transport.

The suite's servers are standard ones, and our transport speaks to Gapless. So a `gapless serve --upstream`
is between the two, and what is judged is how that behaves towards them. Where it is authorization that is
judged, a gatekeeper is between the two, and what is judged is how our transport authorizes.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp import Client, MCPError
from mcp.client.auth import OAuthClientProvider, TokenStorage
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)
from mcp_types import ElicitResult
from pydantic import AnyUrl

import gapless
from gapless.client.driver import Observation
from tests.interop import processes
from tests.interop.gatekeeper import guarding

__all__ = ["main"]

_HERE = AnyUrl("http://localhost:3000/callback")
"""Where the user's browser would come back to."""
_METADATA = "https://conformance-test.local/client-metadata.json"
"""The client's own URL, which the suite knows."""


class _Stored(TokenStorage):
    """What an application remembers of its authorization."""

    def __init__(self, client: OAuthClientInformationFull | None) -> None:
        self._client = client
        self._tokens: OAuthToken | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


class _User:
    """Agrees to everything: the browser, and who sits at it."""

    def __init__(self) -> None:
        self._back = ""

    async def visit(self, url: str) -> None:
        async with httpx2.AsyncClient(verify=False) as browser:
            self._back = (await browser.get(url)).headers["location"]

    async def come_back(self) -> AuthorizationCodeResult:
        said = {name: values[0] for name, values in parse_qs(urlsplit(self._back).query).items()}
        return AuthorizationCodeResult.model_validate(said)


def _oauth(url: str, context: dict[str, Any]) -> OAuthClientProvider:
    user, known = _User(), None
    if "client_id" in context:
        known = OAuthClientInformationFull(
            client_id=context["client_id"],
            client_secret=context["client_secret"],
            redirect_uris=[_HERE],
            token_endpoint_auth_method="client_secret_basic",
        )
    return OAuthClientProvider(
        server_url=url,
        client_metadata=OAuthClientMetadata(client_name="gapless", redirect_uris=[_HERE]),
        storage=_Stored(known),
        redirect_handler=user.visit,
        callback_handler=user.come_back,
        client_metadata_url=_METADATA,
    )


async def _accept(context: Any, params: Any) -> ElicitResult:
    """Accept with nothing filled in but the defaults."""
    properties = params.requested_schema.get("properties", {})
    defaults = {name: about["default"] for name, about in properties.items() if "default" in about}
    return ElicitResult(action="accept", content=defaults)


async def _use(client: Client, scenario: str) -> None:
    tools = [tool.name for tool in (await client.list_tools()).tools]
    match scenario:
        case "tools_call":
            await client.call_tool("add_numbers", {"a": 2, "b": 3})
        case "elicitation-sep1034-client-defaults":
            await client.call_tool("test_client_elicitation_defaults", {})
        case "sse-retry":
            result = await client.call_tool("test_reconnection", {})
            assert not result.is_error, result
        case _:
            assert isinstance(tools, list)


async def _authorize(url: str, scenario: str, context: dict[str, Any]) -> None:
    """Use what has to be authorized: by requests, and then through the door, where the handshake is."""
    moved = asyncio.Event()

    def observe(seen: Observation) -> None:
        if seen.transport == "websocket":
            moved.set()

    async with guarding(url) as (through, keeper):
        connection = gapless.connect(through, upgrade="never", auth=_oauth(url, context), observe=observe)
        if scenario == "auth/scope-retry-limit":
            await _denied(connection)
            return
        async with Client(connection, mode="legacy") as client:
            (tool,) = (await client.list_tools()).tools
            assert not (await client.call_tool(tool.name, {})).is_error
            connection.migrate()
            await moved.wait()
            assert not (await client.call_tool(tool.name, {})).is_error
        assert not keeper.held, "Gapless did not ask the server what its client did"
        messages = list(filter(None, keeper.heard))
        assert len(messages) == len(set(messages)), "the server was asked twice"
        assert keeper.handshakes == 1


async def _denied(connection: gapless.Connection) -> None:
    """Whom no token helps is told so."""
    try:
        async with Client(connection, mode="legacy"):
            pass
    except* MCPError:
        pass
    assert connection.error is not None
    assert connection.error.code == "insufficient-scope", connection.error


async def main(url: str, scenario: str, context: dict[str, Any]) -> None:
    """Do what a scenario asks of a client."""
    if scenario.startswith("auth/"):
        await _authorize(url, scenario, context)
        return
    async with processes.serving(processes.gapless("--upstream", url)) as through:
        connection = gapless.connect(through, upgrade="never")
        async with Client(connection, mode="legacy", elicitation_callback=_accept) as client:
            await _use(client, scenario)
