"""§8: what is refused, in which words, and what is refused first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.server.harness import (
    BOTH,
    JSON,
    Answer,
    Fragile,
    Serve,
    Server,
    Session,
    Socket,
    block_of,
    encode,
    note,
    on_both_servers,
    request,
    soon,
)

FOREIGN = "0.0.0123456789abcdef"
EVIL = {"Host": "evil.example"}
CROSS = {"Origin": "https://evil.example"}


# Each refusal and its words ------------------------------------------------------------------------


async def _bound(server: Server) -> tuple[Session, Socket]:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    return session, socket


async def _answering(server: Server, ask: Callable[[Session], Awaitable[Answer]]) -> Answer:
    """What a newcomer is told while the bound socket answers its probe."""
    session, socket = await _bound(server)
    asking = asyncio.ensure_future(ask(session))
    await socket.control("probe")
    await socket.send(block_of({}, event="probe-ack"))
    return await asking


async def _duplicate(server: Server) -> Answer:
    session = await server.started()
    await session.post(2, request(1))
    return await session.post(3, request(1))


async def _evicted(server: Server) -> Answer:
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(9)))
    return await session.get(session.start)


async def _conflict(server: Server) -> Answer:
    session = await server.started()
    await session.post(2, note("a"))
    return await session.post(2, note("b"))


async def _spent(server: Server) -> Answer:
    session = await server.open()
    return await session.denied(session.start, "never-issued")


async def _gone(server: Server) -> Answer:
    session = await server.started()
    await session.backend.lose()
    return await session.get(session.start)


async def _superseded(server: Server) -> Answer:
    session = await server.open()
    await session.pend(session.start)
    await session.get()
    return await session.get(session.start)


async def _with(server: Server, ask: Callable[[Session], Awaitable[Any]]) -> Answer:
    session = await server.started()
    answer = await ask(session)
    assert isinstance(answer, Answer)
    return answer


async def _deleted(server: Server) -> Answer:
    session = await server.open()
    await session.delete()
    return await session.delete()


KINDS: dict[str, tuple[Callable[[Server], Awaitable[Answer]], int, bool, str]] = {
    "malformed": (lambda s: _with(s, lambda x: x.get("junk")), 400, False, "fail"),
    "method-not-allowed": (lambda s: _with(s, lambda x: s.ask("GET", x.base)), 405, False, "fail"),
    "not-acceptable": (lambda s: _with(s, lambda x: x.get(Accept="text/html")), 406, False, "fail"),
    "unsupported-media-type": (
        lambda s: _with(s, lambda x: x.post(2, note("x"), **{"Content-Type": "text/css"})),
        415,
        False,
        "fail",
    ),
    "too-large": (lambda s: _with(s, lambda x: x.post(2, note("x" * 5000))), 413, False, "fail"),
    "duplicate-id": (_duplicate, 409, False, "fail"),
    "message-gap": (lambda s: _with(s, lambda x: x.post(3, note("x"))), 409, True, "resend"),
    "message-conflict": (_conflict, 409, False, "fail"),
    "cursor-evicted": (_evicted, 409, False, "open-new-session"),
    "cursor-ahead": (lambda s: _with(s, lambda x: x.get("7" + FOREIGN[1:])), 409, False, "open-new-session"),
    "cursor-foreign": (lambda s: _with(s, lambda x: x.get(FOREIGN)), 409, False, "open-new-session"),
    "upgrade-unavailable": (
        lambda s: _with(s, lambda x: x.upgrade(x.start, protocol="mcp.v2")),
        426,
        False,
        "close-door",
    ),
    "ticket-spent": (_spent, 409, False, "resume"),
    "websocket-bound": (lambda s: _answering(s, lambda x: x.get(x.start)), 409, True, "retry"),
    "session-ended": (_deleted, 404, False, "open-new-session"),
    "session-superseded": (_superseded, 404, False, "open-new-session"),
    "backend-lost": (_gone, 404, False, "open-new-session"),
}


@pytest.mark.parametrize("reason", KINDS)
@pytest.mark.rule("C2", "C5")
async def test_a_refusal_tells_its_reason_what_to_do_and_where_the_server_is(
    serve: Serve, reason: str
) -> None:
    cause, status, retryable, action = KINDS[reason]
    server = await serve(max_message_bytes=2000, retain_events=4)
    answer = await cause(server)
    assert answer.reason == (status, reason)
    assert answer.json()["id"] is None
    assert answer.json()["error"]["code"] == -32000
    data = answer.data
    position = {name: data.pop(name) for name in ("resume-cursor", "floor", "received") if name in data}
    assert data == {"reason": reason, "retryable": retryable, "action": action}
    if reason != "method-not-allowed":
        assert len(position) == 3
    assert all(type(number) is int for number in position.values()), "bare integers, no cursors"


@pytest.mark.rule("C5", "L3")
async def test_an_evicted_cursor_is_told_the_floor_and_what_is_committed(serve: Serve) -> None:
    server = await serve(retain_events=4)
    data = (await _evicted(server)).data
    assert (data["floor"], data["resume-cursor"], data["received"]) == (5, 9, 1)


@pytest.mark.rule("L6")
async def test_a_gap_is_told_what_is_received(server: Server) -> None:
    session = await server.started()
    await session.post(2, note("x"))
    answer = await session.post(7, note("x"))
    assert answer.reason == (409, "message-gap")
    assert answer.data["received"] == 2


@on_both_servers
@pytest.mark.parametrize("reason", ["malformed", "cursor-foreign", "ticket-spent", "websocket-bound"])
@pytest.mark.rule("U8", "C5")
async def test_a_handshake_is_refused_by_a_denial_with_the_same_body(serve: Serve, reason: str) -> None:
    server = await serve()
    cursors = {"malformed": "junk", "cursor-foreign": FOREIGN}
    if reason == "websocket-bound":
        answer = await _answering(server, lambda x: x.denied(x.start))
    elif reason == "ticket-spent":
        answer = await _spent(server)
    else:
        session = await server.open()
        answer = await session.denied(cursors[reason])
    _, status, retryable, action = KINDS[reason]
    assert answer.reason == (status, reason)
    assert answer.json()["id"] is None
    assert (answer.data["retryable"], answer.data["action"]) == (retryable, action)
    assert answer.header("content-type") == "application/json"
    assert answer.header("cache-control") == "no-store"


# Host and Origin -----------------------------------------------------------------------------------

TARGETS = [
    ("POST", "/mcp/session"),
    ("GET", "/mcp/session/{}/events"),
    ("POST", "/mcp/session/{}/messages"),
    ("POST", "/mcp/session/{}/upgrade"),
    ("POST", "/mcp/session/{}/ack"),
    ("DELETE", "/mcp/session/{}"),
    ("POST", "/mcp"),
    ("GET", "/mcp"),
    ("DELETE", "/mcp"),
]


@pytest.mark.parametrize(("method", "path"), TARGETS)
@pytest.mark.rule("M5")
async def test_another_host_is_421_everywhere(server: Server, method: str, path: str) -> None:
    session = await server.open()
    answer = await server.ask(method, path.format(session.token), EVIL)
    assert answer.reason == (421, "host-forbidden")


@pytest.mark.parametrize(("method", "path"), TARGETS)
@pytest.mark.rule("M5")
async def test_another_origin_is_403_everywhere(server: Server, method: str, path: str) -> None:
    session = await server.open()
    answer = await server.ask(method, path.format(session.token), CROSS)
    assert answer.reason == (403, "origin-forbidden")


@on_both_servers
@pytest.mark.parametrize(
    ("headers", "reason"), [(EVIL, (421, "host-forbidden")), (CROSS, (403, "origin-forbidden"))]
)
@pytest.mark.rule("U8")
async def test_another_host_or_origin_is_refused_before_any_101(
    serve: Serve, headers: dict[str, str], reason: tuple[int, str]
) -> None:
    server = await serve()
    session = await server.open()
    wire = await server.wire()
    await wire.send(
        "GET",
        f"{session.base}/events",
        {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": "mcp.v1",
            "Last-Event-ID": session.start,
        }
        | headers,
    )
    assert (await wire.answer()).reason == reason
    assert (await session.get(FOREIGN)).data["resume-cursor"] == 0, "no door was opened"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]", "[::1]:8000"])
async def test_loopback_hosts_are_allowed_at_any_port(server: Server, host: str) -> None:
    assert (await server.ask("POST", "/mcp/session", {"Host": host})).status == 201


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "evil.example:80",
        "127.0.0.1.nip.io",
        "localhost:80@evil",
        "[::2]",
        "",
        "127.0.0.2",
    ],
)
async def test_other_hosts_are_not(server: Server, host: str) -> None:
    answer = await server.ask("POST", "/mcp/session", {"Host": host})
    assert answer.reason == (421, "host-forbidden")


@pytest.mark.parametrize(
    "origin", ["http://localhost", "https://localhost:5173", "http://127.0.0.1:3000", "http://[::1]:80"]
)
async def test_loopback_origins_are_allowed_at_any_port(server: Server, origin: str) -> None:
    assert (await server.ask("POST", "/mcp/session", {"Origin": origin})).status == 201


@pytest.mark.parametrize(
    "origin",
    ["null", "", "https://evil.example", "ftp://localhost", "http://localhost@evil.example", "http://[x"],
)
async def test_other_origins_are_not(server: Server, origin: str) -> None:
    answer = await server.ask("POST", "/mcp/session", {"Origin": origin})
    assert answer.reason == (403, "origin-forbidden")


async def test_the_lists_of_hosts_and_origins_are_settings(serve: Serve) -> None:
    server = await serve(hosts=("mcp.example",), origins=("https://app.example",))
    good = {"Host": "mcp.example:8443", "Origin": "https://app.example"}
    assert (await server.ask("POST", "/mcp/session", good)).status == 201
    assert (await server.ask("POST", "/mcp/session")).reason == (421, "host-forbidden")
    for origin in ("http://app.example", "https://app.example:444", "http://localhost"):
        answer = await server.ask("POST", "/mcp/session", good | {"Origin": origin})
        assert answer.reason == (403, "origin-forbidden")


async def test_a_star_allows_any_host_and_origin(serve: Serve) -> None:
    server = await serve(hosts=("*",), origins=("*",))
    assert (await server.ask("POST", "/mcp/session", EVIL | CROSS)).status == 201


# The first that applies wins -----------------------------------------------------------------------


@on_both_servers
async def test_host_comes_before_origin(serve: Serve) -> None:
    server = await serve()
    assert (await server.ask("POST", "/mcp/session", EVIL | CROSS)).reason == (421, "host-forbidden")


async def test_host_comes_before_limits(server: Server) -> None:
    server.app.sessions.drain(1012)
    assert (await server.ask("POST", "/mcp/session", EVIL)).reason == (421, "host-forbidden")


async def test_origin_comes_before_limits(server: Server) -> None:
    server.app.sessions.drain(1012)
    assert (await server.ask("POST", "/mcp/session", CROSS)).reason == (403, "origin-forbidden")


async def test_origin_comes_before_an_unknown_session(server: Server) -> None:
    answer = await server.ask("GET", "/mcp/session/none/events", CROSS)
    assert answer.reason == (403, "origin-forbidden")


async def test_limits_come_before_an_unknown_session(server: Server) -> None:
    server.app.sessions.drain(1012)
    answer = await server.ask("GET", "/mcp/session/none/events")
    assert answer.reason == (503, "limit")
    assert int(answer.header("retry-after")) >= 1


async def test_an_unknown_session_comes_before_405(server: Server) -> None:
    assert (await server.ask("PUT", "/mcp/session/none")).reason == (404, "session-unknown")


async def test_the_view_comes_before_an_ended_session(server: Server) -> None:
    streams = await server.initialized()
    await server.ask("DELETE", "/mcp", streams.headers)
    assert (await server.ask("DELETE", f"/mcp/session/{streams.token}")).reason == (409, "wrong-view")


@pytest.mark.rule("B4")
async def test_an_ended_session_comes_before_405(server: Server) -> None:
    session = await server.open()
    await session.delete()
    assert (await server.ask("PUT", session.base)).reason == (404, "session-ended")


@pytest.mark.rule("B4")
async def test_an_ended_session_comes_before_a_malformed_cursor(server: Server) -> None:
    session = await server.open()
    await session.delete()
    assert (await session.get("junk")).reason == (404, "session-ended")
    assert (await session.upgrade("junk")).reason == (404, "session-ended")
    assert (await session.denied("junk")).reason == (404, "session-ended")


async def test_405_comes_before_406(server: Server) -> None:
    session = await server.open()
    answer = await server.ask("POST", f"{session.base}/events", {"Accept": "text/html"})
    assert answer.reason == (405, "method-not-allowed")


async def test_406_comes_before_a_malformed_cursor(server: Server) -> None:
    session = await server.open()
    assert (await session.get("junk", Accept="text/html")).reason == (406, "not-acceptable")


async def test_415_comes_before_413(serve: Serve) -> None:
    server = await serve(max_message_bytes=100)
    session = await server.open()
    answer = await session.post(1, note("x" * 5000), **{"Content-Type": "text/plain"})
    assert answer.reason == (415, "unsupported-media-type")


@pytest.mark.rule("L6")
async def test_413_comes_before_a_missing_number(serve: Serve) -> None:
    server = await serve(max_message_bytes=100)
    session = await server.open()
    assert (await session.post(None, note("x" * 5000))).reason == (413, "too-large")


@pytest.mark.rule("U6")
async def test_a_malformed_cursor_comes_before_426(server: Server) -> None:
    session = await server.open()
    answer = await session.get("junk", **{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert answer.reason == (400, "malformed")
    answer = await server.knock(f"{session.base}/events", {"Last-Event-ID": "junk"}, subprotocols=())
    assert isinstance(answer, Answer)
    assert answer.reason == (400, "malformed")
    assert (await session.upgrade("junk", protocol="x")).reason == (400, "malformed")
    assert (await session.upgrade(session.start, "", protocol="x")).reason == (400, "malformed")


@pytest.mark.rule("U6", "C5")
async def test_426_comes_before_an_unproven_cursor(server: Server) -> None:
    session = await server.open()
    answer = await session.get(FOREIGN, **{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert answer.reason == (426, "upgrade-unavailable")
    answer = await server.ask("GET", f"{session.base}/events?ticket=x", {"Last-Event-ID": FOREIGN})
    assert answer.reason == (426, "upgrade-unavailable")
    answer = await server.knock(f"{session.base}/events", {"Last-Event-ID": FOREIGN}, subprotocols=())
    assert isinstance(answer, Answer)
    assert answer.reason == (426, "upgrade-unavailable")
    assert (await session.upgrade(FOREIGN, protocol="x")).reason == (426, "upgrade-unavailable")


@pytest.mark.rule("C5", "U7")
async def test_an_unproven_cursor_comes_before_a_spent_ticket_or_nonce(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    socket = await session.bind(session.start, offer["ticket"])
    await socket.control("resume-cursor")
    socket.drop()
    assert (await session.denied(FOREIGN, offer["ticket"])).reason == (409, "cursor-foreign")
    assert (await session.upgrade(FOREIGN, "mine")).reason == (409, "cursor-foreign")


@pytest.mark.rule("C5", "B1")
async def test_an_unproven_cursor_comes_before_the_boundary_and_burns_nothing(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start)
    assert (await session.get("1" + FOREIGN[1:])).reason == (409, "cursor-foreign")
    assert (await session.get("2" + FOREIGN[1:])).reason == (409, "cursor-ahead")
    assert (await session.upgrade("1" + FOREIGN[1:], "other")).reason == (409, "cursor-foreign")
    await (await session.bind(session.start, offer["ticket"])).cross()


@pytest.mark.rule("B6")
async def test_whatever_the_binding_does_not_decide_comes_before_it_and_probes_nobody(
    serve: Serve,
) -> None:
    server = await serve(keepalive=0.05)
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    socket = await session.bind(session.start, offer["ticket"])
    await socket.cross()
    assert (await session.get("junk")).reason == (400, "malformed")
    assert (await session.get(FOREIGN)).reason == (409, "cursor-foreign")
    assert (await session.get(Accept="text/html")).reason == (406, "not-acceptable")
    assert (await session.denied(FOREIGN)).reason == (409, "cursor-foreign")
    assert (await session.denied(session.start, offer["ticket"])).reason == (409, "ticket-spent")
    assert (await session.upgrade(session.start, "mine")).reason == (409, "ticket-spent")
    assert (await session.upgrade(session.start, protocol="x")).reason == (426, "upgrade-unavailable")
    answer = await server.ask("GET", f"{session.base}/events?ticket=x", {"Last-Event-ID": session.start})
    assert answer.reason == (426, "upgrade-unavailable")
    await socket.beat()
    assert "probe" not in "".join(socket.frames)


@pytest.mark.rule("B6", "U7")
async def test_a_spent_ticket_comes_before_websocket_bound(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start)
    socket = await session.bind(session.start, offer["ticket"])
    answer = await session.denied(session.start, offer["ticket"])
    assert answer.reason == (409, "ticket-spent")
    socket.drop()


@pytest.mark.rule("U7")
async def test_a_spent_ticket_changes_nothing_of_a_later_negotiation(server: Server) -> None:
    session = await server.open()
    first = await session.pend(session.start, "one")
    socket = await session.bind(session.start, first["ticket"])
    await socket.cross()
    await socket.close()
    second = await session.pend(session.start, "two")
    assert second["ticket"] != first["ticket"]
    assert (await session.denied(session.start, first["ticket"])).reason == (409, "ticket-spent")
    assert (await session.upgrade(session.start, "one")).reason == (409, "ticket-spent")
    await (await session.bind(session.start, second["ticket"])).cross()


@pytest.mark.rule("L6")
async def test_the_process_comes_before_the_number(server: Server) -> None:
    session = await server.started()
    assert (await session.post(9, note("x"), process=None)).reason == (400, "malformed")
    await session.post(2, note("x"), process="newcomer")
    assert (await session.post(9, note("x"), process="p")).reason == (409, "message-conflict")


async def test_storage_comes_last(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    log.full = True
    assert (await session.get("junk")).reason == (400, "malformed")
    assert (await session.post(9, note("x"))).reason == (409, "message-gap")
    answer = await session.post(2, note("x"))
    assert answer.reason == (503, "storage")
    assert answer.data["retryable"] is True
    assert answer.data["action"] == "retry"
    assert int(answer.header("retry-after")) >= 1
    log.full = False


@pytest.mark.rule("L7")
async def test_a_call_without_a_number_that_could_not_be_stored_is_not_to_be_tried_again(
    serve: Serve,
) -> None:
    """It has been taken, and runs once the log takes writes: a client that tried again would run it twice."""
    log = Fragile()
    server = await serve(log)
    session = await server.initialized()
    log.full = True
    headers = JSON | BOTH | {"Mcp-Session-Id": session.token}
    answer = await server.ask("POST", "/mcp", headers, request(7))
    assert answer.status == 200
    told = answer.json()
    assert (told["id"], told["error"]["data"]["reason"]) == (7, "outcome-unknown")
    assert (await server.ask("POST", "/mcp", headers, note())).reason == (503, "storage"), "that runs nothing"
    log.full = False
    backend = server.backends.all[-1]
    while (await backend.take()).get("id") != 7:
        pass


async def test_a_session_that_cannot_be_stored_is_503(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    log.full = True
    answer = await server.ask("POST", "/mcp/session")
    assert answer.reason == (503, "storage")
    assert answer.header("retry-after") == "1"
    body = request(0, "initialize", protocolVersion="2025-11-25")
    assert (await server.ask("POST", "/mcp", JSON | BOTH, body)).reason == (503, "storage")


async def test_a_log_that_cannot_be_read_is_503(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    await session.backend.say(note("x"))
    (cursor,) = await session.ids()
    log.unreadable = True
    assert (await session.get(cursor)).reason == (503, "storage")
    assert (await session.denied(cursor)).reason == (503, "storage")
    assert (await session.ack(cursor)).reason == (503, "storage")
    log.unreadable = False
    assert (await session.ack(cursor)).json() == {"ack": 1}


@pytest.mark.parametrize("path", ["/mcp/", "/mcp/session/", "/mcp/session/x/", "/healthz/", "/nowhere/"])
async def test_nobody_is_redirected_by_a_slash_to_whatever_host_says(server: Server, path: str) -> None:
    for headers in ({}, EVIL):
        answer = await server.ask("PUT", path, headers)
        assert answer.reason[1] in ("method-not-allowed", "not-found", "host-forbidden"), path
        assert not answer.all("location")


async def test_a_slash_after_the_url_of_the_endpoint_is_no_other_endpoint(server: Server) -> None:
    initialize = request(0, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={})
    wire = await server.wire()
    await wire.send("POST", "/mcp/", JSON | BOTH, encode(initialize))
    head = await soon(wire.head())
    assert head.status == 200
    assert head.header("mcp-session-id")
