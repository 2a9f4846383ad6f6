"""Streamable HTTP upstream, of the revisions with sessions: order, streams, loss, an answer to everything."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from gapless.backends import upstream, upstream_session
from gapless.backends.http import HttpBackends
from gapless.errors import BackendError, UsageError
from gapless.protocol.jsonrpc import Envelope, RequestId
from tests.backends.conftest import Recorder, soon
from tests.backends.upstream_server import (
    REVISION,
    SECRET,
    SESSION,
    World,
    block,
    error_of,
    note,
    result,
    unknown,
    upstream_world,
)


@pytest.fixture
async def fresh(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Before the handshake."""
    async with upstream_world(sink, monkeypatch) as world:
        yield world


@pytest.fixture
async def world(fresh: World) -> World:
    """After it."""
    await fresh.shake()
    return fresh


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The method of every request that is made, whether or not it has come anywhere yet."""
    methods: list[str] = []
    opens = upstream.Upstream.open

    def noted(self: upstream.Upstream, method: str, *more: Any) -> Any:
        methods.append(method)
        return opens(self, method, *more)

    monkeypatch.setattr(upstream.Upstream, "open", noted)
    return methods


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once something is held back until something else has been heard."""
    holding, within = asyncio.Event(), upstream_session._within

    async def noted(seconds: float, waiting: Any) -> None:
        holding.set()
        await within(seconds, waiting)

    monkeypatch.setattr(upstream_session, "_within", noted)
    return holding


def at_work(world: World) -> upstream_session.UpstreamSession:
    """The session, to see what it still does."""
    assert isinstance(world.backend, upstream_session.UpstreamSession)
    return world.backend


# What goes up ----------------------------------------------------------------------------------------


async def test_every_message_bears_the_configured_headers_and_after_the_handshake_its_session(
    fresh: World,
) -> None:
    saying = fresh.say("hello", "initialize")
    first = await fresh.server.next()
    assert "mcp-session-id" not in first.headers
    assert "mcp-protocol-version" not in first.headers
    await first.json(result("hello", protocolVersion=REVISION), mcp_session_id=SESSION)
    await soon(saying)
    listening = await fresh.listen()
    await listening.answer(405)
    call = await fresh.call(1)
    for exchange in (first, listening, call):
        assert exchange.path == "/mcp?key=sesame"
        assert exchange.headers["authorization"] == SECRET
        assert exchange.headers["accept"] == "application/json, text/event-stream"
        assert exchange.headers["accept-encoding"] == "identity"
    for exchange in (listening, call):
        assert exchange.headers["mcp-session-id"] == SESSION
        assert exchange.headers["mcp-protocol-version"] == REVISION
    assert call.headers["content-type"] == "application/json"


async def test_cookies_are_kept_by_each_session_for_itself(world: World) -> None:
    await (await world.call(1)).result(set_cookie="node=a; Path=/")
    await world.sink.next()
    assert "cookie" in (await world.call(2)).headers
    other = World(world.server, await HttpBackends(world.server.url).open(Recorder()), Recorder())
    assert "cookie" not in (await other.call(3)).headers
    await soon(other.backend.close())


