"""What those who run a server are told: turns in the log, counters, probes."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from gapless.protocol.refusal import CLOSE_RESTART
from gapless.server.observer import JsonLines
from tests.server.harness import Fragile, Serve, Server, Session, note, request, result, soon
from tests.server.test_authentication import Known, as_


async def counted(server: Server) -> dict[str, float]:
    """What `/metrics` says."""
    answer = await server.ask("GET", "/metrics")
    assert answer.status == 200, answer
    lines = [line.rpartition(" ") for line in answer.body.decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


def turns(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record)["turned"] for record in caplog.records if hasattr(record, "turned")]


# Turns ----------------------------------------------------------------------------------------------


async def course(server: Server) -> Session:
    """A session's life: listened to, through the door in two steps, dropped, ended."""
    session = await server.started()
    stream = await session.events(session.start)
    await session.backend.say(note(step=1))
    first = await stream.event()
    assert first.id is not None
    offer = await session.pend(first.id)
    await stream.end()
    socket = await session.bind(first.id, offer["ticket"])
    await socket.cross()
    await socket.close()
    resumed = await session.events((await session.ids())[0])
    resumed.drop()
    assert (await session.delete()).status == 204
    return session


async def test_every_turn_is_a_line_with_session_cursor_generation_and_reason(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gapless.turns")
    await course(server)
    seen = turns(caplog)
    names = [turn["turn"] for turn in seen]
    for name in ("opened", "upgrade-accepted", "websocket-bound", "gap-crossed", "ended"):
        assert names.count(name) == 1, names
    assert names.count("listening") == names.count("dropped") - 1 >= 2
    by_name = {turn["turn"]: turn for turn in seen}
    assert len({turn["session"] for turn in seen}) == 1
    assert re.fullmatch("[0-9a-f]{8}", str(by_name["opened"]["session"]))
    assert by_name["upgrade-accepted"]["cursor"] == 1
    assert (by_name["websocket-bound"]["cursor"], by_name["websocket-bound"]["generation"]) == (1, 1)
    assert by_name["websocket-bound"]["state"] == "WEBSOCKET_BOUND"
    assert by_name["ended"]["reason"] == "session-ended"


async def test_a_backend_that_is_lost_and_another_that_begins_are_turns(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gapless.turns")
    session = await server.started()
    await session.post(2, request(1))
    await session.backend.take()
    await session.backend.say(result(1))
    await session.backend.lose()
    await soon(server.backends.opened())
    names = [turn["turn"] for turn in turns(caplog)]
    assert names[-2:] == ["backend-lost", "backend-revived"]


async def test_turns_cost_nobody_a_line_who_does_not_ask_for_them(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gapless.turns")
    await course(server)
    assert turns(caplog) == []


async def test_no_token_is_in_any_line_or_counter(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = await serve(verifier=Known())
    as_(server, "ann")
    session = await course(server)
    streams = await server.initialized()
    assert (await server.ask("DELETE", "/mcp", {"Mcp-Session-Id": streams.token})).status == 204
    as_(server, "carlsecret")
    assert (await server.ask("POST", "/mcp/session")).status == 401
    as_(server, "ann")
    ours = [record for record in caplog.records if record.name.partition(".")[0] in ("gapless", "asyncio")]
    told = repr([record.__dict__ | {"message": record.getMessage()} for record in ours])
    told += (await server.ask("GET", "/metrics")).body.decode()
    assert len(told) > 2000, "or it shows little"
    for secret in (session.token, streams.token, "carlsecret", "Bearer"):
        assert secret not in told


def test_a_json_line_has_the_fields_of_a_turn_and_a_traceback_where_there_is_one() -> None:
    record = logging.LogRecord("gapless.turns", logging.INFO, __file__, 1, "session %s", ("ab\u2028",), None)
    record.created, record.msecs = 1_800_000_000.25, 250.0
    record.turned = {"turn": "opened", "committed": 0}
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "at": "2027-01-15T08:00:00.250Z",
        "level": "info",
        "logger": "gapless.turns",
        "message": "session ab\u2028",
        "turn": "opened",
        "committed": 0,
    }
    try:
        raise ValueError("no\nway")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: no" in json.loads(JsonLines().format(record))["traceback"]


# Counters -------------------------------------------------------------------------------------------


async def test_what_happens_is_counted(server: Server) -> None:
    before = await counted(server)
    await course(server)
    found = await counted(server)
    assert found["gapless_events_total"] >= 3, "a note, the acceptance, the end"
    assert found["gapless_messages_total"] == 1
    assert found["gapless_commit_seconds_count"] >= 3
    assert found['gapless_turns_total{turn="websocket-bound",view="session"}'] == 1
    assert found['gapless_upgrades_total{outcome="bound"}'] == 1
    assert found["gapless_upgrade_pause_seconds_count"] == 1
    assert found["gapless_lease_held"] == 1
    assert before['gapless_refusals_total{reason="cursor-foreign"}'] == 0


async def test_refusals_are_counted_by_reason_wherever_they_are_told(server: Server) -> None:
    session, streams = await server.started(), await server.initialized()
    await session.get("x")
    await session.denied(session.start, "x")
    call = await streams.call(7)
    await streams.post(request(7))
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.say(2, note(other=1))
    await socket.say(2, note(other=2))
    assert (await socket.control("refused"))["reason"] == "message-conflict"
    found = await counted(server)
    counts = {reason: found[f'gapless_refusals_total{{reason="{reason}"}}'] for reason in REASONS}
    assert counts == dict.fromkeys(REASONS, 1)
    assert found['gapless_upgrades_total{outcome="ticket-spent"}'] == 1
    call.drop()


REASONS = ("malformed", "ticket-spent", "duplicate-id", "message-conflict")


async def test_sessions_and_connections_are_read_off_when_asked(server: Server) -> None:
    session = await server.started()
    await server.open()
    stream = await session.events(session.start)
    socket = await (bound := await server.started()).bind(bound.start)
    found = await counted(server)
    assert found['gapless_sessions{state="SSE_ACTIVE"}'] == 2
    assert found['gapless_sessions{state="WEBSOCKET_BOUND"}'] == 1
    assert found['gapless_sessions{state="TERMINATED"}'] == 0
    assert found['gapless_connections{medium="events"}'] == 1
    assert found['gapless_connections{medium="socket"}'] == 1
    await session.post(2, request(1))
    assert (await counted(server))["gapless_requests_open"] == 1
    stream.drop()
    socket.drop()


async def test_how_far_connections_are_behind_is_in_buckets(server: Server) -> None:
    session = await server.started()
    socket = await session.bind(session.start)  # the acceptance is behind the gate, and so is all else
    await session.backend.say(*(note(step=n) for n in range(20)))
    found = await counted(server)
    assert found['gapless_lag_events_bucket{le="10.0"}'] == 0
    assert found['gapless_lag_events_bucket{le="100.0"}'] == 1
    assert 20 <= found["gapless_lag_events_gsum"] <= 21
    socket.drop()


async def test_events_evicted_before_any_ack_are_counted(serve: Serve) -> None:
    server = await serve(retain_events=64)
    session = await server.started()
    await session.backend.say(*(note(step=n) for n in range(300)))
    await session.post(2, note())
    assert (await counted(server))["gapless_evicted_unacked_events_total"] >= 200


async def test_what_is_counted_is_for_those_who_may_call(serve: Serve) -> None:
    server = await serve(verifier=Known())
    assert (await server.ask("GET", "/metrics")).reason == (401, "unauthenticated")
    assert (await server.ask("GET", "/metrics", {"Host": "evil.example"})).reason == (421, "host-forbidden")
    as_(server, "ann")
    assert (await server.ask("GET", "/metrics")).header("content-type").startswith("text/plain; version=")


# Probes ---------------------------------------------------------------------------------------------


async def test_probes_are_answered_whoever_asks_by_whatever_name(serve: Serve) -> None:
    server = await serve(verifier=Known())
    for at, text in (("/healthz", b"ok\n"), ("/readyz", b"ready\n")):
        answer = await server.ask("GET", at, {"Host": "10.0.0.7:8000"})
        assert (answer.status, answer.body) == (200, text)
        assert (await server.ask("POST", at)).reason == (405, "method-not-allowed")


async def test_a_server_that_is_shutting_down_is_not_ready_and_lives(server: Server) -> None:
    server.app.sessions.drain(CLOSE_RESTART)
    assert (await server.ask("GET", "/healthz")).status == 200
    answer = await server.ask("GET", "/readyz")
    assert (answer.status, answer.body) == (503, b"shutting down\n")


async def settled(server: Server) -> None:
    """Every session has everything in the log."""
    for live in server.app.sessions.all():
        await live.durable()


async def test_a_server_whose_log_refuses_writes_is_not_ready(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    assert (await server.ask("GET", "/readyz")).status == 200
    log.full = True
    assert (await session.post(2, note())).reason == (503, "storage")
    assert (await server.ask("GET", "/readyz")).body == b"the log refuses writes\n"
    assert (await counted(server))["gapless_storage_faults_total"] >= 1
    log.full = False
    await soon(settled(server))
    assert (await server.ask("GET", "/readyz")).status == 200
