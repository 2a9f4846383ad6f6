"""§7: the stream view, as clients of standard MCP know it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.harness import (
    BOTH,
    JSON,
    Fragile,
    Serve,
    Server,
    encode,
    note,
    on_both_servers,
    request,
    result,
    seq_of,
    soon,
)

ELSEWHERE = 99
"""A request that is not open: what relates to it goes to the standalone stream (M1)."""

INITIALIZE = request(0, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={})


def _stream_of(event_id: str | None) -> int:
    assert event_id is not None
    return int(event_id.split(".")[1])


# Opening -------------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("M1", "M5", "C6")
async def test_initialize_opens_a_session_and_its_result_ends_its_stream(serve: Serve) -> None:
    server = await serve()
    stream = await server.stream("POST", "/mcp", JSON | BOTH, INITIALIZE)
    token = stream.head.header("mcp-session-id")
    assert len(token) >= 22
    primed = await stream.block()
    assert primed.data == b""
    assert primed.retry is not None
    assert (seq_of(primed.id), _stream_of(primed.id)) == (0, 1)
    backend = await server.backends.opened()
    assert await backend.take() == INITIALIZE
    await backend.say(result(0, hello=True))
    event = await stream.event()
    assert _stream_of(event.id) == 1
    assert json.loads(event.data or b"") == result(0, hello=True)
    assert await stream.end() == []


@pytest.mark.rule("M1")
async def test_every_initialize_opens_a_session_of_its_own(server: Server) -> None:
    first, second = await server.initialized(), await server.initialized()
    assert first.token != second.token
    assert first.backend is not second.backend


@pytest.mark.parametrize(("revision", "primes"), [("2025-03-26", 0), ("2025-06-18", 0), ("2025-11-25", 1)])
@pytest.mark.rule("M5", "C6")
async def test_streams_are_primed_for_2025_11_25_and_later_only(
    server: Server, revision: str, primes: int
) -> None:
    streams = await server.initialized(revision)
    post = await streams.call(1)
    await streams.backend.say(note("progress"))
    await post.event()
    standalone = await streams.listen()
    await streams.backend.say(note("news"))
    await standalone.event()
    for stream in (post, standalone):
        assert stream.raw.count(b"retry:") == primes
        assert stream.raw.count(b"id:") == 1 + primes
        assert b"event:" not in stream.raw, "no blocks that these clients do not know"


@pytest.mark.rule("M5")
async def test_an_initialize_of_an_older_revision_is_not_primed(server: Server) -> None:
    body = request(0, "initialize", protocolVersion="2025-06-18")
    stream = await server.stream("POST", "/mcp", JSON | BOTH, body)
    backend = await server.backends.opened()
    await backend.take()
    await backend.say(result(0))
    await stream.event()
    assert stream.raw.startswith(b"id: 1.1.")


@on_both_servers
@pytest.mark.rule("M7")
async def test_2026_07_28_gets_that_revisions_error_with_what_is_supported(serve: Serve) -> None:
    server = await serve()
    body = request(5, "server/discover")
    headers = JSON | BOTH | {"MCP-Protocol-Version": "2026-07-28"}
    answer = await server.ask("POST", "/mcp", headers, body)
    assert answer.status == 400
    assert answer.json() == {
        "jsonrpc": "2.0",
        "id": 5,
        "error": {
            "code": -32022,
            "message": answer.json()["error"]["message"],
            "data": {"supported": ["2025-03-26", "2025-06-18", "2025-11-25"], "requested": "2026-07-28"},
        },
    }
    assert server.backends.all == []


@pytest.mark.rule("M7")
async def test_a_revision_nobody_knows_gets_the_same_error(server: Server) -> None:
    streams = await server.initialized()
    answer = await streams.post(note("x"), **{"MCP-Protocol-Version": "1999-01-01"})
    assert answer.status == 400
    assert answer.json()["error"]["code"] == -32022


# Statuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.rule("M5")
async def test_no_session_header_is_400(server: Server, method: str) -> None:
    body = note("x") if method == "POST" else b""
    answer = await server.ask(method, "/mcp", JSON | BOTH, body)
    assert answer.reason == (400, "malformed")


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize("token", ["", "tab\there", "gr\u00fcn"])
@pytest.mark.rule("M5")
async def test_a_malformed_session_header_is_400(server: Server, method: str, token: str) -> None:
    for body in (note("x"), INITIALIZE) if method == "POST" else (b"",):
        answer = await server.ask(method, "/mcp", JSON | BOTH | {"Mcp-Session-Id": token}, body)
        assert answer.reason == (400, "malformed")
    assert server.backends.all == []


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE", "PUT"])
@pytest.mark.rule("M5")
async def test_an_unknown_session_is_404(server: Server, method: str) -> None:
    body = note("x") if method == "POST" else b""
    answer = await server.ask(method, "/mcp", JSON | BOTH | {"Mcp-Session-Id": "x" * 43}, body)
    assert answer.reason == (404, "session-unknown")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS"])
@pytest.mark.rule("M5")
async def test_another_method_is_405_with_allow(server: Server, method: str) -> None:
    answer = await server.ask(method, "/mcp")
    assert answer.reason == (405, "method-not-allowed")
    assert answer.header("allow") == "GET, POST, DELETE"


@pytest.mark.parametrize(
    ("accept", "ok"),
    [
        ("application/json, text/event-stream", True),
        ("text/event-stream;q=0.9, application/json", True),
        ("*/*", True),
        ("application/json", False),
        ("text/event-stream", False),
        ("text/html", False),
    ],
)
@pytest.mark.rule("M5")
async def test_a_post_accepts_both_json_and_event_streams_or_is_406(
    server: Server, accept: str, ok: bool
) -> None:
    streams = await server.initialized()
    answer = await streams.post(note("x"), Accept=accept)
    assert answer.status == (202 if ok else 406)


@pytest.mark.rule("M5")
async def test_a_get_that_accepts_no_event_stream_is_406(server: Server) -> None:
    streams = await server.initialized()
    assert (await streams.get(Accept="application/json")).reason == (406, "not-acceptable")
    answer = await server.ask("GET", "/mcp", {"Accept": "application/json"})
    assert answer.reason == (406, "not-acceptable"), "which comes before the missing session"


@pytest.mark.parametrize("kind", ["text/plain", "text/event-stream", ""])
@pytest.mark.rule("M5")
async def test_a_post_of_anything_but_json_is_415(server: Server, kind: str) -> None:
    streams = await server.initialized()
    answer = await streams.post(note("x"), **{"Content-Type": kind})
    assert answer.reason == (415, "unsupported-media-type")


@pytest.mark.rule("M5", "W5")
async def test_a_post_above_the_limit_is_413(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000)
    streams = await server.initialized()
    assert (await streams.post(note("x", x="x" * 5000))).reason == (413, "too-large")
    answer = await streams.post(request(3, x="x" * 1000))
    assert answer.reason == (413, "too-large")
    assert answer.json()["id"] == 3, "read whole, it is refused under its own ID"


@pytest.mark.parametrize(
    ("body", "id"),
    [
        (b"no json", None),
        (b"[]", None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"x"}]', None),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":NaN}}', 1),
        (b'{"jsonrpc":"2.0","id":"a","method":"x","params":{"x":"\\udc00"}}', "a"),
        (b'{"jsonrpc":"2.0"}', None),
    ],
)
@pytest.mark.rule("M5", "W4", "W5")
async def test_a_malformed_message_is_400_under_its_own_id(server: Server, body: bytes, id: Any) -> None:
    streams = await server.initialized()
    answer = await streams.post(body)
    assert answer.reason == (400, "malformed")
    assert answer.json()["id"] == id
    assert len(streams.backend.sent) == 1


@on_both_servers
@pytest.mark.rule("M5", "L2")
async def test_notifications_and_responses_are_202_once_the_inbox_has_them(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, keepalive=0.02)
    streams = await server.initialized()
    clock = await streams.listen()
    log.gate.clear()
    posting = asyncio.create_task(streams.post(note("notifications/initialized")))
    await soon(log.held.wait())
    await clock.beat()
    await clock.beat()
    assert not posting.done()
    log.gate.set()
    answer = await posting
    assert (answer.status, answer.body) == (202, b"")
    assert (await streams.backend.take())["method"] == "notifications/initialized"
    assert (await streams.post(result("server-1"))).status == 202
    assert (await streams.backend.take())["id"] == "server-1"


@on_both_servers
@pytest.mark.rule("M5", "B4", "B9")
async def test_a_deleted_session_is_404_with_its_reason(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    post = await streams.call(1)
    listening = await streams.listen()
    answer = await server.ask("DELETE", "/mcp", streams.headers)
    assert (answer.status, answer.body) == (204, b"")
    settled = await post.message()
    assert (settled["id"], settled["error"]["data"]) == (1, {"reason": "outcome-unknown"})
    assert await post.end() == []
    assert [b for b in await listening.end() if b.data] == [], "no event of the session view's"
    for answer in (
        await streams.post(note("x")),
        await streams.get(),
        await server.ask("DELETE", "/mcp", streams.headers),
    ):
        assert answer.reason == (404, "session-ended")


# Streams -------------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("M1")
async def test_every_request_has_a_stream_of_its_own_and_its_result_goes_there(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    calls = {id: await streams.call(id) for id in (1, "1", 2)}
    for id in (2, 1, "1"):
        await streams.backend.say(result(id, of=id))
    numbers: set[int] = set()
    for id, stream in calls.items():
        event = await stream.event()
        assert json.loads(event.data or b"") == result(id, of=id)
        numbers.add(_stream_of(event.id))
        assert await stream.end() == []
    assert numbers == {2, 3, 4}


@pytest.mark.rule("M1")
async def test_a_message_goes_to_the_stream_of_the_request_it_relates_to(server: Server) -> None:
    streams = await server.initialized()
    listening = await streams.listen()
    first, second = await streams.call(1), await streams.call(2)
    await streams.backend.say(note("for two"), related=2)
    await streams.backend.say(note("for one"), related=1)
    await streams.backend.say(note("for all"))
    assert (await first.message())["method"] == "for one"
    assert (await second.message())["method"] == "for two"
    event = await listening.event()
    assert json.loads(event.data or b"")["method"] == "for all"
    assert _stream_of(event.id) == 0


@pytest.mark.rule("M1")
async def test_progress_goes_to_the_request_that_handed_out_its_token(server: Server) -> None:
    streams = await server.initialized()
    listening = await streams.listen()
    first = await streams.call(1, _meta={"progressToken": "a"})
    second = await streams.call(2, _meta={"progressToken": 7})
    for token in (7, "a", "7", "unknown"):
        await streams.backend.say(note("notifications/progress", progressToken=token, progress=1))
    assert (await first.message())["params"]["progressToken"] == "a"
    assert (await second.message())["params"]["progressToken"] == 7
    unclaimed = [(await listening.message())["params"]["progressToken"] for _ in range(2)]
    assert unclaimed == ["7", "unknown"]


@pytest.mark.rule("M1")
async def test_while_nobody_listens_the_rest_goes_to_the_oldest_open_request(server: Server) -> None:
    streams = await server.initialized()
    first, second = await streams.call(1), await streams.call(2)
    await streams.backend.say(request("s1", "sampling/createMessage"))
    await streams.backend.say(result(1))
    await streams.backend.say(note("later"))
    assert (await first.message())["id"] == "s1"
    assert (await first.message())["id"] == 1
    assert await first.end() == []
    assert (await second.message())["method"] == "later"


@pytest.mark.rule("M1")
async def test_what_relates_to_a_settled_request_goes_to_the_standalone_stream(server: Server) -> None:
    streams = await server.initialized()
    first, second = await streams.call(1), await streams.call(2)
    await streams.backend.say(result(1))
    await streams.backend.say(note("too late"), related=1)
    await streams.backend.say(result(2))
    assert (await first.message())["id"] == 1
    assert await first.end() == []
    assert await second.message() == result(2)
    assert await second.end() == []
    listening = await streams.listen()
    assert (await listening.message())["method"] == "too late"


@pytest.mark.rule("M1")
async def test_nothing_follows_a_result_on_its_stream(server: Server) -> None:
    streams = await server.initialized()
    call = await streams.call(1)
    await streams.backend.emit(note("before"), related=1)
    await streams.backend.emit(result(1))
    await streams.backend.emit(note("after"), related=1)
    await streams.backend.say(result(1, again=True))
    assert (await call.message())["method"] == "before"
    assert await call.message() == result(1)
    assert await call.end() == []
    again = await streams.get((await _ids(server))[0])
    assert b"again" not in again.body


async def _ids(server: Server) -> list[str]:
    """The IDs of all events of the one session."""
    (live,) = server.app.sessions.all()
    data, _ = await server.log.read(live.key, 0, live.machine.outbox.committed, 2**20)
    return [line[4:].decode() for line in data.split(b"\n") if line.startswith(b"id: ")]


# Resuming ------------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("M2", "M8")
async def test_a_get_with_an_id_resumes_exactly_the_stream_it_names(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    first, second = await streams.call(1), await streams.call(2)
    await streams.backend.say(note("one"), related=1)
    await streams.backend.say(note("one"), related=2)
    cursor = str((await first.event()).id)
    await second.event()
    first.drop()
    await streams.backend.say(note("two"), related=1)
    await streams.backend.say(note("two"), related=2)
    await streams.backend.say(note("for all"), related=ELSEWHERE)
    resumed = await streams.listen(cursor)
    assert (await resumed.block()).id == cursor, "primed"
    assert (await resumed.message())["method"] == "two"
    await streams.backend.say(note("three"), related=1)
    await streams.backend.say(result(1))
    assert (await resumed.message())["method"] == "three"
    assert await resumed.message() == result(1)
    assert await resumed.end() == []
    assert resumed.raw.count(b"id: ") == 4


@on_both_servers
@pytest.mark.rule("M2", "C6")
async def test_a_stream_cut_before_its_first_event_is_resumed_from_its_priming(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    await streams.backend.say(note("unrelated"))
    call = await streams.call(1)
    primed = str((await call.block()).id)
    call.drop()
    await streams.backend.take()
    await streams.backend.say(result(1))
    resumed = await streams.listen(primed)
    assert await resumed.message() == result(1)
    assert await resumed.end() == []


@pytest.mark.rule("M2")
async def test_a_finished_stream_ends_at_once(server: Server) -> None:
    streams = await server.initialized()
    call = await streams.call(1)
    await streams.backend.say(result(1))
    cursor = str((await call.event()).id)
    await call.end()
    resumed = await streams.listen(cursor)
    blocks = await resumed.end()
    assert [(block.id, block.data) for block in blocks] == [(cursor, b"")], "priming, and no more"


@pytest.mark.rule("M1", "M2")
async def test_an_id_of_a_stream_that_was_never_opened_is_malformed(server: Server) -> None:
    streams = await server.initialized()
    (first,) = await _ids(server)
    assert (await streams.get(first.replace(".1.", ".2."))).reason == (400, "malformed")
    assert (await streams.get(first.replace(".1.", f".{2**63 - 1}."))).reason == (400, "malformed")


@pytest.mark.parametrize("cursor", ["", "1", "junk", "1.1.ABCDEFABCDEFABCD"])
@pytest.mark.rule("M5", "C1")
async def test_a_malformed_id_is_400(server: Server, cursor: str) -> None:
    streams = await server.initialized()
    assert (await streams.get(cursor)).reason == (400, "malformed")


@pytest.mark.rule("C3", "C5")
async def test_a_foreign_id_or_one_ahead_is_refused(server: Server) -> None:
    streams = await server.initialized()
    assert (await streams.get("1.1.0123456789abcdef")).reason == (409, "cursor-foreign")
    answer = await streams.get("9.1.0123456789abcdef")
    assert answer.reason == (409, "cursor-ahead")
    assert answer.data["resume-cursor"] == 1


@pytest.mark.rule("M2")
async def test_an_older_client_resumes_by_the_ids_it_was_sent(server: Server) -> None:
    streams = await server.initialized("2025-06-18")
    call = await streams.call(1)
    await streams.backend.say(note("one"))
    cursor = str((await call.event()).id)
    call.drop()
    await streams.backend.say(note("two"), result(1))
    resumed = await streams.listen(cursor)
    assert (await resumed.message())["method"] == "two"
    assert await resumed.message() == result(1)
    assert await resumed.end() == []


@pytest.mark.rule("M2")
async def test_events_emitted_while_a_stream_is_resumed_are_neither_lost_nor_repeated(
    server: Server,
) -> None:
    """Where the reference implementation hands over from replay to live, and loses some."""
    streams = await server.initialized()
    call = await streams.call(1)
    primed = str((await call.block()).id)
    call.drop()

    async def talk() -> None:
        for n in range(300):
            await streams.backend.emit(note("mine", n=n), related=1)
            await streams.backend.emit(note("other", n=n), related=ELSEWHERE)
            await asyncio.sleep(0)
        await streams.backend.emit(result(1))

    talking = asyncio.create_task(talk())
    seen: list[int] = []
    cursor = primed
    while len(seen) < 300:
        resumed = await streams.listen(cursor)
        for event in await resumed.events(min(41, 300 - len(seen))):
            cursor = str(event.id)
            body = json.loads(event.data or b"")
            assert body["method"] == "mine"
            seen.append(body["params"]["n"])
        resumed.drop()
    await talking
    assert seen == list(range(300))


# The standalone stream -----------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("M3")
async def test_without_an_id_the_standalone_stream_goes_on_after_what_was_stated_for_it(
    serve: Serve,
) -> None:
    server = await serve()
    streams = await server.initialized()
    await streams.backend.say(note("one"), note("two"), note("three"))
    listening = await streams.listen()
    events = await listening.events(3)
    listening.drop()
    again = await streams.listen()
    assert [e.id for e in await again.events(3)] == [e.id for e in events], (
        "repeats are possible, holes are not"
    )
    again.drop()
    stated = await streams.listen(str(events[1].id))
    await stated.event()
    stated.drop()
    last = await streams.listen()
    assert (await last.event()).id == events[2].id


@pytest.mark.rule("M3", "C6")
async def test_the_standalone_stream_is_primed_with_where_it_starts(server: Server) -> None:
    streams = await server.initialized()
    await streams.backend.say(note("one"))
    listening = await streams.listen()
    primed = await listening.block()
    assert (seq_of(primed.id), _stream_of(primed.id), primed.data) == (0, 0, b"")
    listening.drop()
    resumed = await streams.listen(str(primed.id))
    assert (await resumed.message())["method"] == "one"


@pytest.mark.rule("M3")
async def test_questions_that_the_client_has_answered_are_not_repeated(server: Server) -> None:
    streams = await server.initialized()
    listening = await streams.listen()
    await streams.backend.say(
        request("s1", "sampling/createMessage"), request("s2", "elicitation/create"), note("news")
    )
    await listening.events(3)
    listening.drop()
    assert (await streams.post(result("s1"))).status == 202
    again = await streams.listen()
    assert [(await again.message())["method"] for _ in range(2)] == ["elicitation/create", "news"]


@on_both_servers
@pytest.mark.rule("M3")
async def test_a_newer_get_supersedes_the_older_with_a_retry_of_30_s(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    older = await streams.listen()
    await streams.backend.say(note("one"))
    await older.event()
    newer = await streams.listen()
    blocks = await older.end()
    assert [(block.id, block.retry) for block in blocks] == [(None, 30_000)]
    await streams.backend.say(note("two"))
    assert [(await newer.message())["method"] for _ in range(2)] == ["one", "two"]


@pytest.mark.rule("M3")
async def test_a_get_of_a_requests_stream_supersedes_its_post(server: Server) -> None:
    streams = await server.initialized()
    call = await streams.call(1)
    primed = str((await call.block()).id)
    resumed = await streams.listen(primed)
    assert [block.retry for block in await call.end()] == [30_000]
    await streams.backend.say(result(1))
    assert await resumed.message() == result(1)


@pytest.mark.rule("M3")
async def test_a_get_of_one_stream_leaves_the_others_alone(server: Server) -> None:
    streams = await server.initialized()
    first, second = await streams.call(1), await streams.call(2)
    await first.block()
    primed = str((await second.block()).id)
    await streams.listen(primed)
    listening = await streams.listen()
    await streams.backend.say(note("for all"))
    await streams.backend.say(result(1))
    assert (await listening.message())["method"] == "for all"
    assert await first.message() == result(1)


@pytest.mark.rule("M3", "L3")
async def test_without_an_id_what_is_evicted_is_skipped_and_the_start_is_the_floor(serve: Serve) -> None:
    server = await serve(retain_events=4)
    streams = await server.initialized()
    await streams.backend.say(*(note(str(n)) for n in range(9)))
    listening = await streams.listen()
    primed = await listening.block()
    assert (seq_of(primed.id), _stream_of(primed.id)) == (6, 0)
    assert [seq_of(event.id) for event in await listening.events(4)] == [7, 8, 9, 10]
    listening.drop()
    resumed = await streams.listen(str(primed.id))
    assert [seq_of(event.id) for event in await resumed.events(4)] == [7, 8, 9, 10]


# M4: acks and eviction, per stream -----------------------------------------------------------------


@pytest.mark.rule("M4")
async def test_an_evicted_event_of_another_stream_does_not_matter(serve: Serve) -> None:
    server = await serve(retain_events=4)
    streams = await server.initialized()
    call, quiet = await streams.call(1), await streams.call(2)
    await streams.backend.say(note("one"), related=1)
    cursor, primed = str((await call.event()).id), str((await quiet.block()).id)
    call.drop()
    quiet.drop()
    await streams.backend.say(*(note(str(n), x=0) for n in range(9)), related=ELSEWHERE)
    resumed = await streams.listen(cursor)
    assert (await resumed.block()).id == cursor
    unspoken = await streams.listen(primed)
    assert (await unspoken.block()).id == primed
    await streams.backend.say(result(1), result(2))
    assert await resumed.message() == result(1)
    assert await unspoken.message() == result(2)


@pytest.mark.rule("M4", "C5")
async def test_an_evicted_event_of_the_stream_itself_is_a_refusal(serve: Serve) -> None:
    server = await serve(retain_events=4)
    streams = await server.initialized()
    call = await streams.call(1)
    await streams.backend.say(note("one"), note("two"), related=1)
    cursors = [str((await call.block()).id)] + [str(e.id) for e in await call.events(2)]
    call.drop()
    await streams.backend.say(*(note(str(n)) for n in range(9)), related=ELSEWHERE)
    for cursor in cursors[:2]:
        answer = await streams.get(cursor)
        assert answer.reason == (409, "cursor-evicted")
        assert answer.data["floor"] >= 8
    resumed = await streams.listen(cursors[2])
    assert (await resumed.block()).id == cursors[2]


@pytest.mark.rule("M4", "C3")
async def test_a_cursor_below_the_floor_is_proven_by_its_link_all_the_same(serve: Serve) -> None:
    server = await serve(retain_events=4)
    streams = await server.initialized()
    call = await streams.call(1)
    await streams.backend.say(note("one"), related=1)
    cursor = str((await call.event()).id)
    call.drop()
    await streams.backend.say(*(note(str(n)) for n in range(9)), related=ELSEWHERE)
    head, _, link = cursor.rpartition(".")
    other = ("0" if link[0] != "0" else "1") + link[1:]
    assert (await streams.get(f"{head}.{other}")).reason == (409, "cursor-foreign")


@pytest.mark.rule("M4", "M3")
async def test_an_id_acks_its_own_stream_only(server: Server) -> None:
    """A high ID of one stream says nothing of what another's has delivered."""
    streams = await server.initialized()
    await streams.backend.say(note("one"))
    call = await streams.call(1)
    await streams.backend.say(note("two"), related=1)
    cursor = str((await call.event()).id)
    assert seq_of(cursor) == 3
    await streams.listen(cursor)
    listening = await streams.listen()
    assert (await listening.message())["method"] == "one"