async def test_a_proxy_of_the_environment_is_used_except_where_it_says_not_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{world.server.port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for url, path in (
        ("http://mcp.invalid/mcp", "http://mcp.invalid/mcp"),
        (world.server.url, "/mcp?key=sesame"),
    ):
        other = World(world.server, await HttpBackends(url).open(Recorder()), Recorder())
        assert (await other.call(1)).path == path
        await soon(other.backend.close())


async def test_a_proxy_that_cannot_be_used_is_told(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "gopher://127.0.0.1:1")
    with pytest.raises(BackendError, match="unusable proxy"):
        await HttpBackends("http://mcp.invalid/mcp").open(sink)


async def test_a_connection_whose_other_end_is_gone_is_noticed_by_the_system(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets: list[Any] = []
    stream = httpx2.AsyncClient.stream

    def noted(client: httpx2.AsyncClient, *request: Any, **more: Any) -> Any:
        @asynccontextmanager
        async def opened() -> AsyncIterator[httpx2.Response]:
            async with stream(client, *request, **more) as response:
                sockets.append(response.extensions["network_stream"].get_extra_info("socket"))
                yield response

        return opened()

    monkeypatch.setattr(httpx2.AsyncClient, "stream", noted)
    await (await world.call(1)).stream(block(note()))
    await world.sink.next()
    assert sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_messages_arrive_in_the_order_in_which_they_were_sent(world: World) -> None:
    sending = [world.say(1), world.say(method="notifications/a"), world.say(2), world.say(3)]
    for told in ("tools/call", "notifications/a", "tools/call", "tools/call"):
        exchange = await world.server.next()
        assert exchange.message["method"] == told
        if told == "notifications/a":
            assert world.server.quiet  # the next one waits until this one is accepted
            assert not sending[1].done()
            await exchange.answer(202)
    await soon(asyncio.gather(*sending))


async def test_nothing_is_sent_before_initialize_is_answered(fresh: World) -> None:
    sending = [fresh.say("hello", "initialize"), fresh.say(method="notifications/initialized")]
    first = await fresh.server.next()
    await first.stream(block(note()), mcp_session_id=SESSION)
    assert await fresh.sink.next_related() == (note(), "hello")
    assert fresh.server.quiet
    await first.write(block(result("hello", protocolVersion=REVISION)))
    exchange = await fresh.server.next()
    assert exchange.headers["mcp-session-id"] == SESSION
    await exchange.answer(202)
    await (await fresh.server.next("GET")).answer(405)
    await soon(asyncio.gather(*sending))


async def test_a_cancellation_is_not_sent_before_its_request_is_known_to_have_arrived(
    world: World, asked: list[str], held: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_NOTICED", 20)
    call = await world.call(1)
    held.clear()
    cancelling = world.say(method="notifications/cancelled", requestId=1)
    await soon(held.wait())
    assert asked == ["POST"]
    await call.stream()
    exchange = await world.server.next()
    assert exchange.message["params"] == {"requestId": 1}
    await exchange.answer(202)
    await soon(cancelling)


async def test_the_stream_of_a_cancelled_call_is_closed_after_a_while_and_settles_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_LINGERING", 0.05)
    call = await world.call(1)
    await call.stream(block(id="a"))
    cancelling = world.say(method="notifications/cancelled", requestId=1)
    await (await world.server.next()).answer(202)
    await soon(cancelling)
    await soon(call.gone.wait())
    await (await world.call(2)).result()
    assert await world.sink.next() == result(2)


async def test_the_stream_of_a_cancelled_call_that_ends_is_not_resumed(
    world: World, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream.Place, "pause", lambda *_: 0)
    await (call := await world.call(1)).stream(block(id="a"))
    reading = at_work(world)._hearing.calls[1].task
    cancelling = world.say(method="notifications/cancelled", requestId=1)
    await (await world.server.next()).answer(202)
    await soon(cancelling)
    await call.end()
    await soon(reading)
    assert asked == ["POST", "POST"]


async def test_a_cancellation_of_what_was_answered_is_dropped(world: World) -> None:
    await (await world.call(1)).result()
    assert await world.sink.next() == result(1)
    await soon(world.say(method="notifications/cancelled", requestId=1))
    assert (await world.call(2)).message["id"] == 2


async def test_an_answer_of_the_client_is_sent_again_if_it_may_not_have_arrived(world: World) -> None:
    sending = world.send(result("q"))
    (await world.server.next()).drop()
    exchange = await world.server.next()
    assert exchange.message == result("q")
    await exchange.answer(202)
    await soon(sending)


async def test_a_notification_that_may_have_arrived_is_not_sent_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sending = world.say(method="notifications/a")
    (await world.server.next()).drop()
    await soon(sending)
    assert "notifications/a was not accepted" in caplog.text
    assert (await world.call(1)).message["id"] == 1


async def test_a_notification_that_nobody_accepts_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upstream_session, "_ACCEPTING", 0.05)
    sending = world.say(method="notifications/a")
    await world.server.next()
    await soon(sending)
    assert "notifications/a was not accepted: TimeoutError" in caplog.text


# What comes down -------------------------------------------------------------------------------------


async def test_what_is_said_on_a_calls_stream_is_related_to_it_and_in_order(world: World) -> None:  # M1
    one, two = await world.call(1), await world.call("1")
    question = {"jsonrpc": "2.0", "id": "q", "method": "roots/list"}
    await one.stream(block(note(n=1)), block(question))
    assert await world.sink.next_related() == (note(n=1), 1)
    assert await world.sink.next_related() == (question, 1)
    await two.stream(block(note(n=2)), block(result("1")))
    assert await world.sink.next_related() == (note(n=2), "1")
    assert await world.sink.next() == result("1")
    await one.write(block(note(n=3)) + block(result(1)) + block(note(n=4)))
    assert await world.sink.next_related() == (note(n=3), 1)
    assert await world.sink.next() == result(1)
    await soon(one.gone.wait())
    assert len(world.sink.emitted) == 7  # nothing follows a result on its stream


async def test_json_over_several_lines_is_one_line_here(world: World) -> None:
    call = await world.call(1)
    text = json.dumps(result(1, a=[1, 2]), indent=2)
    await call.stream("".join(f"data: {line}\r\n" for line in text.split("\n")).encode() + b"\r\n")
    assert await world.sink.next() == result(1, a=[1, 2])
    await (await world.call(2)).json(json.dumps(result(2), indent=2).encode())
    assert await world.sink.next() == result(2)


async def test_the_standalone_stream_is_open_before_anything_else_is_sent(fresh: World) -> None:
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).json(result("hello"), mcp_session_id=SESSION)
    await soon(saying)
    await fresh.sink.next()
    listening = await fresh.listen()
    calling = fresh.say(1)
    assert not fresh.listening.done(), "and so this has its turn"
    await listening.stream(block(note("notifications/tools/list_changed"), id="7", retry=5))
    assert (await fresh.server.next()).message["id"] == 1
    await soon(calling)
    assert await fresh.sink.next_related() == (note("notifications/tools/list_changed"), None)
    await listening.end()
    again = await fresh.server.next("GET")
    assert again.headers["last-event-id"] == "7"
    await again.stream(block(note(n=2), id="8"))
    assert await fresh.sink.next() == note(n=2)


async def test_a_server_that_offers_no_standalone_stream_is_asked_once(
    fresh: World, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream.Place, "pause", lambda *_: 0)
    await fresh.shake()
    listening = at_work(fresh)._listening
    assert listening is not None
    await soon(listening)
    assert asked.count("GET") == 1


async def test_a_server_without_sessions_is_asked_for_no_standalone_stream(fresh: World) -> None:
    await fresh.shake(session=None)
    call = await fresh.call(1)
    assert "mcp-session-id" not in call.headers
    await call.answer(404, b"no")
    assert "answered 404" in (await error_of(fresh, 1))["message"]
    assert not fresh.sink.losses


async def test_an_answer_under_no_id_is_the_calls_own(world: World) -> None:
    error = {"code": -32600, "message": "no"}
    await (await world.call(1)).json({"jsonrpc": "2.0", "id": None, "error": error})
    assert await world.sink.next() == {"jsonrpc": "2.0", "id": 1, "error": error}


async def test_an_answer_that_comes_twice_or_to_nothing_is_dropped(world: World) -> None:
    one, two = await world.call(1), await world.call(2)
    await one.stream(block(result(1)))
    await two.stream(block(result(1)), block(result(9)), block(result(2)))
    assert {(await world.sink.next())["id"] for _ in range(2)} == {1, 2}
    assert len(world.sink.emitted) == 3


async def test_an_answer_on_another_stream_ends_its_own(world: World) -> None:
    one, two = await world.call(1), await world.call(2)
    await one.stream()
    await two.stream(block(result(1)))
    assert await world.sink.next() == result(1)
    await soon(one.gone.wait())


# Streams that end ------------------------------------------------------------------------------------


async def test_a_stream_that_breaks_is_resumed_where_it_was_as_often_as_it_takes(world: World) -> None:
    call = await world.call(1)
    await call.stream(block(id="a", retry=5), block(note(n=1), id="b"))
    assert await world.sink.next() == note(n=1)
    call.drop()
    rest = await world.server.next("GET")
    assert rest.headers["last-event-id"] == "b"
    assert rest.headers["mcp-session-id"] == SESSION
    await rest.stream(block(note(n=2), id="c"))
    assert await world.sink.next_related() == (note(n=2), 1)
    await rest.end()
    await (await world.server.next("GET")).answer(503)
    (await world.server.next("GET")).drop()
    rest = await world.server.next("GET")
    assert rest.headers["last-event-id"] == "c"
    await rest.stream(block(result(1), id="d"))
    assert await world.sink.next() == result(1)
    await soon(rest.gone.wait())


async def test_a_resume_waits_for_as_long_as_the_server_has_asked(world: World) -> None:
    call = await world.call(1)
    await call.stream(block(id="a", retry=300))
    await call.end()
    began = time.monotonic()
    await world.server.next("GET")
    assert time.monotonic() - began >= 0.3


async def test_a_stream_without_ids_that_ends_leaves_the_outcome_unknown(world: World) -> None:
    await (call := await world.call(1)).stream(block(note()))
    await world.sink.next()
    await call.end()
    assert "ended the stream before its answer" in await unknown(world, 1)
    (await world.call(2)).drop()
    assert "broke the connection" in await unknown(world, 2)


@pytest.mark.parametrize("last", ["", "é"])
async def test_an_id_that_is_none_or_that_no_header_can_hold_is_no_place_to_go_on_from(
    world: World, last: str
) -> None:
    await (call := await world.call(1)).stream(block(id="a", retry=5), block(note(), id=last))
    await world.sink.next()
    await call.end()
    assert "ended the stream before its answer" in await unknown(world, 1)
    assert world.server.quiet


@pytest.mark.parametrize("status", [400, 405])
async def test_a_stream_that_cannot_be_resumed_leaves_the_outcome_unknown(world: World, status: int) -> None:
    await (call := await world.call(1)).stream(block(id="a", retry=5))
    await call.end()
    await (await world.server.next("GET")).answer(status)
    assert f"answered {status} when it was asked for the rest" in await unknown(world, 1)


async def test_resumes_that_bring_nothing_are_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_session, "_FRUITLESS", 3)
    monkeypatch.setattr(upstream_session, "_PATIENCE", 0.01)
    await (call := await world.call(1)).stream(block(id="a", retry=5))
    await call.end()
    for _ in range(4):
        rest = await world.server.next("GET")
        await rest.stream(block(id="a"))  # what it said before
        await rest.end()
    await unknown(world, 1)
    assert world.server.quiet


