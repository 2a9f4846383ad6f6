"""Cursors that nobody was given, and servers that do not play along: what is found is what happened."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from gapless.torture.door import DoorSession
from gapless.torture.experiments import migration, resume
from gapless.torture.experiments.boundary import Boundary
from gapless.torture.experiments.crowd import Crowd
from gapless.torture.ladder import Climb, Kind
from gapless.torture.reading import Answer
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Target, Trace, Trial, Violation
from tests.server.harness import soon
from tests.torture.naive import naive_server
from tests.torture.test_clients import Script, Scripted, breaks, event, refused, says, scripted
from tests.torture.test_ladder import answer, rung

RNG = random.Random(1)


@asynccontextmanager
async def over(
    *, rungs: int = 2, others: Script = refused
) -> AsyncGenerator[tuple[Trial, StandardSession, Scripted]]:
    """A trial whose climb is over, and a server that answers all other requests for events like this."""
    trial = Trial("resume", 1, ())
    climb = Climb(trial.run, 2, 0.0, (Kind.LOG,))
    async with scripted() as server, StandardSession(server.url, trial.trace) as session:
        events = [event(str(number), rung(number, climb)) for number in range(1, rungs + 1)]
        server.call = says(*events, event("3", answer(climb)))
        await soon(session.open())
        session.start(climb, 1)
        await soon(session.finish(0.0, 10.0))
        server.get = others
        yield trial, session, server


def found(trial: Trial) -> list[Violation]:
    return [finding.violation for finding in trial.findings]


def names(run: str) -> bytes:
    return event("9", {"method": "notifications/message", "params": {"data": {"run": run, "rung": 1}}})


OTHERS = "resume-2-0123456789ab"
LIVE = event("9", {"method": "notifications/message", "params": {"data": "something else"}})


@pytest.mark.parametrize("kind", ["unknown", "garbage", "other session's"])
async def test_a_cursor_that_is_refused_is_no_finding(kind: str) -> None:
    async with over() as (trial, session, server):
        await soon(resume._probe(trial, session, kind, RNG))
        assert found(trial) == []
        assert trial.counts[f"probes: {kind}"] == trial.counts["refused 404"] == 1
        assert server.cursors[0] not in ("2", "3")


@pytest.mark.parametrize("kind", ["unknown", "garbage", "other session's"])
@pytest.mark.parametrize("script", [says(), says(LIVE)], ids=["nothing", "something live"])
async def test_an_unknown_cursor_that_is_taken_for_none_is_silence(kind: str, script: Script) -> None:
    async with over(others=script) as (trial, session, _):
        await soon(resume._probe(trial, session, kind, RNG))
        assert found(trial) == [Violation.SILENT_CURSOR]


async def test_an_unknown_cursor_with_an_idle_stream_is_silence_after_a_second() -> None:
    async with over(others=says(LIVE, then=Scripted.nothing)) as (trial, session, _):
        await soon(resume._probe(trial, session, "garbage", RNG))
        assert found(trial) == [Violation.SILENT_CURSOR]


@pytest.mark.parametrize(
    ("kind", "own", "violation"),
    [
        ("unknown", True, Violation.REPEATED),
        ("garbage", True, Violation.REPEATED),
        ("unknown", False, Violation.FOREIGN),
        ("garbage", False, Violation.FOREIGN),
        ("other session's", True, Violation.FOREIGN),
        ("other session's", False, Violation.FOREIGN),
    ],
)
async def test_whose_events_follow_an_unknown_cursor_is_known_by_the_climb_they_name(
    kind: str, own: bool, violation: Violation
) -> None:
    async with over() as (trial, session, server):
        server.get = says(LIVE, names(trial.run if own else OTHERS))
        await soon(resume._probe(trial, session, kind, RNG))
        assert found(trial) == [violation]


async def test_an_unknown_cursor_that_is_not_answered_is_stuck() -> None:
    async with over(others=breaks) as (trial, session, _):
        await soon(resume._probe(trial, session, "garbage", RNG))
        assert found(trial) == [Violation.STUCK]


async def test_after_the_last_event_of_a_call_nothing_of_it_follows() -> None:
    async with over(others=says(LIVE)) as (trial, session, server):
        await soon(resume._probe(trial, session, "stale", RNG))
        assert found(trial) == []
        assert server.cursors == ["3"]
        server.get = says(names(trial.run))
        await soon(resume._probe(trial, session, "stale", RNG))
        assert found(trial) == [Violation.REPEATED]


async def test_a_climb_of_which_something_is_due_is_not_probed() -> None:
    async with over(rungs=1) as (trial, session, server):
        for kind in resume._PROBES:
            await soon(resume._probe(trial, session, kind, RNG))
        assert server.cursors == []


@pytest.mark.parametrize("cursor", ["57", "7", "1.1.ab54", "_GET_stream_1_x", "xyz", "-", "é", "0"])
def test_a_cursor_that_nobody_was_given_is_made_of_any_cursor(cursor: str) -> None:
    given = {cursor, *map(str, range(58))}
    made = {resume._altered(cursor, given, RNG) for _ in range(50)}
    assert not made & given
    assert all(len(text) in (len(cursor), len(cursor) + 1) for text in made)


# Servers that do not play along -----------------------------------------------------------------------------


async def test_a_position_that_the_client_has_reached_itself_is_no_echo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def watch(session: DoorSession, until: int) -> int:
        return 0

    monkeypatch.setattr(migration, "_watch", watch)
    trial = Trial("migration", 2, ())
    async with naive_server() as url, DoorSession(url, trial.trace) as session:
        await soon(session.open())
        await soon(migration._echoed(session, trial))
    assert found(trial) == []
    assert trial.counts["no echo to state"] == 1


async def test_where_the_door_is_shut_there_is_no_acceptance_and_no_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Answer.blocks, "__defaults__", (0.3,))
    asked: list[str] = []

    class Shut(DoorSession):
        async def upgrade(self, cursor: str, nonce: str) -> tuple[int, dict[str, object]]:
            asked.append(cursor)
            return 426, {}

    async with naive_server() as url, Shut(url, Trace()) as session:
        await soon(session.open())
        await session.post(Climb("r", 5, 0.0).request(1))
        assert await soon(Boundary()._negotiate(session)) is None
    assert len(asked) == 1


async def test_a_reader_that_cannot_begin_is_a_finding() -> None:
    async with scripted() as server:
        target = Target(server.url)
    trial = Trial("crowd", 0, ())
    assert await soon(Crowd()._reader(target, trial, "alone-1")) >= 0
    ((violation, detail),) = [(one.violation, one.detail) for one in trial.findings]
    assert violation is Violation.STUCK
    assert detail.startswith("a reader alone-1 cannot begin: initialize at http://127.0.0.1:")
