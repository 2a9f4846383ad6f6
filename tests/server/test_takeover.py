"""N2, N3: sessions go on, after a restart of the server and after the death of their MCP server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import BackendError
from gapless.log.sqlite import SqliteLog
from gapless.protocol.record import read_record
from gapless.protocol.recovery import FUTILE
from gapless.protocol.refusal import Refusal
from gapless.protocol.seam import SessionState
from gapless.server import carrier
from gapless.server import sessions as sessions_module
from tests.server.harness import (
    Answer,
    Serve,
    Server,
    Socket,
    note,
    on_both_servers,
    request,
    result,
    seq_of,
    soon,
)
from tests.server.restarts import (
    called,
    hold_up,
    key_of,
    killed,
    logged,
    recovered,
    restarted,
    says,
    shaken,
    stored,
)

LISTS = ["notifications/tools/list_changed", "notifications/resources/list_changed"]
"""What a client is told once a fresh backend goes on for the last one."""

NEVER = 1000.0
"""A time that no test lives to see."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
async def server(serve: Serve, path: Path) -> Server:
    """A server whose log survives it. It probes nobody in time: who would have to wait for that fails."""
    return await serve(SqliteLog(path))


def unknown(message: dict[str, Any], id: int | str) -> bool:
    """Whether a message answers a request with `outcome-unknown`."""
    return message["id"] == id and message["error"]["data"] == {"reason": "outcome-unknown"}


# The session view, after a restart -----------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N2", "B7", "S1")
async def test_an_event_stream_goes_on_from_its_cursor_after_a_restart(serve: Serve, path: Path) -> None:
    session = await shaken(await serve(SqliteLog(path)))
    await session.backend.say(note("one"), note("two"), note("three"))
    stream = await session.events(session.start)
    cursor = str((await stream.events(2))[-1].id)
    server = await restarted(serve, path, session)
    stream = await session.events(cursor)
    events = await stream.events(2)
    assert [seq_of(event.id) for event in events] == [3, 4]
    backend = await recovered(server)
    assert [(await stream.message())["method"] for _ in LISTS] == LISTS
    assert (await session.post(3, request(1))).json() == {"received": 3}
    assert (await backend.take())["id"] == 1
    await backend.say(result(1))
    assert await stream.message() == result(1)