async def test_resumes_that_were_open_for_long_are_not_given_up_though_they_brought_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_FRUITLESS", 1)
    monkeypatch.setattr(upstream_session, "_LIVED", 0)
    await (call := await world.call(1)).stream(block(id="a", retry=5))
    await call.end()
    for _ in range(3):
        rest = await world.server.next("GET")
        await rest.stream(b":\n\n")
        await rest.end()
    await (await world.server.next("GET")).stream(block(result(1)))
    assert await world.sink.next() == result(1)


async def test_a_message_above_the_limit_on_the_standalone_stream_is_not_asked_for_again(
    fresh: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream.Place, "pause", lambda *_: 0)
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).json(result("hello"), mcp_session_id=SESSION)
    await soon(saying)
    listening = await fresh.listen()
    await listening.stream(block(note(), id="a"), block(note(text="x" * 4000), id="b"))
    again = await fresh.server.next("GET")
    assert "last-event-id" not in again.headers
    await again.stream(block(note(n=2)))
    assert [(await fresh.sink.next()).get("params") for _ in range(3)] == [None, {}, {"n": 2}]


# Answers that are none -------------------------------------------------------------------------------


async def test_an_error_page_is_told_as_its_status_and_never_as_its_text(world: World) -> None:
    await (await world.call(1)).answer(418, b"<html>teapot</html>", content_type="text/html")
    error = await error_of(world, 1)
    assert error["message"] == (
        f"the MCP server at http://127.0.0.1:{world.server.port}/mcp answered 418 Whatever"
    )
    assert error["data"] == {"status": 418}
    await (await world.call(2)).answer(502, b"<html>oops</html>", content_type="text/html")
    assert "oops" not in await unknown(world, 2)


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_of_the_servers_own_passes_whatever_its_status(world: World, status: int) -> None:
    error = {"code": -32602, "message": "no such tool", "data": {"a": 1}}
    await (await world.call(1)).json({"jsonrpc": "2.0", "id": "server-error", "error": error}, status)
    assert await world.sink.next() == {"jsonrpc": "2.0", "id": 1, "error": error}


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_says_which_option_sets_the_headers(world: World, status: int) -> None:
    await (await world.call(1)).answer(status, www_authenticate="Bearer")
    assert "--upstream-header" in (await error_of(world, 1))["message"]
    error = {"code": -32001, "message": "the token is over"}
    await (await world.call(2)).json({"jsonrpc": "2.0", "id": None, "error": error}, status)
    assert "the token is over; --upstream-header" in (await error_of(world, 2))["message"]


