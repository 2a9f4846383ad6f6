"""Streamable HTTP upstream in 2026-07-28: requests without a session, and the headers that they need."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gapless.backends.modern import Modern
from gapless.protocol.jsonrpc import RequestId
from tests.backends.conftest import Recorder, soon
from tests.backends.upstream_server import (
    Exchange,
    World,
    block,
    error_of,
    note,
    result,
    unknown,
    upstream_world,
)

REVISION = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": REVISION, "io.modelcontextprotocol/clientCapabilities": {}}


@pytest.fixture
async def world(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with upstream_world(sink, monkeypatch) as world:
        yield world


async def call(world: World, id: RequestId, method: str = "tools/call", **params: Any) -> Exchange:
    """Send a request; how it arrives."""
    return await world.call(id, method, _meta=META, **params)


async def listed(world: World, *tools: dict[str, Any]) -> None:
    """The server lists tools."""
    listing = result("list", tools=[*tools])
    await (await call(world, "list", "tools/list")).json(listing)
    assert await world.sink.next() == listing


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("tools/list", {}, None),
        ("tools/call", {"name": "add"}, "add"),
        ("prompts/get", {"name": "greet"}, "greet"),
        ("resources/read", {"uri": "file:///a b"}, "file:///a b"),
        ("tools/call", {"name": 7}, None),
        ("tools/call", {"name": "höhe"}, "=?base64?" + base64.b64encode("höhe".encode()).decode() + "?="),
        ("tools/call", {"name": " add"}, "=?base64?" + base64.b64encode(b" add").decode() + "?="),
        ("tools/call", {"name": "=?base64?YQ==?="}, "=?base64?PT9iYXNlNjQ/WVE9PT89?="),
    ],
)
async def test_a_requests_headers_repeat_its_revision_method_and_name(
    world: World, method: str, params: dict[str, Any], name: str | None
) -> None:
    exchange = await call(world, 1, method, **params)
    assert exchange.headers["mcp-protocol-version"] == REVISION
    assert exchange.headers["mcp-method"] == method
    assert exchange.headers.get("mcp-name") == name
    assert "mcp-session-id" not in exchange.headers


SCHEMA = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "at": {"type": "object", "properties": {"floor": {"type": "integer", "x-mcp-header": "Floor"}}},
        "loud": {"type": "boolean", "x-mcp-header": "Loud"},
        "plain": {"type": "string"},
        "broken": {"type": "string", "x-mcp-header": "no token"},
        "odd": {"type": "string", "x-mcp-header": 7},
    },
}


async def test_arguments_that_a_listed_tool_wants_in_headers_are_repeated_there(world: World) -> None:
    arguments = {"region": "Köln", "at": {"floor": 3}, "loud": True, "plain": "p", "broken": "b"}
    unlisted = await call(world, 1, name="go", arguments=arguments)
    assert not [name for name in unlisted.headers if name.startswith("mcp-param")]
    await listed(world, {"name": "go", "inputSchema": SCHEMA}, {"name": "stay", "inputSchema": {}})
    exchange = await call(world, 2, name="go", arguments=arguments)
    assert {name: value for name, value in exchange.headers.items() if name.startswith("mcp-param")} == {
        "mcp-param-region": "=?base64?S8O2bG4=?=",
        "mcp-param-floor": "3",
        "mcp-param-loud": "true",
    }
    for id, given in enumerate(({"region": None}, {}, {"at": 5}, [1], "x"), 3):
        exchange = await call(world, id, name="go", arguments=given)
        assert not [name for name in exchange.headers if name.startswith("mcp-param")]


@pytest.mark.parametrize(
    "listing", [b'"x-mcp-header"', b'{"result":{"tools":"x-mcp-header"}}', b'{"error":{"a":"x-mcp-header"}}']
)
def test_a_listing_that_is_none_teaches_nothing_and_costs_nothing(listing: bytes) -> None:
    Modern().learn(listing)


async def test_a_cancellation_closes_the_stream_and_is_not_sent(world: World) -> None:
    exchange = await call(world, 1)
    await exchange.stream(block(note()))
    await world.sink.next()
    await soon(world.say(method="notifications/cancelled", requestId=1))
    await soon(exchange.gone.wait())
    await (await call(world, 2)).result()
    assert await world.sink.next() == result(2)
    assert len(world.sink.emitted) == 2


async def test_a_cancellation_of_what_was_answered_is_not_sent(world: World) -> None:
    await (await call(world, 1)).result()
    await world.sink.next()
    await soon(world.say(method="notifications/cancelled", requestId=1))
    assert (await call(world, 2)).message["id"] == 2


async def test_another_notification_bears_the_revision_and_its_method(world: World) -> None:
    await (await call(world, 1)).result()
    for method, told in (("notifications/a", "notifications/a"), ("é\n", "=?base64?w6kK?=")):
        saying = world.say(method=method)
        exchange = await world.server.next()
        assert exchange.headers["mcp-protocol-version"] == REVISION
        assert exchange.headers["mcp-method"] == told
        await exchange.answer(202)
        await soon(saying)


async def test_a_stream_that_breaks_is_not_resumed_for_its_server_knows_no_such_thing(world: World) -> None:
    exchange = await call(world, 1)
    await exchange.stream(block(note(), id="a", retry=5))
    await world.sink.next()
    await exchange.end()
    await unknown(world, 1)
    assert world.server.quiet


async def test_a_404_is_an_answer_and_not_the_end_of_a_session(world: World) -> None:
    error = {"code": -32601, "message": "Method not found"}
    await (await call(world, 1, "a/b")).json({"jsonrpc": "2.0", "id": 1, "error": error}, 404)
    assert await error_of(world, 1) == error
    assert not world.sink.losses


@pytest.mark.parametrize("plain", [True, False])
async def test_a_server_of_earlier_revisions_makes_a_client_fall_back_to_initialize(
    world: World, plain: bool
) -> None:
    exchange = await call(world, 1, "server/discover")
    if plain:
        await exchange.answer(400, b"Bad Request", content_type="text/plain")
    else:
        error = {"code": -32600, "message": "Bad Request: Missing session ID"}
        await exchange.json({"jsonrpc": "2.0", "id": "server-error", "error": error}, 400)
    told = await error_of(world, 1)
    assert told["code"] == -32022
    assert told["data"]["requested"] == REVISION
    assert REVISION not in told["data"]["supported"]
    assert told["message"].endswith("it seems not to speak 2026-07-28")
    assert plain or "Missing session ID" in told["message"]
    await world.shake()


async def test_another_refusal_says_nothing_of_revisions(world: World) -> None:
    await (await call(world, 1)).answer(429)
    error = await error_of(world, 1)
    assert error["data"] == {"status": 429}
    assert REVISION not in error["message"]


async def test_nothing_is_deleted_where_there_was_no_session(world: World) -> None:
    await (await call(world, 1)).result()
    await soon(world.backend.close())
    assert world.server.quiet
