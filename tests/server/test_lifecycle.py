"""Ends and interruptions: lost backends, expiry, shutdown, full disks, restarts, two processes on one log."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path

import pytest

from gapless.errors import BackendError
from gapless.log.base import OwnerId, SessionKey
from gapless.log.sqlite import SqliteLog
from gapless.server.sessions import Sessions
from tests.server.harness import (
    Fragile,
    Serve,
    Server,
    Session,
    Socket,
    note,
    on_both_servers,
    request,
    result,
    seq_of,
    soon,
)


async def _clean(server: Server, later: float) -> None:
    """Do what the janitor would do so many seconds from now."""
    sessions: Sessions = server.app.sessions
    await sessions.clean(asyncio.get_running_loop().time() + later)


# Lost backends -------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N2", "L7", "B9")
async def test_a_lost_backend_settles_what_is_open_and_ends_the_session(serve: Serve) -> None:
    server = await serve(on_backend_loss="supersede")
    session = await server.started()
    await session.post(2, request(7))
    await session.post(3, request(8))
    await session.backend.say(result(7))
    stream = await session.events(session.start)
    await session.backend.lose("it crashed")
    done, settled, superseded = [b for b in await stream.end() if b.id and b.data]
    assert json.loads(done.data or b"") == result(7)
    error = json.loads(settled.data or b"")
    assert (error["id"], error["error"]["code"], error["error"]["data"]) == (
        8,
        -32000,
        {"reason": "outcome-unknown"},
    )
    assert superseded.event == "session-superseded"
    assert json.loads(superseded.data or b"") == {
        "reason": "backend-lost",
        "retryable": False,
        "action": "open-new-session",
    }
    for answer in (
        await session.get(session.start),
        await session.post(4, note("x")),
        await session.upgrade(session.start),
        await session.denied(session.start),
        await session.ack(session.start),
        await session.delete(),
    ):
        assert answer.reason == (404, "backend-lost")
        assert answer.data["action"] == "open-new-session"


@pytest.mark.rule("N2", "L7")
async def test_a_lost_backend_reaches_a_bound_socket_and_closes_it_4404(serve: Serve) -> None:
    server = await serve(on_backend_loss="supersede")
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.say(2, request(7))
    await socket.control("received")
    await session.backend.lose()
    settled, superseded = await socket.events(2)
    assert json.loads(settled.data or b"")["id"] == 7
    assert json.loads(superseded.data or b"")["reason"] == "backend-lost"
    assert await socket.closed() == 4404


@pytest.mark.rule("N2", "L7", "M5")
async def test_a_lost_backend_answers_every_open_request_of_the_stream_view(serve: Serve) -> None:
    server = await serve(on_backend_loss="supersede")
    streams = await server.initialized()
    calls = [await streams.call(id) for id in (1, "1")]
    listening = await streams.listen()
    await streams.backend.lose()
    for id, call in zip((1, "1"), calls, strict=True):
        error = await call.message()
        assert (error["id"], error["error"]["data"]) == (id, {"reason": "outcome-unknown"})
        assert await call.end() == []
    assert [b for b in await listening.end() if b.data] == []
    for answer in (await streams.post(note("x")), await streams.get()):
        assert answer.reason == (404, "backend-lost")


@pytest.mark.rule("N2", "L7")
async def test_a_backend_that_cannot_be_started_answers_the_request_that_asked_for_it(
    server: Server,
) -> None:
    server.backends.refusal = BackendError("no such command")
    session = await server.open()
    stream = await session.events(session.start)
    assert (await session.post(1, request(1))).status == 202
    error = await stream.message()
    assert (error["id"], error["error"]["data"]) == (1, {"reason": "outcome-unknown"})
    assert "no such command" in error["error"]["message"]
    assert (await session.get(session.start)).reason == (404, "backend-lost")


@pytest.mark.parametrize("failure", [BackendError("gone"), RuntimeError("a bug")], ids=["gone", "a bug"])
@pytest.mark.rule("L7")
async def test_a_backend_that_fails_to_take_a_message_leaves_no_request_waiting(
    server: Server, failure: Exception
) -> None:
    session = await server.started()
    stream = await session.events(session.start)
    server.backends.failure = failure
    assert (await session.post(2, request(7))).status == 202
    error = await stream.message()
    assert (error["id"], error["error"]["data"]) == (7, {"reason": "outcome-unknown"})
    assert (await session.get(session.start)).reason == (404, "backend-lost")


@pytest.mark.rule("L7")
async def test_a_session_that_ends_closes_its_backend_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(now: float) -> None:
        """The janitor closes it too, later."""

    monkeypatch.setattr(server.app.sessions, "clean", nothing)
    session, other = await server.started(), await server.started()
    await session.delete()
    await soon(session.backend.closed.wait())
    assert not other.backend.closed.is_set()


@pytest.mark.rule("L7")
async def test_a_burned_session_closes_its_backend(server: Server) -> None:
    session = await server.started()
    await session.pend(session.start)
    await session.get()
    await _clean(server, 0)
    await soon(session.backend.closed.wait())


@pytest.mark.rule("L7")
async def test_a_cancelled_request_is_settled_by_its_own_cancellation(server: Server) -> None:
    session = await server.started()
    await session.post(2, request(7))
    await session.post(3, note("notifications/cancelled", requestId=7))
    await session.backend.say(result(7))
    await session.delete()
    stored = (await server.log.sessions())[0]
    data, _ = await server.log.read(stored.key, 0, stored.committed, 2**20)
    assert b"outcome-unknown" not in data
    assert data.count(b"id: ") == 1, "only the end"


@pytest.mark.rule("L7", "S6")
async def test_a_request_is_settled_once_however_often_it_is_answered(server: Server) -> None:
    session = await server.started()
    await session.post(2, request(7))
    await session.backend.say(result(7), result(7), result(8))
    assert len(await session.ids()) == 1


# Expiry --------------------------------------------------------------------------------------------


@pytest.mark.rule("B9", "B4")
async def test_a_session_without_a_connection_expires(serve: Serve) -> None:
    server = await serve(session_expiry=0.3)
    session = await server.started()
    await soon(session.backend.closed.wait())
    answer = await session.get(session.start)
    assert answer.reason == (404, "session-expired")
    assert answer.data["action"] == "open-new-session"
    assert (await session.denied(session.start)).reason == (404, "session-expired")


@pytest.mark.rule("B9")
async def test_an_expired_session_ends_as_its_record_says(serve: Serve) -> None:
    server = await serve(session_expiry=100.0)
    session = await server.started()
    await _clean(server, 101)
    stored = (await server.log.sessions())[0]
    data, _ = await server.log.read(stored.key, 0, stored.committed, 2**20)
    assert data.count(b"event: session-superseded") == 1
    assert b'"reason":"session-expired"' in data
    assert (await session.get()).reason == (404, "session-expired")


@pytest.mark.parametrize("medium", ["events", "socket"])
@pytest.mark.rule("B9")
async def test_a_session_with_a_connection_does_not_expire(serve: Serve, medium: str) -> None:
    server = await serve(session_expiry=100.0)
    session = await server.started()
    if medium == "events":
        connection = await session.events(session.start)
        await connection.block()
    else:
        connection = await session.bind(session.start)
    await _clean(server, 10_000)
    assert (await session.post(2, note("x"))).status == 202
    connection.drop()
    while any(live.machine.connections for live in server.app.sessions.all()):
        await server.ask("GET", "/mcp")
    await _clean(server, 99)
    assert (await session.post(3, note("x"))).status == 202
    await _clean(server, 10_000)
    assert (await session.post(4, note("x"))).reason == (404, "session-expired")


@pytest.mark.rule("B9")
async def test_a_session_with_a_request_in_flight_does_not_expire(serve: Serve) -> None:
    server = await serve(session_expiry=100.0)
    session = await server.started()
    await session.post(2, request(7))
    await _clean(server, 10_000)
    await session.backend.say(result(7))
    assert (await session.post(3, note("x"))).status == 202
    await _clean(server, 10_000)
    assert (await session.post(4, note("x"))).reason == (404, "session-expired")


@pytest.mark.rule("B9", "L7")
async def test_a_request_that_awaits_the_client_or_listens_does_not_keep_a_session(serve: Serve) -> None:
    server = await serve(session_expiry=100.0)
    asking, listening = await server.started(), await server.started()
    await asking.post(2, request(7))
    await asking.backend.say(request("s", "elicitation/create"))
    await listening.post(2, request(7, "subscriptions/listen"))
    await _clean(server, 10_000)
    for session in (asking, listening):
        assert (await session.post(3, note("x"))).reason == (404, "session-expired")


@pytest.mark.rule("B9")
async def test_pending_has_no_timer_of_its_own_and_ends_by_expiry(serve: Serve) -> None:
    server = await serve(session_expiry=100.0, upgrade_window=0.01)
    session = await server.started()
    offer = await session.pend(session.start)
    await _clean(server, 99)
    assert await session.pend(session.start) == offer
    await _clean(server, 10_000)
    assert (await session.denied(session.start, offer["ticket"])).reason == (404, "session-expired")


@pytest.mark.rule("B9")
async def test_a_connection_that_could_not_be_stored_does_not_keep_a_session(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, session_expiry=100.0)
    session = await server.started()
    log.full = True
    assert (await session.post(2, note("x"))).reason == (503, "storage")
    assert (await session.get(session.start)).reason == (503, "storage")
    assert (await session.denied(session.start)).reason == (503, "storage")
    log.full = False
    assert (await session.post(3, note("x"))).status == 202
    await _clean(server, 10_000)
    assert (await session.post(4, note("x"))).reason == (404, "session-expired")


@pytest.mark.rule("B9")
async def test_a_session_that_expires_while_the_log_is_full_keeps_no_other(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, session_expiry=100.0)
    sessions = [await server.started() for _ in range(3)]
    log.full = True
    await _clean(server, 10_000)
    log.full = False
    for session in sessions:
        assert (await session.get(session.start)).reason == (404, "session-expired")
    await _clean(server, 10_000)
    for session in sessions:
        await soon(session.backend.closed.wait())


# Shutdown ------------------------------------------------------------------------------------------


@on_both_servers
async def test_a_server_that_drains_ends_streams_after_a_retry_and_closes_sockets_1012(
    serve: Serve,
) -> None:
    server = await serve()
    sessions = [await server.started() for _ in range(3)]
    stream = await sessions[0].events(sessions[0].start)
    await stream.block()
    await stream.block()
    bound = await sessions[1].bind(sessions[1].start)
    await bound.cross()
    gated = await sessions[2].bind(sessions[2].start)
    await gated.control("resume-cursor")
    streams = await server.initialized()
    call, listening = await streams.call(1), await streams.listen()
    server.app.sessions.drain(1012)
    (retry,) = await stream.end()
    assert retry.retry is not None
    assert (retry.id, retry.data) == (None, None)
    assert await bound.closed() == 1012
    assert await gated.closed() == 1012
    for each in (call, listening):
        assert [block for block in await each.end() if block.data] == []
        assert b"retry:" in each.raw
    for answer in (await server.ask("POST", "/mcp/session"), await sessions[0].denied(sessions[0].start)):
        assert answer.reason == (503, "limit")
        assert answer.header("retry-after") == "1"


async def test_a_server_that_shuts_down_closes_every_backend(serve: Serve) -> None:
    server = await serve()
    session, streams = await server.started(), await server.initialized()
    await serve.stop(server)
    assert session.backend.closed.is_set()
    assert streams.backend.closed.is_set()


@pytest.mark.rule("L2")
async def test_what_was_emitted_before_a_shutdown_is_in_the_log(serve: Serve, tmp_path: Path) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"))
    session = await server.started()
    for n in range(50):
        await session.backend.emit(note(str(n)))
    await serve.stop(server)
    log = SqliteLog(tmp_path / "log.db")
    await log.start()
    (stored,) = await log.sessions()
    assert stored.committed >= 50
    await log.close()


# Restarts ------------------------------------------------------------------------------------------


@pytest.mark.rule("N2", "L7", "B6", "B9")
async def test_after_a_restart_that_supersedes_a_session_is_settled_and_told_backend_lost(
    serve: Serve, tmp_path: Path
) -> None:
    """Its backend died with the process; whatever socket it had, nobody probes it."""
    server = await serve(SqliteLog(tmp_path / "log.db"))
    session = await server.started()
    await session.post(2, request(7))
    await session.backend.say(note("one"))
    await session.bind(session.start)
    await serve.stop(server)
    log = SqliteLog(tmp_path / "log.db")
    session.server = await serve(log, on_backend_loss="supersede")
    for answer in (
        await session.get(session.start),
        await session.post(3, note("x")),
        await session.denied(session.start),
        await session.delete(),
    ):
        assert answer.reason == (404, "backend-lost")
        assert answer.data["received"] == 2
    (stored,) = await log.sessions()
    data, _ = await log.read(stored.key, 2, stored.committed, 2**20)
    assert data.count(b'"outcome-unknown"') == 1
    assert data.count(b"event: session-superseded") == 1
    assert b'"reason":"backend-lost"' in data


@pytest.mark.rule("B4")
async def test_after_a_restart_an_ended_session_is_told_its_own_reason(serve: Serve, tmp_path: Path) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"))
    ended, burned, streams = await server.started(), await server.started(), await server.initialized()
    await ended.delete()
    await burned.pend(burned.start)
    await burned.get()
    await server.ask("DELETE", "/mcp", streams.headers)
    await serve.stop(server)
    again = await serve(SqliteLog(tmp_path / "log.db"))
    ended.server = burned.server = streams.server = again
    assert (await ended.get(ended.start)).reason == (404, "session-ended")
    assert (await burned.get(burned.start)).reason == (404, "session-superseded")
    assert (await streams.get()).reason == (404, "session-ended")
    assert (await ended.get("junk")).reason == (404, "session-ended")


@pytest.mark.rule("N2", "M5")
async def test_after_a_restart_that_supersedes_a_session_of_the_stream_view_is_404(
    serve: Serve, tmp_path: Path
) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"))
    streams = await server.initialized()
    call = await streams.call(1)
    cursor = str((await call.block()).id)
    await serve.stop(server)
    streams.server = await serve(SqliteLog(tmp_path / "log.db"), on_backend_loss="supersede")
    assert (await streams.get(cursor)).reason == (404, "backend-lost")
    assert (await streams.post(note("x"))).reason == (404, "backend-lost")


@pytest.mark.rule("N2")
async def test_requests_at_once_for_a_session_of_an_earlier_process_are_all_told(
    serve: Serve, tmp_path: Path
) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"))
    session = await server.started()
    await serve.stop(server)
    session.server = await serve(SqliteLog(tmp_path / "log.db", cache_bytes=0), on_backend_loss="supersede")
    answers = await asyncio.gather(*(session.get(session.start) for _ in range(8)))
    assert {answer.reason for answer in answers} == {(404, "backend-lost")}


async def _fence(server: Server, *sessions: Session) -> OwnerId:
    """Another process takes sessions, and is not to be reached."""
    other = await server.log.join("/nowhere/door.sock")
    for session in sessions:
        key = SessionKey(hashlib.sha256(session.token.encode()).digest())
        stored = await server.log.load(key)
        assert stored is not None
        await server.log.acquire(key, stored.fence, other)
    return other


@pytest.mark.rule("L8", "N1")
async def test_a_process_that_another_has_fenced_stops_serving_at_its_next_write(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"))
    session, sse = await server.started(), await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    stream = await sse.events(sse.start)
    await stream.block()
    other = await _fence(server, session, sse)
    with caplog.at_level(logging.CRITICAL, "gapless"):
        await session.backend.emit(note("x"))
        await sse.backend.emit(note("x"))
        assert await socket.closed() == 1012
        assert [b for b in await stream.end() if b.id] == []
        await soon(session.backend.closed.wait())
        await soon(sse.backend.closed.wait())
    for each in (session, sse):
        assert (await each.post(2, note("x"))).reason == (503, "limit"), "its owner may live, and is not here"
        assert (await each.get(each.start)).reason == (503, "limit")
    await server.log.leave(other)
    for each in (session, sse):
        assert (await each.post(2, note("x"))).json() == {"received": 2}, "it is anybody's, and so ours"


@pytest.mark.rule("L8", "N1")
async def test_a_message_posted_to_a_process_that_was_fenced_is_not_acknowledged(
    serve: Serve, tmp_path: Path
) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"))
    session = await server.started()
    await _fence(server, session)
    assert (await session.post(2, request(7))).reason == (503, "storage")
    assert (await session.post(2, request(7))).reason == (503, "limit")
    assert len(session.backend.sent) == 1, "nor run"


@pytest.mark.rule("N1", "B9")
async def test_a_session_that_was_fenced_keeps_no_other_from_expiring(serve: Serve, tmp_path: Path) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db"), session_expiry=100.0)
    session, other = await server.started(), await server.started()
    await _fence(server, session)
    await session.backend.emit(note("x"))
    await soon(session.backend.closed.wait())
    await _clean(server, 10_000)
    assert list(server.app.sessions.all()) == [], "the one is not ours any more, the other is expired"
    assert (await other.get(other.start)).reason == (404, "session-expired")


# Sizes ---------------------------------------------------------------------------------------------


@pytest.mark.rule("W5", "L7")
async def test_a_result_above_the_limit_becomes_an_error_on_its_own_request(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000)
    session = await server.started()
    await session.post(2, request(7))
    await session.backend.emit(result(7, x="x" * 2000))
    stream = await session.events(session.start)
    error = await stream.message()
    assert (error["id"], error["error"]["data"]) == (7, {"reason": "too-large"})


@pytest.mark.rule("W5")
async def test_messages_of_the_limits_size_pass_both_ways_on_both_media(serve: Serve) -> None:
    server = await serve(max_message_bytes=200_000)
    session = await server.started()

    def full(message: dict[str, object]) -> bytes:
        text = json.dumps(message, separators=(",", ":"))
        return text.replace('"pad"', '"' + "x" * (200_000 - len(text) + 3) + '"').encode()

    assert len(full(request(2, x="pad"))) == 200_000
    assert (await session.post(2, full(request(2, x="pad")))).status == 202
    assert (await session.backend.take())["id"] == 2
    await session.backend.say(full(result(2, x="pad")))
    stream = await session.events(session.start)
    assert len((await stream.event()).data or b"") == 200_000
    socket = await session.bind(session.start)
    gap = await socket.cross()
    assert len(gap[0].data or b"") == 200_000
    await socket.say(3, full(request(3, x="pad")))
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert (await session.backend.take())["id"] == 3
    await session.backend.say(full(result(3, x="pad")))
    assert len((await socket.event()).data or b"") == 200_000


# Many at once --------------------------------------------------------------------------------------


async def _busy(server: Server, session: Session) -> None:
    """Two hundred events over whatever carries them, with a drop every so often."""
    cursor, seen, number = session.start, 0, 2
    while seen < 200:
        if number % 2:
            stream = await session.events(cursor)
            events = await stream.events(20)
            stream.drop()
        else:
            while not isinstance(found := await session.knock(cursor), Socket):
                assert found.reason == (409, "websocket-bound")
            events = await found.cross()
            found.drop()
        for event in events:
            assert seq_of(event.id) == seq_of(cursor) + 1
            cursor = str(event.id)
        seen += len(events)
        await session.post(number, request(number))
        number += 1
        for _ in range(30):
            await session.backend.emit(note("more"))


@pytest.mark.rule("L1", "B7", "S1")
async def test_many_sessions_at_once_see_each_their_own_events_in_order(serve: Serve, tmp_path: Path) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db", synchronous="off"), probe_timeout=0.2)
    sessions = [await server.started() for _ in range(8)]
    for session in sessions:
        for _ in range(30):
            await session.backend.emit(note("first"))
    await asyncio.gather(*(_busy(server, session) for session in sessions))