async def test_a_redirect_is_told_and_not_followed(world: World) -> None:
    await (await world.call(1)).answer(307, location=f"{world.server.url}&more")
    message = (await error_of(world, 1))["message"]
    assert f"to 'http://127.0.0.1:{world.server.port}/mcp'; redirects are not followed" in message
    assert world.server.quiet


@pytest.mark.parametrize(
    ("status", "kind", "body", "told"),
    [
        (202, "text/plain", b"", "answered 202 Accepted"),
        (200, "text/html", b"<html>", "answered 200 OK with 'text/html'"),
        (200, "application/json", b"[]", "no answer to the request"),
        (200, "application/json", b"{", "no answer to the request"),
        (200, "application/json", b'{"jsonrpc":"2.0","id":7,"result":{}}', "no answer to the request"),
    ],
)
async def test_what_is_no_answer_becomes_an_error(
    world: World, status: int, kind: str, body: bytes, told: str
) -> None:
    await (await world.call(1)).answer(status, body, content_type=kind)
    assert told in (await error_of(world, 1))["message"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_above_the_limit_is_an_error_on_its_request(world: World, streamed: bool) -> None:
    call = await world.call(1)
    large = result(1, text="x" * 4000)
    if streamed:
        await call.stream(block(note(), id="a"), block(large, id="b"))
        assert await world.sink.next() == note()
    else:
        await call.json(large)
    error = await error_of(world, 1)
    assert error["data"] == {"reason": "too-large"}
    await (await world.call(2)).result()  # and is not asked for again
    assert await world.sink.next() == result(2)


async def test_messages_that_nobody_may_see_are_answered_in_their_place(world: World) -> None:  # W4
    call = await world.call(1)
    await call.stream(
        b'data: {"jsonrpc":"2.0","method":"a","params":{"x":NaN}}\n\n',
        b'data: {"jsonrpc":"2.0","id":"q","method":"ask","params":{"x":NaN}}\n\n',
    )
    answer = await world.server.next()
    assert (answer.message["id"], answer.message["error"]["code"]) == ("q", -32600)
    await answer.answer(202)
    await call.write(b'data: {"jsonrpc":"2.0","id":1,"result":{"x":NaN}}\n\n')
    assert (await error_of(world, 1))["code"] == -32603
    assert len(world.sink.emitted) == 2


async def test_a_server_that_is_not_there_has_certainly_not_been_sent_the_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "_TRIES", 0)
    await world.server.stop()
    await soon(world.say(1))
    error = await error_of(world, 1)
    assert error["data"] == {"reason": "not-sent"}
    assert "cannot be reached" in error["message"]