@pytest.mark.rule("N2", "N1", "S6")
async def test_what_was_dispatched_ends_outcome_unknown_and_what_waited_runs(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    server.backends.gate.clear()
    for number, id in ((3, 1), (4, 2), (5, 3)):  # one is being handed over, two wait for that
        assert (await session.post(number, request(id))).status == 202
    assert (await stored(server, session)).dispatched == 3
    server = await restarted(serve, path, session)
    stream = await session.events(session.start)
    assert (await stream.message())["id"] == 0
    assert unknown(await stream.message(), 1)
    backend = await recovered(server)
    assert [(await backend.take())["id"] for _ in range(2)] == [2, 3]
    await backend.say(result(2), result(3))
    told = [await stream.message() for _ in range(4)]
    assert [message.get("method") for message in told[:2]] == LISTS
    assert told[2:] == [result(2), result(3)]
    assert len(backend.sent) == 4
    for number in (3, 4, 5):  # and said again, they run no more
        assert (await session.post(number, request(number - 2))).json() == {"received": 5}
    assert (await session.post(6, request(4))).status == 202
    assert (await backend.take())["id"] == 4


@pytest.mark.rule("N2", "L7")
async def test_a_message_that_comes_while_the_fresh_backend_is_told_waits_for_that(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    server = await restarted(serve, path, session)
    assert (await session.post(3, request(1))).json() == {"received": 3}
    assert (await session.post(4, request(2))).json() == {"received": 4}
    assert (await stored(server, session)).dispatched == 2
    backend = await recovered(server)
    assert [(await backend.take())["id"] for _ in range(2)] == [1, 2]


@pytest.mark.rule("N2", "B6")
@pytest.mark.parametrize("asked", ["events", "handshake", "upgrade"])
async def test_a_socket_that_was_bound_when_its_server_was_killed_is_not_probed(
    serve: Serve, server: Server, path: Path, asked: str
) -> None:
    session = await shaken(server)
    socket = await session.bind(session.start)
    cursor = str((await socket.cross())[-1].id)
    await killed(serve, path, session, probe_timeout=NEVER)
    record = read_record((await stored(session.server, session)).record)
    assert record.state is SessionState.WEBSOCKET_BOUND
    found: Any
    match asked:
        case "events":
            found = await session.events(cursor)
        case "handshake":
            found = await session.bind(cursor)
            assert (await found.control("resume-cursor"))["generation"] == 2
        case _:
            assert (await session.upgrade(cursor)).status == 200
            return
    await recovered(session.server)
    assert json.loads((await found.event()).data or b"")["method" if asked == "events" else "negotiation"]


@on_both_servers
@pytest.mark.rule("N2", "U2", "U3", "U4")
async def test_a_socket_in_one_step_goes_on_from_its_cursor_after_a_restart(serve: Serve, path: Path) -> None:
    session = await shaken(await serve(SqliteLog(path)))
    await session.backend.say(note("one"), note("two"))
    first = await session.bind(session.start)
    cursor = str((await first.cross())[1].id)
    server = await restarted(serve, path, session)
    socket = await session.bind(cursor)
    gap = await socket.cross()
    assert [seq_of(event.id) for event in gap] == [3, 4, 5]
    assert [event.event for event in gap] == ["message", "upgrade-accepted", "upgrade-accepted"]
    backend = await recovered(server)
    assert [(await socket.message())["method"] for _ in LISTS] == LISTS
    await socket.say(3, request(1))
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert (await backend.take())["id"] == 1


@pytest.mark.rule("N2", "B3", "U7")
async def test_a_ticket_that_was_pending_at_the_restart_is_still_good(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    offer = await session.pend(session.start)
    server = await restarted(serve, path, session)
    assert await session.pend(session.start) == offer, "the same acceptance"
    stream = await session.events(session.start)
    assert [event.event for event in await stream.events(2)] == ["message", "upgrade-accepted"]
    assert [block for block in await stream.end() if block.data] == []
    socket = await session.bind(session.start, offer["ticket"])
    gap = await socket.cross()
    assert seq_of(gap[1].id) == offer["event"]
    await recovered(server)
    rest = [json.loads(event.data or b"") for event in gap[2:]]
    rest += [await socket.message() for _ in range(2 - len(rest))]
    assert [message["method"] for message in rest] == LISTS
    assert (await session.denied(session.start, offer["ticket"])).reason == (409, "ticket-spent")


@pytest.mark.rule("N2", "B1")
async def test_the_boundary_is_where_it_was_before_the_restart(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    await session.post(3, request(7))
    offer = await session.pend(session.start)
    stream = await session.events(session.start)
    cursor = str((await stream.events(2))[-1].id)
    assert seq_of(cursor) == offer["event"]
    await restarted(serve, path, session)
    stream = await session.events(cursor)
    settled, superseded = [block for block in await stream.end() if block.id and block.data]
    assert unknown(json.loads(settled.data or b""), 7)
    assert json.loads(superseded.data or b"")["reason"] == "non-resumable-boundary"
    assert (await session.get(session.start)).reason == (404, "session-superseded")


# The stream view, after a restart ------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N2", "M2", "L7")
async def test_the_stream_of_a_call_that_was_dispatched_ends_with_outcome_unknown(
    serve: Serve, path: Path
) -> None:
    streams = await called(await serve(SqliteLog(path)))
    call = await streams.call(1, _meta={"progressToken": 9})
    await streams.backend.take()
    await streams.backend.say(note("notifications/progress", progressToken=9, progress=1))
    primed, event = await call.block(), await call.event()
    await restarted(serve, path, streams)
    for cursor in (primed.id, event.id):
        resumed = await streams.listen(cursor)
        if cursor == primed.id:
            assert (await resumed.message())["method"] == "notifications/progress"
        assert unknown(await resumed.message(), 1)
        assert await resumed.end() == []


@pytest.mark.rule("N2", "M2")
async def test_the_stream_of_a_call_that_waited_has_its_result_after_the_restart(
    serve: Serve, server: Server, path: Path
) -> None:
    streams = await called(server)
    server.backends.gate.clear()
    await streams.call(1)
    waiting = await streams.call(2)
    primed = (await waiting.block()).id
    server = await restarted(serve, path, streams)
    resumed = await streams.listen(primed)
    backend = await recovered(server)
    assert (await backend.take())["id"] == 2
    await backend.say(result(2))
    assert await resumed.message() == result(2)
    assert await resumed.end() == []


@pytest.mark.rule("N2", "N3", "M3")
async def test_the_standalone_stream_goes_on_and_repeats_no_question_of_the_dead(
    serve: Serve, server: Server, path: Path
) -> None:
    streams = await called(server)
    await streams.backend.say(note("news"), request("q1", "roots/list"), request("q2", "roots/list"))
    assert (await streams.post(result("q1"))).status == 202
    server = await restarted(serve, path, streams)
    listening = await streams.listen()
    news, withdrawn = await listening.message(), await listening.message()
    assert news["method"] == "news"
    assert withdrawn["method"] == "notifications/cancelled"
    assert withdrawn["params"]["requestId"] == "q2"
    backend = await recovered(server)
    assert [(await listening.message())["method"] for _ in LISTS] == LISTS
    await backend.say(request("q1", "roots/list"))
    asked = await listening.message()
    assert asked["id"] not in ("q1", "q2")


# A backend that died -------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N2", "L7")
async def test_a_backend_that_dies_is_replaced_under_its_open_connections(serve: Serve) -> None:
    server = await serve()
    session, other = await shaken(server), await shaken(server)
    stream = await session.events(session.start)
    socket = await other.bind(other.start)
    await socket.cross()
    for each in (session, other):
        await each.post(3, request(7))
        await each.backend.take()
        await each.backend.lose("it crashed")
        assert each.backend.closed.is_set() or await soon(each.backend.closed.wait())
    assert (await stream.message())["id"] == 0
    for connection in (stream, socket):
        error = await connection.message()
        assert unknown(error, 7)
        assert "it crashed" in error["error"]["message"]
    for each, connection in ((session, stream), (other, socket)):
        backend = await recovered(server)
        assert [(await connection.message())["method"] for _ in LISTS] == LISTS
        assert (await each.post(4, request(8))).status == 202
        assert (await backend.take())["id"] == 8
        await backend.say(result(8))
        assert await connection.message() == result(8)


@pytest.mark.rule("N2", "L7", "M2", "M3")
async def test_a_backend_of_the_stream_view_that_dies_is_replaced_and_its_calls_are_answered(
    server: Server,
) -> None:
    streams = await called(server)
    listening, call = await streams.listen(), await streams.call(1)
    await streams.backend.take()
    await streams.backend.lose()
    assert unknown(await call.message(), 1)
    assert await call.end() == []
    call = await streams.call(1)
    backend = await recovered(server)
    assert [(await listening.message())["method"] for _ in LISTS] == LISTS
    assert (await backend.take())["id"] == 1
    await backend.say(result(1))
    assert await call.message() == result(1)


@pytest.mark.rule("N2", "S6")
async def test_what_a_dead_backend_was_handed_is_not_handed_to_the_next_and_what_it_was_not_is(
    server: Server,
) -> None:
    session = await shaken(server)
    await hold_up(session)
    await session.backend.lose()
    server.backends.gate.set()
    backend = await recovered(server)
    assert (await session.post(6, request(4))).status == 202
    assert [(await backend.take())["id"] for _ in range(2)] == [3, 4]
    assert (await logged(server, session)).count(b'"outcome-unknown"') == 2
    assert [json.loads(data).get("id") for data in session.backend.sent] == [0, None, 1, 2]


@pytest.mark.rule("N2", "S6")
async def test_an_answer_that_a_dead_backend_never_had_is_not_taken_for_the_request_of_its_id(
    server: Server,
) -> None:
    session = await shaken(server)
    await hold_up(session, third=result(2))
    await session.backend.lose()
    server.backends.gate.set()
    backend = await recovered(server)
    assert (await session.post(6, request(4))).status == 202
    assert (await backend.take())["id"] == 4
    assert (await logged(server, session)).count(b'"outcome-unknown"') == 2


@pytest.mark.rule("N2", "L7")
async def test_what_was_not_sent_and_what_was_sent_and_not_taken_run_on_the_next_in_their_order(
    server: Server,
) -> None:
    session = await shaken(server)
    await hold_up(session)
    await session.backend.lose("it forgot its session", 2)
    server.backends.gate.set()
    backend = await recovered(server)
    assert [(await backend.take())["id"] for _ in range(2)] == [2, 3]
    assert (await logged(server, session)).count(b'"outcome-unknown"') == 1


@pytest.mark.rule("N2", "L7")
async def test_what_a_lost_backend_never_had_runs_on_the_next_in_its_order_and_the_rest_is_settled(
    server: Server,
) -> None:
    session = await shaken(server)
    stream = await session.events((await session.ids())[-1])
    for number, id in enumerate((7, "7", 8), 3):
        await session.post(number, request(id))
        await session.backend.take()
    await session.backend.lose("it forgot its session", 8, 7)
    assert unknown(await stream.message(), "7")
    backend = await recovered(server)
    assert [(await stream.message())["method"] for _ in LISTS] == LISTS
    assert [(await backend.take())["id"] for _ in range(2)] == [7, 8]
    await backend.say(result(8), result(7))
    assert [await stream.message() for _ in range(2)] == [result(8), result(7)]


@pytest.mark.rule("N2")
async def test_a_fresh_backend_is_told_what_the_last_one_was_and_its_answers_are_swallowed(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    orders = [
        request(1, "resources/subscribe", uri="a"),
        request(2, "logging/setLevel", level="debug"),
        request(3, "resources/subscribe", uri="b"),
        request(4, "resources/unsubscribe", uri="a"),
        request(5, "logging/setLevel", level="error"),
    ]
    for number, order in enumerate(orders, 3):
        await session.post(number, order)
        await session.backend.take()
        await session.backend.say(result(order["id"]))
    server = await restarted(serve, path, session)
    stream = await session.events((await session.ids())[-1])
    backend = await recovered(server)
    subscribe = await backend.take()
    assert (subscribe["method"], subscribe["params"]) == ("resources/subscribe", {"uri": "b"})
    await backend.emit(result(subscribe["id"]))
    level = await backend.take()
    assert (level["method"], level["params"]) == ("logging/setLevel", {"level": "error"})
    assert {subscribe["id"], level["id"]}.isdisjoint(range(6))
    await backend.say(note("meanwhile"), result(level["id"]))
    assert [(await stream.message())["method"] for _ in range(3)] == ["meanwhile", *LISTS]


@pytest.mark.rule("N2", "B4")
@pytest.mark.parametrize("changed", [{"capabilities": {"tools": {}}}, {"version": "2"}])
async def test_a_fresh_backend_that_is_another_ends_the_session_on_every_endpoint(
    serve: Serve, server: Server, path: Path, changed: dict[str, Any]
) -> None:
    session, streams = await shaken(server), await called(server)
    server = await restarted(serve, path, session, streams)
    stream, listening = await session.events(session.start), await streams.listen()
    assert (await session.post(3, request(1))).status == 202
    for _ in range(2):
        backend = await server.backends.opened()
        await backend.emit(says((await backend.take())["id"], **changed))
    assert (await stream.message())["id"] == 0
    assert unknown(await stream.message(), 1), "it was never handed over, and never will be"
    (superseded,) = [block for block in await stream.end() if block.data]
    assert json.loads(superseded.data or b"")["reason"] == "backend-lost"
    assert [block for block in await listening.end() if block.data] == []
    for answer in (
        await session.get(session.start),
        await session.post(4, note("x")),
        await session.upgrade(session.start),
        await session.denied(session.start),
        await session.ack(session.start),
        await session.delete(),
        await streams.post(note("x")),
        await streams.get(),
        await server.ask("DELETE", "/mcp", streams.headers),
    ):
        assert answer.reason == (404, "backend-lost")


@pytest.mark.rule("N2", "S5")
async def test_a_fresh_backend_that_hangs_is_given_up_and_the_next_one_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "_BACKOFF", 0.001)
    session = await shaken(server)
    stream = await session.events(session.start)
    assert (await stream.message())["id"] == 0
    with monkeypatch.context() as patch:
        patch.setattr(carrier, "_REPLAY", 0.05)
        await session.backend.lose()
        hanging = await server.backends.opened()
        assert (await session.post(3, request(1))).status == 202
        await soon(hanging.closed.wait())
    backend = await server.backends.opened()
    hello = await backend.take()
    assert hello == json.loads(hanging.sent[0])
    await hanging.emit(says(hello["id"], version="2"))  # too late
    await backend.emit(says(hello["id"]))
    assert (await backend.take())["method"] == "notifications/initialized"
    assert [(await stream.message())["method"] for _ in LISTS] == LISTS
    assert (await backend.take())["id"] == 1
    assert len(hanging.sent) == 1, "the handshake, which it never answered"


@pytest.mark.rule("N2", "L7", "S5")
@pytest.mark.parametrize("how", ["dies", "cannot be started"])
async def test_a_backend_that_crashes_again_and_again_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(carrier, "_BACKOFF", 0.0001)
    session = await shaken(server)
    stream = await session.events(session.start)
    assert (await stream.message())["id"] == 0
    if how == "dies":
        backend = session.backend
        for _ in range(FUTILE + 1):
            await backend.lose()
            backend = await recovered(server)
            assert [(await stream.message())["method"] for _ in LISTS] == LISTS
        assert (await session.post(3, request(1))).status == 202
        await backend.take()
        await backend.lose()
    else:
        server.backends.refusal = BackendError("no such command")
        await session.backend.lose()
        await session.post(3, request(1))
    assert unknown(await stream.message(), 1)
    (superseded,) = [block for block in await stream.end() if block.data]
    assert json.loads(superseded.data or b"")["reason"] == "backend-lost"
    assert (await session.get(session.start)).reason == (404, "backend-lost")


@pytest.mark.rule("N3")
async def test_questions_of_a_dead_backend_are_withdrawn_and_their_answers_go_nowhere(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    await session.backend.say(request(1, "roots/list"))
    server = await restarted(serve, path, session)
    stream = await session.events(session.start)
    told = [await stream.message() for _ in range(3)]
    assert (told[2]["method"], told[2]["params"]["requestId"]) == ("notifications/cancelled", 1)
    backend = await recovered(server)
    assert [(await stream.message())["method"] for _ in LISTS] == LISTS
    await backend.say(request(1, "roots/list"))
    asked = await stream.message()
    assert asked["id"] != 1
    assert (await session.post(3, result(1, roots=["of the dead"]))).json() == {"received": 3}
    assert (await session.post(4, result(asked["id"], roots=[]))).status == 202
    assert await backend.take() == result(1, roots=[]), "what it asked, under the ID it knows"
    assert len(backend.sent) == 3


@pytest.mark.rule("N3")
async def test_a_backend_that_was_being_started_for_a_dead_one_is_closed_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session ended while it was starting: nothing is sent to it, and it does not stay."""
    session = await server.open()
    starting, go = asyncio.Event(), asyncio.Event()
    opened = server.backends.open

    async def slowly(sink: Any) -> Any:
        starting.set()
        await go.wait()
        return await opened(sink)

    monkeypatch.setattr(server.backends, "open", slowly)
    await session.post(1, request(1))
    await soon(starting.wait())
    assert (await session.delete()).status == 204
    go.set()
    backend = await server.backends.opened()
    await soon(backend.closed.wait())
    assert backend.sent == []


@pytest.mark.rule("N2", "N3")
async def test_what_is_meant_for_the_next_backend_is_not_sent_to_one_that_was_given_up_while_it_started(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "_BACKOFF", 0.001)
    monkeypatch.setattr(carrier, "_REPLAY", 0.05)
    session = await shaken(server)
    opened, go = server.backends.open, asyncio.Event()
    calls: list[int] = []

    async def first_slowly(sink: Any) -> Any:
        calls.append(len(calls))
        if calls == [0]:
            await go.wait()
        return await opened(sink)

    monkeypatch.setattr(server.backends, "open", first_slowly)
    live = server.app.sessions._live[key_of(session.token)]
    await session.backend.lose()
    while live.machine.carried.futile < 1:  # given up, and the next one is being asked for
        await server.ask("GET", "/mcp")
    monkeypatch.setattr(carrier, "_REPLAY", NEVER)
    go.set()
    late = await server.backends.opened()
    await soon(late.closed.wait())
    assert late.sent == []
    await recovered(server)


@pytest.mark.rule("N2")
async def test_sessions_that_begin_anew_at_once_are_told_by_turns_what_was_said(
    serve: Serve, server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its time from when its turn comes; a backend that takes longer gives its turn away."""
    sessions = [await shaken(server) for _ in range(5)]
    monkeypatch.setattr(sessions_module, "_REVIVALS", 2)
    server = await restarted(serve, path, *sessions)
    for session in sessions:
        await session.events(session.start)
    first, second = await server.backends.opened(), await server.backends.opened()
    assert {(await backend.take())["method"] for backend in (first, second)} == {"initialize"}
    for session in sessions:  # all have had turns enough
        assert (await session.ack(session.start)).status == 200
    assert len(server.backends.all) == 2
    await first.say(says("replay-1"))
    third = await server.backends.opened()
    assert (await third.take())["method"] == "initialize"
    assert len(server.backends.all) == 3
    monkeypatch.setattr(carrier, "_REPLAY", 0.05)
    await third.say(says("replay-1"))
    fourth = await server.backends.opened()  # which says nothing
    await soon(fourth.closed.wait())
    assert not second.closed.is_set()
    assert await server.backends.opened() is not fourth


# Whoever asks --------------------------------------------------------------------------------------


@pytest.mark.rule("N1", "N2")
async def test_many_requests_at_once_for_a_session_of_an_earlier_process_take_it_over_once(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    before = (await stored(server, session)).fence
    server = await restarted(serve, path, session)
    found: list[Answer | Socket] = list(
        await asyncio.gather(
            *(session.get("junk") for _ in range(4)),
            *(session.ack(session.start) for _ in range(4)),
        )
    )
    assert {answer.status for answer in found if isinstance(answer, Answer)} == {400, 200}
    assert (await stored(server, session)).fence == before + 1
    await recovered(server)
    assert len(server.backends.all) == 1


@pytest.mark.rule("N1")
async def test_a_request_of_another_principal_takes_nothing_over(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    before = await stored(server, session)
    server = await restarted(serve, path, session)
    found = await server.app.sessions.find(session.token, "mallory")
    assert isinstance(found, Refusal)
    assert found.reason.value == "session-unknown"
    assert await stored(server, session) == before
    assert (await session.get("junk")).reason == (400, "malformed"), "whose it is, has it"


# Nobody asks ---------------------------------------------------------------------------------------


@pytest.mark.rule("B9", "N2", "L7")
async def test_a_session_that_nobody_comes_back_for_expires_and_what_it_had_open_is_settled(
    serve: Serve, server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, streams = await shaken(server), await called(server)
    await session.post(3, request(7))
    await session.backend.take()
    now = (await stored(server, streams)).updated
    server = await restarted(serve, path, session, streams, session_expiry=NEVER)
    monkeypatch.setattr(sessions_module.time, "time", lambda: now + 2 * NEVER)
    await server.app.sessions._sweep()
    seen = server.app.sessions._orphans
    assert set(seen) == {key_of(session.token), key_of(streams.token)}
    seen.update(dict.fromkeys(seen, asyncio.get_running_loop().time() - NEVER))
    await server.app.sessions._sweep()
    assert (await session.get(session.start)).reason == (404, "session-expired")
    assert (await streams.get()).reason == (404, "session-expired")
    data = await logged(server, session)
    assert data.count(b'"outcome-unknown"') == 1
    assert data.count(b"event: session-superseded") == 1
    assert server.backends.all == []


@pytest.mark.rule("B9", "N2")
async def test_a_session_that_was_last_written_long_ago_waits_for_its_client_all_the_same(
    serve: Serve, server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may have listened, without a word, until the very death of its process."""
    session = await shaken(server)
    now = (await stored(server, session)).updated
    monkeypatch.setattr(sessions_module.time, "time", lambda: now + 10_000)
    server = await restarted(serve, path, session, session_expiry=100.0)
    await server.app.sessions._sweep()
    await server.app.sessions._sweep()
    stream = await session.events(session.start)
    assert (await stream.message())["id"] == 0


@pytest.mark.rule("B4")
async def test_a_tombstone_stands_across_restarts_and_goes_when_it_is_time(
    serve: Serve, server: Server, path: Path
) -> None:
    session = await shaken(server)
    await session.delete()
    server = await restarted(serve, path, session)
    await server.app.sessions._sweep()
    assert (await session.get(session.start)).reason == (404, "session-ended")
    assert list(server.app.sessions.all()) == [], "who reads a tombstone owns nothing by that"
    server = await restarted(serve, path, session, tombstone=0.001)
    await server.app.sessions._sweep()
    assert (await session.get(session.start)).reason == (404, "session-unknown")
    assert await server.log.sessions() == ()