# M6, M8: requests ----------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("M6")
async def test_a_second_request_with_an_id_in_flight_is_409_under_that_id(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    call = await streams.call(1)
    answer = await streams.post(request(1, "other"))
    assert answer.reason == (409, "duplicate-id")
    assert answer.json()["id"] == 1
    other = await streams.call("1")
    await streams.backend.say(result(1), result("1"))
    assert await call.message() == result(1)
    assert await other.message() == result("1")
    assert [json.loads(sent).get("id") for sent in streams.backend.sent] == [0, 1, "1"]
    again = await streams.call(1)
    await streams.backend.say(result(1, again=True))
    assert await again.message() == result(1, again=True), "once settled, the ID is free"


@pytest.mark.rule("M8")
async def test_disconnecting_never_cancels(server: Server) -> None:
    streams = await server.initialized()
    call = await streams.call(1)
    primed = str((await call.block()).id)
    call.drop()
    assert (await streams.backend.take())["id"] == 1
    await streams.backend.say(result(1))
    assert await (await streams.listen(primed)).message() == result(1)
    assert len(streams.backend.sent) == 2, "the backend was told nothing"


@on_both_servers
@pytest.mark.rule("M8", "L7")
async def test_a_cancelled_requests_stream_ends_without_a_result(serve: Serve) -> None:
    server = await serve()
    streams = await server.initialized()
    call = await streams.call(7)
    assert (await streams.post(note("notifications/cancelled", requestId=7))).status == 202
    assert [block for block in await call.end() if block.data] == []
    assert (await streams.backend.take())["id"] == 7
    assert (await streams.backend.take())["method"] == "notifications/cancelled"
    await streams.backend.say(result(7))
    assert len(await _ids(server)) == 1, "a result that comes late enters no log"
    again = await streams.call(7)
    await streams.backend.say(result(7, again=True))
    assert await again.message() == result(7, again=True)


@pytest.mark.rule("M8")
async def test_a_cancellation_of_a_request_that_is_not_open_is_passed_on(server: Server) -> None:
    streams = await server.initialized()
    call = await streams.call(7)
    await streams.backend.take()
    assert (await streams.post(note("notifications/cancelled", requestId="7"))).status == 202
    assert (await streams.backend.take())["params"] == {"requestId": "7"}
    await streams.backend.say(result(7))
    assert await call.message() == result(7)


@pytest.mark.rule("M6", "M8")
async def test_requests_posted_at_once_are_each_answered_on_their_own_stream(server: Server) -> None:
    streams = await server.initialized()
    calls = await asyncio.gather(*(streams.call(n) for n in range(1, 20)))
    for _ in calls:
        await streams.backend.emit(result((await streams.backend.take())["id"]))
    for n, call in enumerate(calls, 1):
        assert await call.message() == result(n)
        assert await call.end() == []


@pytest.mark.rule("C8")
async def test_silent_streams_carry_comments(serve: Serve) -> None:
    server = await serve(keepalive=0.03)
    streams = await server.initialized()
    for stream in (await streams.call(1), await streams.listen()):
        await stream.beat()
        await stream.beat()


@pytest.mark.rule("W5")
async def test_a_result_above_the_limit_becomes_an_error_on_its_own_request(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000)
    streams = await server.initialized()
    call = await streams.call(1)
    await streams.backend.emit(result(1, x="x" * 2000))
    answer = await call.message()
    assert (answer["id"], answer["error"]["data"]) == (1, {"reason": "too-large"})
    assert await call.end() == []
    await streams.backend.emit(note("x", x="x" * 2000))
    await streams.backend.emit(request("s", "sampling/createMessage", x="x" * 2000))
    await streams.backend.take()
    refused = await streams.backend.take()
    assert (refused["id"], refused["error"]["data"]) == ("s", {"reason": "too-large"})
    assert len(await _ids(server)) == 2


async def test_a_message_reaches_the_backend_byte_for_byte(server: Server) -> None:
    streams = await server.initialized()
    text = b'{"jsonrpc": "2.0", "method": "x", "params": {"a": 1.50, "b": "\\u00fc"}}'
    assert (await streams.post(text)).status == 202
    await streams.backend.take()
    assert streams.backend.sent == [encode(INITIALIZE), text]