# A session that is gone --------------------------------------------------------------------------------


async def test_a_session_that_was_forgotten_is_lost_with_what_it_did_not_take(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_NOTICED", 10)
    taken, refused, other = await world.call(1), await world.call(2), await world.call(3)
    await taken.stream(block(note()))
    await world.sink.next()
    await refused.answer(404, b"Session not found")
    await other.answer(404, b"Session not found")
    assert await world.sink.loss() == (
        f"the MCP server at http://127.0.0.1:{world.server.port}/mcp has forgotten the session"
    )
    assert world.sink.untaken == {2, 3}
    with pytest.raises(BackendError):
        await soon(world.say(4))
    await soon(taken.gone.wait())
    await soon(world.backend.close())
    assert world.server.quiet  # there is no session to delete


@pytest.mark.parametrize("id", [3, None])
async def test_a_loss_waits_a_moment_for_what_other_requests_hear_and_lets_nothing_more_go_out(
    world: World,
    id: RequestId | None,
    asked: list[str],
    held: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_session, "_NOTICED", 10)
    one, two = await world.call(1), await world.call(2)
    held.clear()
    await one.answer(404)
    await soon(held.wait())
    late = world.say(id, "notifications/a" if id is None else "tools/call")
    await two.json(result(2))
    assert await world.sink.next() == result(2)
    assert await world.sink.loss()
    assert world.sink.untaken == ({1} if id is None else {1, 3})
    with pytest.raises(BackendError):
        await soon(late)
    assert asked == ["POST", "POST"]


async def test_a_request_that_hears_nothing_in_time_may_have_been_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_NOTICED", 0.05)
    await world.call(1)
    await (await world.call(2)).answer(404)
    await world.sink.loss()
    assert world.sink.untaken == {2}


async def test_a_notification_or_a_resume_that_is_answered_404_loses_the_session(world: World) -> None:
    await (call := await world.call(1)).stream(block(id="a", retry=5))
    await call.end()
    await (await world.server.next("GET")).answer(404)
    await world.sink.loss()
    assert world.sink.untaken == frozenset()


async def test_a_404_to_a_notification_loses_the_session(world: World) -> None:
    saying = world.say(method="notifications/a")
    await (await world.server.next()).answer(404)
    await world.sink.loss()
    with pytest.raises(BackendError):
        await soon(saying)


async def test_a_404_to_the_first_get_means_that_there_is_no_standalone_stream(fresh: World) -> None:
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).json(result("hello"), mcp_session_id=SESSION)
    await soon(saying)
    await (await fresh.listen()).answer(404)
    await (await fresh.call(1)).result()
    assert not fresh.sink.losses


