"""§5: every endpoint of the session view, its methods, statuses, headers and bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from gapless.protocol.cursor import EventId, parse_event_id
from gapless.server.app import Gapless
from tests.server.harness import (
    BLOCKS,
    JSON,
    Answer,
    Serve,
    Server,
    Socket,
    block_of,
    note,
    on_both_servers,
    request,
    seq_of,
)

UNKNOWN = "/mcp/session/" + "x" * 43


@on_both_servers
@pytest.mark.rule("C2", "L6")
async def test_opening_a_session_tells_its_token_its_first_event_id_and_its_limits(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000, keepalive=7.0)
    answer = await server.ask("POST", "/mcp/session")
    assert answer.status == 201
    body = answer.json()
    token = body["session"]
    first = parse_event_id(body["cursor"])
    assert (first.seq, first.stream, len(first.link)) == (0, 0, 8)
    assert answer.header("mcp-session-id") == token
    assert answer.header("location") == f"/mcp/session/{token}"
    assert body["events"] == f"/mcp/session/{token}/events"
    assert body["durability"] == "memory"
    assert body["limits"]["message"] == 1000
    assert body["timers"]["keepalive"] == 7
    assert body["received"] == 0


@pytest.mark.rule("L5")
async def test_every_session_has_a_token_and_a_first_link_of_its_own(server: Server) -> None:
    sessions = [await server.open() for _ in range(3)]
    assert len({s.token for s in sessions}) == 3
    assert len({s.start for s in sessions}) == 3
    assert all(len(s.token) >= 22 for s in sessions)


@pytest.mark.rule("L2")
async def test_the_class_of_durability_that_is_advertised_is_the_logs_own(
    serve: Serve, tmp_path: Any
) -> None:
    from gapless.log.sqlite import SqliteLog

    for name, synchronous, durability in (("a.db", "full", "fsync"), ("b.db", "normal", "os")):
        server = await serve(SqliteLog(tmp_path / name, synchronous=synchronous))
        session = await server.started()
        assert session.opened.json()["durability"] == durability
        socket = await session.bind(session.start)
        assert (await socket.control("resume-cursor"))["durability"] == durability


@pytest.mark.parametrize("body", [b"", b"{}", b"no json", b"x" * 20_000], ids=["none", "{}", "junk", "long"])
async def test_whatever_is_in_the_body_a_session_is_opened(server: Server, body: bytes) -> None:
    assert (await server.ask("POST", "/mcp/session", body=body)).status == 201


@on_both_servers
@pytest.mark.rule("L6")
async def test_a_message_is_answered_202_with_what_is_received(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    answer = await session.post(1, note("hello"))
    assert (answer.status, answer.json()) == (202, {"received": 1})
    answer = await session.post(2, note("hello"))
    assert (answer.status, answer.json()) == (202, {"received": 2})


@pytest.mark.rule("C4")
async def test_an_ack_is_answered_200_with_the_ack_cursor(server: Server) -> None:
    session = await server.started()
    await session.backend.say(note("a"), note("b"))
    first, second = await session.ids()
    answer = await session.ack(second)
    assert (answer.status, answer.json()) == (200, {"ack": 2})
    answer = await session.ack(first)
    assert (answer.status, answer.json()) == (200, {"ack": 2}), "the highest one that was stated"


@pytest.mark.rule("U7")
async def test_an_upgrade_is_answered_200_with_the_event_the_ticket_and_where_to_go(server: Server) -> None:
    session = await server.open()
    answer = await session.upgrade(session.start, "nonce")
    assert answer.status == 200
    body = answer.json()
    assert body.pop("ticket")
    assert body == {"event": 1, "negotiation": "nonce", "url": f"{session.base}/events"}


@on_both_servers
@pytest.mark.rule("B4", "B9")
async def test_a_session_is_deleted_once_and_is_gone(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    answer = await session.delete()
    assert (answer.status, answer.body) == (204, b"")
    assert answer.all("content-type") == []
    assert (await session.delete()).reason == (404, "session-ended")


async def test_a_204_has_no_content_length(server: Server) -> None:
    session = await server.open()
    assert (await session.delete()).all("content-length") == []


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "", "POST"),
        ("PUT", "", "POST"),
        ("DELETE", "", "POST"),
        ("GET", "/{}", "DELETE"),
        ("POST", "/{}", "DELETE"),
        ("PATCH", "/{}", "DELETE"),
        ("GET", "/{}/messages", "POST"),
        ("DELETE", "/{}/messages", "POST"),
        ("POST", "/{}/events", "GET"),
        ("DELETE", "/{}/events", "GET"),
        ("GET", "/{}/upgrade", "POST"),
        ("GET", "/{}/ack", "POST"),
    ],
)
async def test_another_method_is_405_with_allow(server: Server, method: str, path: str, allow: str) -> None:
    session = await server.open()
    answer = await server.ask(method, "/mcp/session" + path.format(session.token))
    assert answer.reason == (405, "method-not-allowed")
    assert answer.header("allow") == allow


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("text/event-stream", 200),
        ("application/json, text/event-stream;q=0.5", 200),
        ("text/*", 200),
        ("*/*", 200),
        (None, 200),
        ("application/json", 406),
        ("text/html, application/json", 406),
    ],
)
async def test_an_event_stream_is_served_to_who_accepts_one(
    server: Server, accept: str | None, status: int
) -> None:
    session = await server.open()
    wire = await server.wire()
    headers = {} if accept is None else {"Accept": accept}
    await wire.send("GET", f"{session.base}/events", headers | {"Last-Event-ID": session.start})
    head = await wire.head()
    assert head.status == status
    expected = "text/event-stream" if status == 200 else "application/json"
    assert head.header("content-type") == expected


@pytest.mark.parametrize("path", ["messages", "upgrade", "ack"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_415(server: Server, path: str, kind: str | None) -> None:
    session = await server.open()
    headers = {} if kind is None else {"Content-Type": kind}
    headers |= {"Mcp-Client": "p", "Mcp-Message-Number": "1"}
    answer = await server.ask("POST", f"{session.base}/{path}", headers, note("x"))
    assert answer.reason == (415, "unsupported-media-type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
async def test_a_content_type_may_have_parameters_and_any_case(server: Server, kind: str) -> None:
    session = await server.open()
    answer = await session.post(1, note("x"), **{"Content-Type": kind})
    assert answer.status == 202


@pytest.mark.parametrize("path", ["upgrade", "ack"])
async def test_a_control_body_that_is_too_large_is_413(server: Server, path: str) -> None:
    session = await server.open()
    answer = await server.ask("POST", f"{session.base}/{path}", JSON, {"cursor": "x" * 20_000})
    assert answer.reason == (413, "too-large")


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b"{}", b'{"cursor":0}', b'{"cursor":null}', b'{"cursor":"\\ud800"}']
)
@pytest.mark.parametrize("path", ["upgrade", "ack"])
@pytest.mark.rule("C1")
async def test_a_control_body_without_a_cursor_is_malformed(server: Server, path: str, body: bytes) -> None:
    session = await server.open()
    answer = await server.ask("POST", f"{session.base}/{path}", JSON, body)
    assert answer.reason == (400, "malformed")
    assert answer.data["resume-cursor"] == 0


@pytest.mark.parametrize("nonce", [None, "", 7, "n" * 129], ids=["none", "empty", "a number", "long"])
async def test_an_upgrade_without_a_nonce_is_malformed(server: Server, nonce: Any) -> None:
    session = await server.open()
    body = {"cursor": session.start, "protocol": "mcp.v1"} | ({} if nonce is None else {"negotiation": nonce})
    answer = await server.ask("POST", f"{session.base}/upgrade", JSON, body)
    assert answer.reason == (400, "malformed")
    assert (await session.upgrade(session.start)).json()["event"] == 1, "nothing was appended"


@on_both_servers
@pytest.mark.rule("C6")
async def test_an_event_streams_headers_let_nothing_store_or_hold_it_back(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    stream = await session.events(session.start)
    assert stream.head.header("content-type") == "text/event-stream"
    assert stream.head.header("cache-control") == "no-store, no-transform"
    assert stream.head.header("referrer-policy") == "no-referrer"
    assert stream.head.header("x-accel-buffering") == "no"


async def _answers(server: Server) -> list[Answer]:
    session = await server.started()
    answers = [
        session.opened,
        await session.post(2, note("x")),
        await session.post(7, note("x")),
        await session.ack(session.start),
        await session.upgrade(session.start, protocol="other"),
        await session.get("junk"),
        await session.denied("junk"),
        await server.ask("GET", session.base),
        await server.ask("GET", "/mcp"),
        await server.ask("POST", f"{UNKNOWN}/ack"),
        await server.ask("POST", "/mcp/session", {"Host": "evil.example"}),
        await session.upgrade(session.start),
        await session.get(),
        await session.delete(),
    ]
    assert {answer.status for answer in answers} == {200, 201, 202, 400, 404, 405, 409, 421, 426}
    return answers


@on_both_servers
async def test_no_response_may_be_stored_or_tell_where_it_came_from(serve: Serve) -> None:
    """§9: the path holds a secret."""
    for answer in await _answers(await serve()):
        assert answer.header("cache-control") == "no-store", answer
        assert answer.header("referrer-policy") == "no-referrer", answer


@on_both_servers
async def test_a_response_has_one_content_type_and_its_length(serve: Serve) -> None:
    for answer in await _answers(await serve()):
        if answer.status != 204:
            expected = "text/event-stream" if answer.body.startswith(b"event:") else "application/json"
            assert answer.header("content-type") == expected, answer
            assert answer.header("content-length") == str(len(answer.body))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/messages"),
        ("GET", "/events"),
        ("POST", "/upgrade"),
        ("POST", "/ack"),
        ("DELETE", ""),
        ("PUT", ""),
    ],
)
@pytest.mark.rule("B4")
async def test_no_endpoint_knows_a_token_that_was_never_given(server: Server, method: str, path: str) -> None:
    answer = await server.ask(method, UNKNOWN + path, JSON, b"{}" if method == "POST" else b"")
    assert answer.reason == (404, "session-unknown")
    assert answer.data == {"reason": "session-unknown", "retryable": False, "action": "open-new-session"}


@pytest.mark.rule("B4")
async def test_no_handshake_knows_a_token_that_was_never_given(server: Server) -> None:
    answer = await server.knock(f"{UNKNOWN}/events", {"Last-Event-ID": "0"})
    assert isinstance(answer, Answer)
    assert answer.reason == (404, "session-unknown")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/messages"), ("GET", "/events"), ("POST", "/upgrade"), ("POST", "/ack"), ("DELETE", "")],
)
async def test_a_session_of_the_stream_view_is_409_at_the_session_views_endpoints(
    server: Server, method: str, path: str
) -> None:
    streams = await server.initialized()
    answer = await server.ask(method, f"/mcp/session/{streams.token}{path}", JSON)
    assert answer.reason == (409, "wrong-view")
    assert answer.data["retryable"] is False
    assert answer.data["action"] == "fail"
    assert (await streams.post(note("still there"))).status == 202


async def test_a_handshake_for_a_session_of_the_stream_view_is_409(server: Server) -> None:
    streams = await server.initialized()
    answer = await server.knock(f"/mcp/session/{streams.token}/events", {"Last-Event-ID": "0"})
    assert isinstance(answer, Answer)
    assert answer.reason == (409, "wrong-view")


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_session_of_the_session_view_is_409_at_the_stream_views_endpoint(
    server: Server, method: str
) -> None:
    session = await server.started()
    headers = JSON | {"Accept": "application/json, text/event-stream", "Mcp-Session-Id": session.token}
    answer = await server.ask(method, "/mcp", headers, note("x") if method == "POST" else b"")
    assert answer.reason == (409, "wrong-view")
    assert (await session.post(2, note("still there"))).status == 202


async def test_a_prefix_in_settings_is_part_of_every_path_told(serve: Serve) -> None:
    server = await serve(path="/deep/down/")
    answer = await server.ask("POST", "/deep/down/session")
    token = answer.json()["session"]
    assert answer.header("location") == f"/deep/down/session/{token}"
    assert answer.json()["events"] == f"/deep/down/session/{token}/events"


def _mounted(app: Gapless, prefix: str = "/api") -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    return Starlette(routes=[Mount(prefix, app)], lifespan=lifespan)


async def test_a_path_told_is_one_of_a_url_whatever_is_in_the_mounts_prefix(serve: Serve) -> None:
    def mounted(app: Gapless) -> Starlette:
        return _mounted(app, "/{tenant}")

    prefix = "/a%20b%C3%BC%0D%0AX:%20y"
    server = await serve(wrap=mounted, prefix=prefix)
    session = await server.open()
    assert session.opened.header("location") == session.base
    assert session.opened.json()["events"] == f"{session.base}/events"
    assert (await session.pend(session.start))["url"] == f"{session.base}/events"
    socket = await session.bind(session.start)
    (accepted,) = await socket.cross()
    assert f'"url":"{session.base}/events"'.encode() in (accepted.data or b"")


@on_both_servers
@pytest.mark.rule("U7")
async def test_mounted_in_another_application_every_path_told_has_the_mounts_prefix(serve: Serve) -> None:
    server = await serve(wrap=_mounted, prefix="/api")
    session = await server.open()
    assert session.opened.header("location") == session.base
    assert session.opened.json()["events"] == f"{session.base}/events"
    offer = await session.pend(session.start)
    assert offer["url"] == f"{session.base}/events"
    socket = await server.knock(f"{offer['url']}?ticket={offer['ticket']}&cursor={session.start}")
    assert isinstance(socket, Socket)
    (accepted,) = await socket.cross()
    assert accepted.event == "upgrade-accepted"
    assert f'"url":"{session.base}/events"'.encode() in (accepted.data or b"")


@pytest.mark.rule("L1", "L5")
async def test_events_are_numbered_from_1_without_a_hole_and_linked(server: Server) -> None:
    """The chain is that of L5, whatever the kind of event."""
    from gapless.protocol.cursor import link_after

    session = await server.started()
    await session.backend.say(note("a"), note("b", text="ü\u2028"))
    await session.pend(session.start)
    stream = await session.events(session.start)
    at = parse_event_id(session.start)
    for seq, event in enumerate(await stream.events(3), 1):
        link = link_after(at.link, 0, event.event, event.data or b"")
        assert event.id == f"{seq}.0.{link.hex()}"
        at = EventId(seq, 0, link)


async def test_several_requests_share_a_connection(server: Server) -> None:
    session = await server.open()
    wire = await server.wire()
    for number in range(1, 4):
        headers = JSON | {"Mcp-Client": "p", "Mcp-Message-Number": str(number)}
        await wire.send("POST", f"{session.base}/messages", headers, b'{"jsonrpc":"2.0","method":"x"}')
        assert (await wire.answer()).json() == {"received": number}
    await wire.send("POST", f"{session.base}/messages", BLOCKS | {"Mcp-Client": "p"}, block_of(note("y"), 4))
    assert (await wire.answer()).json() == {"received": 4}


async def test_paths_that_are_none_of_ours_are_404(server: Server) -> None:
    session = await server.open()
    for path in (f"{session.base}/nothing", f"{session.base}/events/more", "/elsewhere"):
        assert (await server.ask("GET", path)).status == 404


async def test_a_backend_is_sent_messages_as_they_came_and_nothing_else(server: Server) -> None:
    session = await server.open()
    text = b'{"jsonrpc": "2.0",  "id": 1, "method": "a", "params": {"x": "\\u00fc", "y": 1.50}}'
    await session.post(1, text)
    backend = await server.backends.opened()
    await backend.take()
    assert backend.sent == [text]
    await session.post(2, request(2))
    assert (await backend.take())["id"] == 2
    assert len(server.backends.all) == 1, "one backend for one session"


async def test_a_body_of_several_lines_of_json_reaches_the_backend_as_one(server: Server) -> None:
    session = await server.open()
    await session.post(1, b'{\n "jsonrpc": "2.0",\r\n "method": "a"\n}\n')
    backend = await server.backends.opened()
    assert await backend.take() == {"jsonrpc": "2.0", "method": "a"}
    assert b"\n" not in backend.sent[0]


async def test_every_session_has_a_backend_of_its_own(server: Server) -> None:
    first, second = await server.started(), await server.started()
    assert first.backend is not second.backend
    await first.backend.say(note("for the first"))
    await second.backend.say(note("for the second"))
    stream = await second.events(second.start)
    assert (await stream.message())["method"] == "for the second"
    assert seq_of((await first.ids())[-1]) == 1
