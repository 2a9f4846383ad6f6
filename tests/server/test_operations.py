"""What those who run a server are told: turns in the log, counters, probes."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gapless.log.sqlite import SqliteLog
from gapless.protocol.refusal import CLOSE_FENCED, CLOSE_RESTART, Reason
from gapless.server.metrics import CONTENT_TYPE
from gapless.server.observer import JsonLines, Turn
from tests.server.harness import (
    BOTH,
    JSON,
    Fragile,
    Serve,
    Server,
    Session,
    Streams,
    note,
    request,
    result,
    soon,
)
from tests.server.restarts import HELLO, key_of, recovered, shaken, stored
from tests.server.test_authentication import Known, as_

OPERATE = (Path(__file__).parents[2] / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")


async def exported(server: Server) -> dict[str, Metric]:
    """What `/metrics` exports, by the names of its families: as strictly as Prometheus may read it."""
    answer = await server.ask("GET", "/metrics")
    assert (answer.status, answer.header("content-type")) == (200, CONTENT_TYPE)
    text = answer.body.decode()
    assert text.endswith("\n")
    comments = [line.split(" ", 3) for line in text.splitlines() if line.startswith("#")]
    named = [(about, name) for _, about, name, _ in comments]
    assert named == [(about, name) for _, name in named[::2] for about in ("HELP", "TYPE")]
    families = list(text_string_to_metric_families(text))
    assert [name for _, name in named[::2]] == [_full_name(each) for each in families]
    assert len(families) == len({each.name for each in families})
    samples = [(sample.name, *sorted(sample.labels.items())) for each in families for sample in each.samples]
    assert len(samples) == len(set(samples)) == len([line for line in text.splitlines() if line[0] != "#"])
    for each in families:
        assert re.fullmatch("gapless_[a-z]+(_[a-z]+)*", each.name), each.name
        assert each.documentation.endswith("."), each.name
        assert _well_formed(each), each
    return {_full_name(each): each for each in families}


def _full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _well_formed(family: Metric) -> bool:
    values = [sample.value for sample in family.samples]
    match family.type:
        case "counter":
            return (
                all(s.name == f"{family.name}_total" for s in family.samples) and min(values, default=0) >= 0
            )
        case "gauge":
            return all(s.name == family.name for s in family.samples) and not family.name.endswith("_total")
        case "histogram":
            *buckets, (_, total) = [
                (float(s.labels["le"]), s.value) for s in family.samples if s.name == f"{family.name}_bucket"
            ]
            rest = {s.name: s.value for s in family.samples if "le" not in s.labels}
            return (
                sorted(buckets) == buckets
                and sorted(values[: len(buckets) + 1]) == values[: len(buckets) + 1]
                and rest.keys() == {f"{family.name}_count", f"{family.name}_sum"}
                and rest[f"{family.name}_count"] == total
            )
        case _:
            return False


async def counted(server: Server) -> dict[str, float]:
    """What `/metrics` says, by the names of its lines."""
    found: dict[str, float] = {}
    for family in (await exported(server)).values():
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


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
    assert next(turn["cursor"] for turn in seen if turn["turn"] == "listening") == 0
    assert by_name["upgrade-accepted"]["cursor"] == 1
    assert (by_name["websocket-bound"]["cursor"], by_name["websocket-bound"]["generation"]) == (1, 1)
    assert by_name["websocket-bound"]["state"] == "WEBSOCKET_BOUND"
    assert by_name["gap-crossed"]["committed"] == 2
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


async def test_a_drop_says_how_it_was_closed_and_under_which_generation(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gapless.turns")
    session = await (await serve(probe_timeout=0.05)).started()
    silent = await session.bind(session.start)
    await silent.control("resume-cursor")
    stream = await session.events(session.start)
    assert await silent.closed() == CLOSE_FENCED
    stream.drop()
    await soon(alone(session))
    fenced, hung_up = [turn for turn in turns(caplog) if turn["turn"] == "dropped"]
    assert (fenced["code"], fenced["generation"]) == (CLOSE_FENCED, 1)
    assert fenced.keys() & hung_up.keys() == {"turn", "session", "view", "state", "committed"}


async def alone(session: Session) -> None:
    """Nobody is connected any more."""
    while session.server.app.sessions._live[key_of(session.token)].machine.connections:
        await session.server.ask("GET", "/healthz")


async def test_a_session_that_changes_hands_is_a_turn_on_either_side(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gapless.turns")
    first, second = [await serve(SqliteLog(tmp_path / "log.db"), lease=1000.0) for _ in range(2)]
    session = await shaken(first)
    found = await stored(first, session)
    await first.log.acquire(found.key, found.fence, second.app.sessions.lease.id)
    await session.backend.emit(note())
    await soon(session.backend.closed.wait())
    session.server = second
    stream = await session.events(session.start)
    await recovered(second)
    names = [turn["turn"] for turn in turns(caplog)]
    assert names == ["opened", "abandoned", "taken-over", "listening", "backend-revived"]
    assert (await counted(first))['gapless_turns_total{turn="abandoned",view="session"}'] == 1
    assert (await counted(second))['gapless_turns_total{turn="taken-over",view="session"}'] == 1
    stream.drop()


async def test_a_turn_is_told_in_words_as_well(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gapless.turns")
    session = await server.initialized()
    (opened, *_) = [record.getMessage() for record in caplog.records if record.name == "gapless.turns"]
    name = key_of(session.token).hex()[:8]
    assert opened == f"session {name}: opened, view=stream state=SSE_ACTIVE committed=0"


def test_the_page_names_every_turn_there_is() -> None:
    (row,) = re.findall(r"^\| `turn` \| (.*) \|$", OPERATE, re.MULTILINE)
    assert re.findall("`([a-z-]+)`", row) == [turn.value for turn in Turn]


async def test_turns_cost_nobody_a_line_who_does_not_ask_for_them(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError

    caplog.set_level(logging.WARNING, "gapless.turns")
    monkeypatch.setattr("gapless.server.observer.Turned", unwanted)
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
        record.exc_info, record.levelname = sys.exc_info(), "ERROR"
    failed = json.loads(JsonLines().format(record))
    assert failed["level"] == "error"
    assert "ValueError: no" in failed["traceback"]


# Counters -------------------------------------------------------------------------------------------


async def test_every_metric_is_on_the_page_with_its_labels_and_every_metric_on_the_page_is_exported(
    server: Server,
) -> None:
    await course(server)  # what has labels is exported with its first count
    families = {
        name: {label for sample in family.samples for label in sample.labels} - {"le"}
        for name, family in (await exported(server)).items()
    }
    table = OPERATE[OPERATE.index("| metric | meaning |") :].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    page = {
        name: set(filter(None, labels.strip("{}").split(",")))
        for cell in cells
        for name, labels in re.findall(r"`([a-z_]+)(\{[a-z,]+\})?`", cell)
    }
    assert len(page) >= len(cells) > 10
    assert families == page


def test_the_page_says_of_every_reason_what_to_do() -> None:
    table = OPERATE[OPERATE.index("| reason | what it means on a server") :].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [name for cell in cells for name in re.findall("`([a-z-]+)`", cell)]
    assert sorted(named) == sorted(Reason)


async def test_the_page_speaks_of_no_metric_and_no_reason_that_there_is_not(server: Server) -> None:
    assert set(re.findall(r"\bgapless_\w+", OPERATE)) <= (await exported(server)).keys()
    assert set(re.findall(r'reason="([^"]*)"', OPERATE)) <= {*Reason}
    assert set(re.findall(r'turn="([^"]*)"', OPERATE)) <= {*Turn}


async def test_what_happens_is_counted(server: Server) -> None:
    before = await counted(server)
    await course(server)
    found = await counted(server)
    assert found["gapless_events_total"] == 3, "a note, the acceptance, the end"
    assert found["gapless_messages_total"] == 1
    assert found["gapless_commit_seconds_count"] >= 3
    assert 0 < found["gapless_commit_seconds_sum"] < 5
    assert found["gapless_upgrade_pause_seconds_count"] == 1
    assert 0 < found["gapless_upgrade_pause_seconds_sum"] < 5
    assert found["gapless_storage_faults_total"] == 0
    assert before['gapless_refusals_total{reason="cursor-foreign"}'] == 0
    assert before['gapless_resumes_total{medium="events",outcome="resumed"}'] == 0
    once = {f'gapless_turns_total{{turn="{turn}",view="session"}}' for turn in ONCE}
    assert {name: found[name] for name in once} == dict.fromkeys(once, 1)
    assert found['gapless_upgrades_total{outcome="bound"}'] == 1


async def test_what_became_of_each_handshake_is_counted(serve: Serve) -> None:
    """Where it was refused before it got to the session, too."""
    server = await serve(max_upgrades_per_minute=4)
    session = await server.started()
    outcomes = {
        "malformed": session.denied("junk"),
        "origin-forbidden": session.denied(session.start, Origin="https://evil.example"),
        "ticket-spent": session.denied(session.start, "none"),
    }
    for reason, denied in outcomes.items():
        assert (await denied).reason[1] == reason
    while (denied := await session.denied(session.start, "none")).reason[1] == "ticket-spent":
        pass
    assert denied.reason == (429, "limit")
    found = await counted(server)
    for reason in (*outcomes, "limit"):
        assert found[f'gapless_upgrades_total{{outcome="{reason}"}}'] >= 1, reason
        assert found[f'gapless_refusals_total{{reason="{reason}"}}'] >= 1, reason


async def test_a_handshake_that_is_none_is_counted(server: Server) -> None:
    session = await server.started()
    wire = await server.wire()
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x"}
    await wire.send("GET", f"{session.base}/events", {**upgrade, "Sec-WebSocket-Version": "13"})
    assert (await wire.answer()).reason == (400, "malformed")
    assert (await counted(server))['gapless_refusals_total{reason="malformed"}'] == 1


async def test_what_is_no_endpoint_is_counted(server: Server) -> None:
    assert (await server.ask("GET", "/nowhere")).reason == (404, "not-found")
    assert (await counted(server))['gapless_refusals_total{reason="not-found"}'] == 1


@pytest.mark.parametrize(
    ("frame", "code", "reason"),
    [
        (b"\0", 1003, None),
        ("event: cursor-ack\ndata: junk\n\n", 4400, "malformed"),
        ("data: x", 4400, "malformed"),
    ],
)
async def test_a_socket_that_we_close_is_logged_with_its_code_and_counted_with_its_reason(
    server: Server, caplog: pytest.LogCaptureFixture, frame: bytes | str, code: int, reason: str | None
) -> None:
    caplog.set_level(logging.INFO, "gapless.turns")
    session = await server.started()
    socket = await session.bind(session.start)
    await (socket.send(frame) if isinstance(frame, str) else socket.send_binary(frame))
    assert await socket.closed() == code
    await soon(alone(session))
    (dropped,) = [turn for turn in turns(caplog) if turn["turn"] == "dropped"]
    assert dropped["code"] == code
    found = await counted(server)
    assert found['gapless_refusals_total{reason="malformed"}'] == (reason is not None)


ONCE = ("opened", "upgrade-accepted", "websocket-bound", "gap-crossed", "ended")


async def test_who_goes_on_after_an_event_is_counted_by_medium_and_who_may_not_by_reason(
    server: Server,
) -> None:
    session = await server.started()
    await session.backend.say(note(step=1), note(step=2))
    (await session.events(session.start)).drop()  # this is no resume
    first, second = await session.ids()
    (await session.events(first)).drop()
    (await session.events(second)).drop()
    assert (await session.get("9.0.0000000000000000")).reason == (409, "cursor-ahead")
    assert (await session.get("2.0.0000000000000000")).reason == (409, "cursor-foreign")
    assert (await session.denied("9.0.0000000000000000")).reason == (409, "cursor-ahead")
    socket = await session.bind(second)
    assert (await session.denied(second, "none")).reason == (409, "ticket-spent")
    await socket.close()
    await soon(alone(session))
    (await session.bind(session.start)).drop()  # nor is this
    streams = Streams(server, "2025-11-25")
    call = await server.stream("POST", "/mcp", JSON | BOTH, HELLO)
    streams.token = call.head.header("mcp-session-id")
    (await streams.listen((await call.block()).id)).drop()  # of a stream that has no event yet
    (await streams.listen()).drop()
    over = await server.started()
    await over.pend(over.start)
    at = (await over.ids())[0]
    await (await over.events(at)).end()
    found = await counted(server)
    prefix = "gapless_resumes_total"
    assert {name.removeprefix(prefix): n for name, n in found.items() if name.startswith(prefix)} == {
        '{medium="events",outcome="resumed"}': 3,
        '{medium="events",outcome="cursor-ahead"}': 1,
        '{medium="events",outcome="cursor-foreign"}': 1,
        '{medium="events",outcome="session-superseded"}': 1,
        '{medium="socket",outcome="resumed"}': 1,
        '{medium="socket",outcome="cursor-ahead"}': 1,
        '{medium="socket",outcome="ticket-spent"}': 1,
    }


async def test_the_tasks_of_the_event_loop_are_counted(server: Server) -> None:
    session = await server.started()
    before = (await counted(server))["gapless_tasks"]
    assert before >= 1
    streams = [await session.events(session.start) for _ in range(5)]
    during = (await counted(server))["gapless_tasks"]
    assert during >= before + 10, "a stream is written and watched"
    for stream in streams:
        stream.drop()
    await soon(alone(session))
    assert (await counted(server))["gapless_tasks"] <= before + 2


async def test_a_lease_that_is_not_held_is_seen(server: Server) -> None:
    assert (await counted(server))["gapless_lease_held"] == 1
    server.app.sessions.lease._until = 0.0
    assert (await counted(server))["gapless_lease_held"] == 0


async def test_a_lease_that_another_process_took_away_is_counted(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    session, lease = await server.started(), server.app.sessions.lease
    assert (await counted(server))["gapless_lease_losses_total"] == 0
    await server.log.leave(lease.id)
    lease._until = 0.0
    assert (await session.get("junk")).status == 400
    assert "this process was taken for dead" in caplog.text
    found = await counted(server)
    assert (found["gapless_lease_losses_total"], found["gapless_lease_held"]) == (1, 1)


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
    another = await server.started()
    stream = await another.events(another.start)  # has all there is
    found = await counted(server)
    assert found['gapless_lag_events_bucket{le="0.0"}'] == 1
    assert found['gapless_lag_events_bucket{le="10.0"}'] == 1
    assert found['gapless_lag_events_bucket{le="100.0"}'] == 2
    assert 20 <= found["gapless_lag_events_sum"] <= 21
    assert found["gapless_lag_events_count"] == 2
    socket.drop()
    stream.drop()


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
    found = await counted(server)
    assert found["gapless_storage_faults_total"] >= 1
    assert found['gapless_refusals_total{reason="storage"}'] == 1
    log.full = False
    await soon(settled(server))
    assert (await server.ask("GET", "/readyz")).status == 200