async def test_a_404_to_a_later_get_loses_the_session(fresh: World) -> None:
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).json(result("hello"), mcp_session_id=SESSION)
    await soon(saying)
    listening = await fresh.listen()
    await listening.stream(block(retry=5))
    await listening.end()
    await (await fresh.server.next("GET")).answer(404)
    await fresh.sink.loss()


# The handshake, and the end ----------------------------------------------------------------------------


async def test_initialize_is_tried_again_while_the_server_is_busy_or_away(fresh: World) -> None:
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).answer(503)
    (await fresh.server.next()).drop()
    await (await fresh.server.next()).json(result("hello"), mcp_session_id=SESSION)
    await soon(saying)
    assert await fresh.sink.next() == result("hello")


async def test_initialize_is_not_tried_for_ever(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_session, "_REACHING", 0.3)
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).answer(503)
    await (await fresh.server.next()).answer(503)
    await unknown(fresh, "hello")
    await soon(saying)
    assert fresh.server.quiet


async def test_an_initialize_whose_last_try_was_not_sent_says_so(
    fresh: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_REACHING", 0.3)
    monkeypatch.setattr(upstream, "_TRIES", 0)
    saying = fresh.say("hello", "initialize")
    await (await fresh.server.next()).answer(503)
    await fresh.server.stop()
    assert (await error_of(fresh, "hello"))["data"] == {"reason": "not-sent"}
    await soon(saying)


async def test_an_initialize_that_is_not_answered_ends(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_session, "_INITIALIZING", 0.5)
    saying = fresh.say("hello", "initialize")
    await fresh.server.next()
    assert "has not answered initialize" in (await error_of(fresh, "hello"))["message"]
    await soon(saying)


async def test_a_server_of_2026_only_is_told_as_one(fresh: World) -> None:
    saying = fresh.say("hello", "initialize")
    error = {"code": -32022, "message": "Unsupported protocol version", "data": {"supported": ["2026-07-28"]}}
    await (await fresh.server.next()).json({"jsonrpc": "2.0", "id": "hello", "error": error}, 400)
    await soon(saying)
    told = await error_of(fresh, "hello")
    assert (told["code"], told["data"]) == (error["code"], error["data"])
    assert told["message"].endswith("Unsupported protocol version; it may speak 2026-07-28 only")


async def test_another_refusal_of_initialize_passes_as_it_is(fresh: World) -> None:
    saying = fresh.say("hello", "initialize")
    error = {"code": -32000, "message": "too many sessions"}
    await (await fresh.server.next()).json({"jsonrpc": "2.0", "id": None, "error": error}, 400)
    await soon(saying)
    assert await error_of(fresh, "hello") == error


async def test_the_session_is_deleted_when_ours_ends_and_its_streams_are_closed_before(world: World) -> None:
    call = await world.call(1)
    await call.stream(block(note()))
    await world.sink.next()
    closing = asyncio.create_task(world.backend.close())
    deleting = await world.server.next("DELETE")
    assert deleting.headers["mcp-session-id"] == SESSION
    await soon(call.gone.wait())
    await deleting.answer(200)
    await soon(closing)
    assert not world.sink.losses
    with pytest.raises(BackendError):
        await soon(world.say(2))


async def test_a_server_that_does_not_answer_holds_up_no_close(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_session, "_LEAVING", 0.2)
    sending = world.say(method="notifications/a")
    await world.server.next()
    await soon(world.backend.close(), 5)
    with pytest.raises(BackendError):
        await soon(sending)


async def test_a_sink_may_close_its_backend(world: World) -> None:
    closed = asyncio.Event()

    class Closing(Recorder):
        async def emit(
            self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
        ) -> None:
            await super().emit(data, envelope, related, more)
            await closing.backend.close()
            closed.set()

    sink = Closing()
    closing = World(world.server, await HttpBackends(world.server.url).open(sink), sink)
    await (await closing.call(1)).stream(block(note()), block(note()))
    await soon(closed.wait())
    assert len(sink.emitted) == 1


# Settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://host/mcp", "is no URL of a server"),
        ("http:///mcp", "is no URL of a server"),
        ("http://host:0/mcp", "is no URL of a server"),
        ("http://host:port/mcp", "that is none"),
        ("http://[::1/mcp", "that is none"),
        ("https://ann:sesame@host/mcp", "with a user or password"),
    ],
)
def test_an_url_that_is_none_or_holds_a_password_is_refused(url: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        HttpBackends(url)
    assert "sesame" not in refused.value.line


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("a b", "sesame", "is no name of a header"),
        ("a", "", "is empty or holds"),
        ("a", "sesame\nb: c", "is empty or holds"),
        ("a", "sésame", "is empty or holds"),
        ("mcp-session-id", "sesame", "is not yours to set"),
        ("Host", "sesame", "is not yours to set"),
    ],
)
def test_a_header_that_is_none_or_ours_is_refused(name: str, value: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        HttpBackends("http://host/mcp", headers={name: value})
    assert "same" not in refused.value.line


async def test_neither_headers_nor_queries_are_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gapless")
    (await world.call(1)).drop()
    await unknown(world, 1)
    sending = world.say(method="notifications/a")
    await (await world.server.next()).answer(500)
    await soon(sending)
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("gapless"))
    assert "/mcp: notifications/a was answered with 500" in ours
    assert "sesame" not in ours
