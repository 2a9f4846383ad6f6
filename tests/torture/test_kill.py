"""`kill`: the judge bites where something is lost, and finds nothing where a server dies and nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gapless.cli.target import Aim, Mortal, mortal
from gapless.client.receipts import Receipts, Turn
from gapless.errors import TargetError
from gapless.log.base import SessionKey, Stored
from gapless.protocol.block import Block, encode_event
from gapless.protocol.cursor import EventId, Link
from gapless.protocol.moves import Arrived, Input, Received, Refused
from gapless.protocol.refusal import Reason, Refusal
from gapless.torture.audit.streams import event_ids
from gapless.torture.climbers import OurClimber, StandardClimber
from gapless.torture.experiments import kill as module
from gapless.torture.experiments.kill import Kill, Moment, Since
from gapless.torture.judge import judge_outcome, judge_rest, judge_stream
from gapless.torture.ladder import Account, Climb, Kind
from gapless.torture.mortal import Journal
from gapless.torture.ours import OurSession
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Trace, Trial, Violation
from tests.torture.test_ladder import account, answer, rung

CLIMB = Climb("kill-1-aa", 6, 0.0, (Kind.PROGRESS, Kind.LOG, Kind.STRAY))
a_process_at_a_time = pytest.mark.timeout(180)
"""These take seconds, most of which are the start of a server; on a busy machine those are many."""
LADDER = Aim(None, ("examples.ladder_server:server",))


def error(reason: str, code: int = -32000) -> dict[str, Any]:
    return {"id": 1, "error": {"code": code, "message": "?", "data": {"reason": reason}}}


UNKNOWN = error("outcome-unknown")


def call(*messages: int | dict[str, Any]) -> Account:
    """A call of which these rungs and answers came."""
    return account(*(rung(one, CLIMB) if isinstance(one, int) else one for one in messages), climb=CLIMB)


WHOLE = call(1, 2, 3, 4, 5, 6, answer(CLIMB))


def found(trial: Trial) -> dict[Violation, int]:
    return {finding.violation: finding.amount for finding in trial.findings}


def wrong(made: Account, runs: int | None = 1, *, several: bool = False) -> dict[Violation, int]:
    """What is wrong with a call, at once and in the end."""
    trial = Trial("kill", 1, ())
    judge_outcome(trial, made, runs, several=several)
    judge_rest(trial, made, runs, several=several)
    return found(trial)


# One call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "runs"),
    [
        (WHOLE, 1),
        (WHOLE, None),
        (call(UNKNOWN), 0),
        (call(UNKNOWN), 1),
        (call(1, 2, 3, UNKNOWN), 1),
        (call(1, 2, 3, 4, 5, 6, UNKNOWN), 1),
    ],
)
def test_a_call_with_all_its_rungs_or_of_unknown_outcome_with_the_first_of_them_is_in_order(
    made: Account, runs: int | None
) -> None:
    assert wrong(made, runs) == {}


@pytest.mark.parametrize(
    ("made", "runs", "expected"),
    [
        pytest.param(call(1, 2), 1, {Violation.UNANSWERED: 1}, id="no answer"),
        pytest.param(call(1, error("backend-lost")), 1, {Violation.UNANSWERED: 1}, id="another error"),
        pytest.param(call(1, error("outcome-unknown", 1)), 1, {Violation.UNANSWERED: 1}, id="another code"),
        pytest.param(call(1, 2, 4, 5, 6, answer(CLIMB)), 1, {Violation.MISSING: 1}, id="a hole"),
        pytest.param(call(1, 2, 3, 4, answer(CLIMB)), 1, {Violation.MISSING: 2}, id="no end"),
        pytest.param(call(answer(CLIMB)), 1, {Violation.MISSING: 6}, id="nothing but a result"),
        pytest.param(call(1, 4, UNKNOWN), 1, {Violation.MISSING: 2}, id="unknown, with a hole"),
        pytest.param(call(2, UNKNOWN), 1, {Violation.MISSING: 1}, id="unknown, without a beginning"),
        pytest.param(call(1, 2, 2, UNKNOWN), 1, {Violation.REPEATED: 1}, id="a repeat"),
        pytest.param(call(2, 1, UNKNOWN), 1, {Violation.REORDERED: 1}, id="out of order"),
        pytest.param(call(UNKNOWN, UNKNOWN), 1, {Violation.REPEATED: 1}, id="answered twice"),
        pytest.param(
            call(1, 2, 3, 4, 5, 6, answer(CLIMB), UNKNOWN),
            1,
            {Violation.REPEATED: 1},
            id="a result, and then unknown",
        ),
        pytest.param(call(1, UNKNOWN, 2), 1, {Violation.REORDERED: 1}, id="unknown, and it goes on"),
        pytest.param(
            call(1, 2, 3, 4, 5, answer(CLIMB), 6),
            1,
            {Violation.MISSING: 1, Violation.REORDERED: 1},
            id="a rung after the result",
        ),
        pytest.param(WHOLE, 2, {Violation.RUN_TWICE: 1}, id="run twice"),
        pytest.param(call(UNKNOWN), 2, {Violation.RUN_TWICE: 1}, id="unknown, and run twice"),
        pytest.param(WHOLE, 0, {Violation.NOT_RUN: 1}, id="a result of nothing"),
    ],
)
def test_what_is_wrong_with_a_call_is_found(made: Account, runs: int, expected: dict[Violation, int]) -> None:
    assert wrong(made, runs) == expected


def test_in_the_stream_view_only_progress_is_sure_to_come_on_the_call_s_stream_but_all_must_come() -> None:
    late = Account(CLIMB, 1)
    for number, stream in ((1, 1), (3, 0), (4, 1), (6, 0)):
        late.take(rung(number, CLIMB), stream)
    late.take(answer(CLIMB), 1)
    assert wrong(late, several=True) == {Violation.MISSING: 2}
    trial = Trial("kill", 1, ())
    judge_outcome(trial, late, 1, several=True)
    assert found(trial) == {}
    for number in (2, 5):
        late.take(rung(number, CLIMB), 2)
    assert wrong(late, several=True) == {}
    assert wrong(late) == {Violation.MISSING: 2}  # one stream has one order


def test_a_hole_in_the_progress_of_a_call_is_one_in_the_stream_view_too() -> None:
    assert wrong(call(2, 3, 4, 5, 6, answer(CLIMB)), several=True) == {Violation.MISSING: 1}
    assert wrong(call(2, 3, UNKNOWN), several=True) == {Violation.MISSING: 1}
    assert wrong(call(1, 3, UNKNOWN), several=True) == {}


# Streams, against the log -----------------------------------------------------------------------------------

LOGGED = ("1.0.aa", "4.0.bb", "9.0.cc")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (LOGGED, {}),
        (LOGGED[:2], {Violation.MISSING: 1}),
        (LOGGED[1:], {Violation.MISSING: 1}),
        ((LOGGED[0], LOGGED[2]), {Violation.MISSING: 1}),
        ((), {Violation.MISSING: 3}),
        ((*LOGGED, LOGGED[0]), {Violation.REPEATED: 1}),
        ((LOGGED[0], LOGGED[2], LOGGED[1]), {Violation.REORDERED: 1}),
        ((*LOGGED, "10.0.dd"), {Violation.LOG_BROKEN: 1}),
    ],
)
def test_what_a_stream_brought_is_what_the_log_has_of_it(
    given: tuple[str, ...], expected: dict[Violation, int]
) -> None:
    trial = Trial("kill", 1, ())
    judge_stream(trial, "standard, stream 0", given, LOGGED)
    assert found(trial) == expected


class Log:
    """A log of one session, as far as anybody looks; its page reaches below what is asked for."""

    def __init__(self, token: str, received: int, *events: tuple[int, int]) -> None:
        self.key = SessionKey(sha256(token.encode()).digest())
        self._received = received
        self._events = events

    async def sessions(self) -> tuple[Stored, ...]:
        link = Link(bytes(8))
        return (Stored(self.key, b"", len(self._events), link, 0, link, self._received, 0, 0, 0.0, 0.0),)

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        if key != self.key or after >= len(self._events):
            return b"", after
        page = self._events[max(0, after - 1) : after + 2]
        return b"".join(
            encode_event(EventId(seq, stream, Link(bytes(8))), "message", b"{}") for seq, stream in page
        ), page[-1][0]

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Any, ...]:
        return ()


async def test_a_session_s_events_are_told_stream_by_stream_each_once() -> None:
    log = Log("token", 0, (1, 0), (2, 1), (3, 0), (4, 2), (5, 1))
    zeros = "0" * 16
    assert await event_ids(log, "token") == {
        0: [f"1.0.{zeros}", f"3.0.{zeros}"],
        1: [f"2.1.{zeros}", f"5.1.{zeros}"],
        2: [f"4.2.{zeros}"],
    }
    assert await event_ids(log, "another") == {}


# Climbers ---------------------------------------------------------------------------------------------------


class Place:
    """Where a climber is looked at that does not climb."""

    def __init__(self, folder: Path) -> None:
        self.url = "http://127.0.0.1:9/mcp"
        self.folder = folder
        self.trial = Trial("kill", 1, ())
        self.run = self.trial.run
        self.answering = asyncio.Event()
        self.served = 0.0
        self.over = False

    def came(self, rung: bool) -> None: ...

    def ended(self, climber: Any, reason: str) -> None: ...

    def runs(self, climb: Climb) -> int | None:
        return None


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_our_client_is_behind_if_the_log_has_more_and_denied_if_it_has_less(place: Place) -> None:
    climber = OurClimber(place, "ours", 0, 1)
    log = Log("token", 7, (1, 0), (2, 0))
    assert await climber.behind(log) == "ours has no session"
    climber._live = True
    session = climber.session = OurSession(place.url, Trace())
    session.machine.session = "token"
    for seq, words in (
        (1, "ours has 1 events, and the log 2"),
        (3, "ours has 3 events, and the log 2"),
        (2, ""),
    ):
        session.machine.incoming.cursor = EventId(seq, 0, Link(bytes(8)))
        assert await climber.behind(log) == words
    assert await climber.behind(Log("another", 7)) == "the log has no session of ours"
    session.acknowledged = 7
    await climber.behind(log)
    await climber.judge(log)
    assert found(place.trial) == {}
    session.acknowledged = 8
    await climber.behind(log)
    await climber.judge(log)
    assert found(place.trial) == {Violation.DENIED: 1}


async def test_every_stream_of_a_standard_session_is_judged(place: Place) -> None:
    climber = StandardClimber(place, "standard", 0)
    assert await climber.behind(Log("token", 0)) == "standard has no session"
    climber._live = True
    session = StandardSession(place.url, Trace())
    session.token = "token"
    climber._opened.append(session)
    log = Log("token", 0, (1, 0), (2, 1), (3, 1), (4, 0))
    ids = await event_ids(log, "token")
    assert await climber.behind(log) == "standard has 0 events of its standalone stream, and the log 2"
    session.standalone.given, session.standalone.last = ids[0], ids[0][-1]
    stream = session.streams[1] = type(session.standalone)(1)
    stream.given, stream.last = ids[1], ids[1][-1]
    assert await climber.behind(log) == ""
    await climber.judge(log)
    assert found(place.trial) == {}
    stream.given = ids[1][:1]
    await climber.judge(log)
    assert found(place.trial) == {Violation.MISSING: 1}
    session.ended, place.trial = "session-expired", Trial("kill", 2, ())
    await climber.judge(log)
    assert found(place.trial) == {}  # of a session that is over, the beginning
    stream.given = ids[1][1:]
    await climber.judge(log)
    assert found(place.trial) == {Violation.MISSING: 1}


def stated(attempt: int, received: int, event: str = "received") -> Input:
    return Arrived(attempt, Block(event, data=b'{"received": %d}' % received))


@pytest.mark.parametrize(
    "later",
    [
        stated(2, 4),
        stated(2, 4, "resume-cursor"),
        Received(-2, 4),
        Refused(-2, 409, Refusal(Reason.MESSAGE_GAP, "", received=4)),
    ],
)
@pytest.mark.rule("L6")
async def test_received_may_not_go_back_in_the_answer_to_a_later_request(later: Input) -> None:
    session = OurSession("http://127.0.0.1:9/mcp", Trace())
    denied: list[tuple[int, int]] = []
    session.denied = lambda acknowledged, now: denied.append((acknowledged, now))
    session.machine.attempt, session.machine.sending.attempt = 1, -1
    session._watch(stated(1, 3))
    session._watch(Received(-1, 5))
    session._watch(stated(1, 4))  # asked for before: it was on its way
    assert denied == []
    session.machine.attempt, session.machine.sending.attempt = 2, -2
    session._watch(Received(-1, 5))
    session._watch(later)
    assert denied == [(5, 4)]
    assert session.acknowledged == 5


# The server's deaths ----------------------------------------------------------------------------------------


def test_moments_are_the_seed_s_and_of_every_kind() -> None:
    moments = [Moment.of(seed) for seed in range(200)]
    assert moments == [Moment.of(seed) for seed in range(200)]
    assert {moment.since for moment in moments} == set(Since)
    waits = [moment.after for moment in moments if moment.since is not Since.START]
    assert 0.020 <= min(waits) < 0.030
    assert 0.390 < max(waits) <= 0.400


def test_a_journal_is_read_on_as_it_grows_whole_lines_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.runs() is None
    with (tmp_path / "journal").open("w") as file:
        for text, runs in (("a\nb\n", {"a": 1, "b": 1}), ("a", {"a": 1, "b": 1}), ("\n", {"a": 2, "b": 1})):
            file.write(text)
            file.flush()
            assert journal.runs() == runs


class Staged:
    """What happens on the scene, in order; the server does not come back after the kill of seed 13."""

    said: ClassVar[list[str]] = []

    def __init__(self, server: Any, seed: int, finish: Callable[[Trial], None]) -> None:
        self.trial = Trial("kill", seed, ())

    async def begin(self) -> None:
        self.said.append("begin")

    async def kill(self, seed: int) -> None:
        self.said.append(f"kill {seed}")
        if seed == 13:
            raise TargetError("it has ended")

    async def end(self) -> None:
        self.said.append("end")

    async def close(self) -> None:
        self.said.append("close")


@pytest.mark.parametrize(
    ("seeds", "seconds", "said", "violations"),
    [
        ((), None, [], {}),
        ((4, 5), None, ["begin", "kill 4", "kill 5", "end", "close"], {}),
        ((4, 5), 60.0, ["begin", "kill 4", "kill 5", "end", "close"], {}),
        ((4, 5), 0.0, ["begin", "end", "close"], {}),
        ((12, 13, 14), None, ["begin", "kill 12", "kill 13", "close"], {Violation.STUCK: 1}),
    ],
)
async def test_a_run_is_so_many_kills_or_so_many_seconds_and_then_the_end(
    seeds: tuple[int, ...],
    seconds: float | None,
    said: list[str],
    violations: dict[Violation, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_Scene", Staged)
    monkeypatch.setattr(Staged, "said", [])
    result = await Kill().run(Dead(Path()), iter(seeds), seconds=seconds)
    assert Staged.said == said
    assert result.violations == violations
    assert result.trials == bool(seeds)


class Dead:
    """A server that is not there, and what it has left."""

    def __init__(self, folder: Path, log: Log | None = None) -> None:
        self.folder = folder
        self.url = "http://127.0.0.1:9/mcp"
        self.journal = folder / "journal"
        self._log = log

    async def start(self) -> None: ...

    async def listens(self) -> None: ...

    async def kill(self) -> None: ...

    def log(self) -> AbstractContextManager[Any]:
        return nullcontext(self._log)


def scene(folder: Path, log: Log | None = None) -> Any:
    return module._Scene(Dead(folder, log), 0, lambda trial: None)


async def test_what_the_audit_of_the_log_finds_is_found(tmp_path: Path) -> None:
    log = Log("token", 0, (1, 0), (2, 0))
    judged = scene(tmp_path, log)
    await judged._judge(log)
    assert all(finding.violation is Violation.LOG_BROKEN for finding in judged.trial.findings)
    told = " ".join(finding.detail for finding in judged.trial.findings)
    assert f"session {log.key.hex()[:16]}, events 1 to 2: not what the link says" in told
    assert judged.trial.counts["events audited"] == 2


async def test_a_session_that_has_receipts_and_is_not_in_the_log_is_found(tmp_path: Path) -> None:
    judged = scene(tmp_path)
    receipts = Receipts(tmp_path / "a.receipts")
    receipts.turned("another token", Turn.OPENED, "0.0.0001020304050607")
    receipts.processed(EventId(1, 0, Link(bytes(8))))
    receipts.close()
    judged._ours[0].receipts.append(tmp_path / "a.receipts")
    await judged._judge(Log("token", 0))
    session = sha256(b"another token").hexdigest()[:16]
    assert f"session {session} is not in the log" in [finding.detail for finding in judged.trial.findings]
    assert judged.trial.counts["receipts audited"] == 1


async def test_who_is_not_up_to_date_in_the_end_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CAUGHT_UP_MOST", 0.0)
    judged = scene(tmp_path, Log("token", 0))
    await judged._catch_up()
    assert [finding.detail for finding in judged.trial.findings] == [
        f"{name} has no session" for name in ("ours 1", "ours 2", "two-step", "standard")
    ]
    assert {finding.violation for finding in judged.trial.findings} == {Violation.STUCK}


async def test_a_call_that_is_never_answered_does_not_keep_the_end_from_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_MOST", 0.0)
    judged = scene(tmp_path, Log("token", 0))
    judged._ours[0].resting.clear()
    await judged.end()
    assert [finding.detail for finding in judged.trial.findings] == ["after the last kill: calls still wait"]


async def test_the_first_event_after_a_kill_is_the_first_that_comes_once_the_server_answers_again(
    tmp_path: Path,
) -> None:
    judged = scene(tmp_path)
    judged._killed = [0.0, 1.0]
    judged.came(True)
    assert judged.trial.measures == {}
    judged.answering.set()
    judged.came(False)
    assert not judged._climbed.is_set()
    judged.came(True)
    assert len(judged.trial.measures["from a kill to the first event"]) == 2
    assert judged.trial.counts["events"] == 3
    assert judged._climbed.is_set()


async def test_no_session_may_end_but_one_whose_handshake_came_to_nothing(tmp_path: Path) -> None:
    judged = scene(tmp_path)
    judged.ended(judged._ours[0], "")
    assert not judged.trial.failed
    judged.ended(judged._ours[0], "session-superseded")
    assert found(judged.trial) == {Violation.FORCED: 1}
    assert judged.trial.counts["ended: session-superseded"] == 1


def kills(count: int, *since: Since) -> list[int]:
    """The first seeds whose moments are of these kinds."""
    return [seed for seed in range(500) if Moment.of(seed).since in since][:count]


@a_process_at_a_time
async def test_a_server_that_is_killed_again_and_again_loses_nothing() -> None:
    seeds = [*kills(1, Since.RUNG), *kills(1, Since.START), *kills(3, Since.ANSWER, Since.RUNG)]
    done: list[int] = []
    async with mortal(LADDER, Kill.serve) as server:
        result = await Kill().run(server, iter(seeds), done=lambda trial: done.append(trial.seed))
    assert result.violations == {}, [failure.findings for failure in result.failures]
    assert (result.trials, done) == (5, seeds)
    counts = result.counts
    assert (counts["kills"], counts["sessions"]) == (5, 4)
    assert counts["starts"] >= 4
    assert counts["through the door"] > 0
    assert counts["receipts audited"] > 0
    assert counts["calls answered"] > 0
    assert len(result.measures["from a kill to the first event"]) == 5
    assert not server.folder.exists()


LOG = ("torture.db", "torture.db-wal", "torture.db-shm")


class Forgetful(Mortal):
    """Its log is gone when it has died, and whatever was begun it begins again."""

    async def kill(self) -> None:
        await super().kill()
        for name in LOG:
            (self.folder / name).unlink(missing_ok=True)
        self.journal.write_bytes(self.journal.read_bytes() * 2)


class Broken(Mortal):
    """Its log does not survive."""

    async def kill(self) -> None:
        await super().kill()
        for name in LOG:
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / LOG[0]).write_bytes(b"not a log at all\n" * 4096)


@asynccontextmanager
async def sabotaged(kind: type[Mortal], folder: Path) -> AsyncGenerator[Mortal]:
    server = kind(LADDER, (), folder)
    try:
        yield server
    finally:
        await server.kill()


@a_process_at_a_time
async def test_a_server_that_forgets_what_it_said_is_found_out(tmp_path: Path) -> None:
    async with sabotaged(Forgetful, tmp_path) as server:
        result = await Kill().run(server, iter(kills(1, Since.RUNG)))
    assert {Violation.FORCED, Violation.LOG_BROKEN, Violation.RUN_TWICE} <= result.violations.keys()
    assert Violation.UNANSWERED not in result.violations  # that is said of sessions that go on
    assert result.counts["ended: session-unknown"] > 0


@a_process_at_a_time
async def test_a_server_that_does_not_come_back_is_the_end_of_it(tmp_path: Path) -> None:
    async with sabotaged(Broken, tmp_path) as server:
        result = await Kill().run(server, iter(kills(2, Since.ANSWER)))
    assert result.violations == {Violation.STUCK: 1}
    assert result.counts["kills"] == 1


async def test_a_server_that_never_comes_is_no_server_to_judge(tmp_path: Path) -> None:
    server = Mortal(Aim(None, ("no_such_module:server",)), (), tmp_path)
    with pytest.raises(TargetError, match="no_such_module"):
        await Kill().run(server, iter([0]))
    await server.kill()
