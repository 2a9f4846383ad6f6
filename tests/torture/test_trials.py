"""Trials are run so many at once, in order, for so long, and those that fail are kept and shrunk."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import httpx2
import pytest

from gapless.errors import TargetError
from gapless.torture import trials as module
from gapless.torture.door import DoorSession
from gapless.torture.judge import judge, judge_door, judge_runs
from gapless.torture.ladder import Account, Climb, Kind
from gapless.torture.schedule import Schedule, parse_schedule
from gapless.torture.trial import RUN, Experiment, Target, Trace, Trial, View, Violation
from gapless.torture.trials import Result, discover, run_experiment, run_trial, shrink
from tests.server.harness import soon
from tests.torture.naive import naive_server
from tests.torture.test_clients import Asked, Scripted, block, scripted
from tests.torture.test_ladder import answer, rung

TARGET = Target("http://127.0.0.1:9/mcp")


def experiment(run: Callable[[Trial], Any], steps: str = "", jobs: int = 3) -> type[Experiment]:
    """An experiment whose trials do this; no server is asked for anything."""

    class Fake:
        name: ClassVar = "fake"
        about: ClassVar = "does as it is told"
        views: ClassVar = frozenset(View)
        trials: ClassVar = 10
        jobs: ClassVar = 1
        serve: ClassVar[tuple[str, ...]] = ()

        def plan(self, seed: int) -> Schedule:
            return parse_schedule(steps)

        async def run(self, target: Target, trial: Trial) -> None:
            assert target is TARGET
            done = run(trial)
            if asyncio.iscoroutine(done):
                await done

    Fake.jobs = jobs
    return Fake


def fails(trial: Trial) -> None:
    trial.find(Violation.MISSING, "rung 3")


# Many trials ------------------------------------------------------------------------------------------------


async def test_so_many_trials_run_at_once_and_their_seeds_are_begun_in_order() -> None:
    begun: list[int] = []
    running = 0
    most: list[int] = []
    done: list[int] = []
    may_end: dict[int, asyncio.Event] = {seed: asyncio.Event() for seed in range(10)}

    async def run(trial: Trial) -> None:
        nonlocal running
        begun.append(trial.seed)
        running += 1
        most.append(running)
        if len(begun) == 3:  # end them the other way round
            may_end[2].set()
        await soon(may_end[trial.seed].wait())
        for event in may_end.values():
            event.set()
        running -= 1

    result = await run_experiment(
        experiment(run), TARGET, iter(range(10)), done=lambda trial: done.append(trial.seed)
    )
    assert begun == list(range(10))
    assert max(most) == 3
    assert done[0] == 2
    assert sorted(done) == begun
    assert result.trials == 10


async def test_how_many_at_once_can_be_set() -> None:
    waiting: list[int] = []
    gate = asyncio.Event()

    async def run(trial: Trial) -> None:
        waiting.append(trial.seed)
        if len(waiting) == 5:
            gate.set()
        await soon(gate.wait())

    result = await run_experiment(experiment(run), TARGET, iter(range(5)), jobs=5)
    assert (result.trials, result.failed) == (5, 0)


async def test_after_so_many_seconds_no_trial_is_begun_and_those_that_run_are_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)

    async def run(trial: Trial) -> None:
        nonlocal now
        now += 4
        await asyncio.sleep(0)
        trial.counts["finished"] += 1

    result = await run_experiment(experiment(run, jobs=1), TARGET, itertools.count(7), seconds=10)
    assert result.trials == result.counts["finished"] == 3
    assert result.seconds == 12


async def test_a_result_sums_up_its_trials() -> None:
    def run(trial: Trial) -> None:
        trial.counts["resumes"] += trial.seed
        trial.measure("recovery", float(trial.seed))
        if trial.seed % 2:
            trial.find(Violation.MISSING, "rungs 3–5", 3)
            trial.find(Violation.STUCK, "for good")

    result = await run_experiment(experiment(run, jobs=1), TARGET, iter(range(4)))
    assert (result.trials, result.failed) == (4, 2)
    assert result.violations == {Violation.MISSING: 6, Violation.STUCK: 2}
    assert result.counts == {"resumes": 6}
    assert result.measures == {"recovery": [0.0, 1.0, 2.0, 3.0]}
    assert [failure.seed for failure in result.failures] == [1, 3]


async def test_of_many_failures_the_first_twenty_are_kept() -> None:
    result = await run_experiment(experiment(fails, jobs=1), TARGET, iter(range(30)))
    assert (result.trials, result.failed, result.violations[Violation.MISSING]) == (30, 30, 30)
    assert [failure.seed for failure in result.failures] == list(range(20))


async def test_a_trial_has_its_seeds_schedule_unless_another_is_given() -> None:
    planned = experiment(lambda trial: None, steps="3:reset")()
    assert (await run_trial(planned, TARGET, 1)).schedule == parse_schedule("3:reset")
    assert (await run_trial(planned, TARGET, 1, parse_schedule("4:close"))).schedule == parse_schedule(
        "4:close"
    )
    assert (await run_trial(planned, TARGET, 1, ())).schedule == ()


async def test_no_two_trials_have_the_same_run() -> None:
    kind = experiment(lambda trial: None)()
    runs = {(await run_trial(kind, TARGET, 1)).run for _ in range(5)}
    assert len(runs) == 5
    assert all(RUN.fullmatch(run) for run in runs)


# Trials that do not come to an end by themselves ------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TargetError("initialize is answered 500"), "initialize is answered 500"),
        (httpx2.ReadError("cut"), "cut"),
        (httpx2.ReadError(""), "the server does not answer: ReadError"),
        (TimeoutError(), "the server does not answer: TimeoutError"),
    ],
)
async def test_a_server_that_gives_out_is_a_finding(error: Exception, told: str) -> None:
    def run(trial: Trial) -> None:
        trial.find(Violation.MISSING, "rung 3")
        raise error

    trial = await run_trial(experiment(run)(), TARGET, 1)
    assert [(found.violation, found.detail) for found in trial.findings] == [
        (Violation.MISSING, "rung 3"),
        (Violation.STUCK, told),
    ]


async def test_a_trial_that_is_not_over_in_time_is_a_finding_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TRIAL_MOST", 0.01)

    async def run(trial: Trial) -> None:
        await asyncio.Event().wait()

    trial = await soon(run_trial(experiment(run)(), TARGET, 1))
    (found,) = trial.findings
    assert (found.violation, found.detail) == (Violation.STUCK, "the trial is not over after 0 s")
    assert trial.seconds >= 0.01


async def test_a_mistake_of_ours_is_no_finding() -> None:
    def run(trial: Trial) -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        await run_trial(experiment(run)(), TARGET, 1)


# Shrinking --------------------------------------------------------------------------------------------------


def needing(*steps: str, violation: Violation = Violation.MISSING) -> Callable[[Trial], None]:
    """Fails if all these steps are in the schedule."""
    needed = set(parse_schedule(" ".join(steps)))

    def run(trial: Trial) -> None:
        if needed <= set(trial.schedule):
            trial.find(violation, "rung 3")

    return run


async def shrunk(run: Callable[[Trial], Any], steps: str) -> Schedule | None:
    failure = Trial("fake", 1, parse_schedule(steps))
    failure.find(Violation.MISSING, "rung 3")
    return await shrink(experiment(run), TARGET, failure)


@pytest.mark.parametrize(
    "needed", [(), ("5:reset",), ("1:close",), ("9:delay",), ("1:close", "9:delay"), ("5:reset", "5:split")]
)
async def test_a_failure_is_shrunk_to_the_steps_that_it_needs(needed: tuple[str, ...]) -> None:
    steps = "1:close 5:reset 5:split 7:reset 9:delay"
    assert await shrunk(needing(*needed), steps) == parse_schedule(" ".join(needed))


async def test_a_step_that_is_there_twice_is_needed_once() -> None:
    assert await shrunk(needing("5:reset"), "5:reset 5:reset") == parse_schedule("5:reset")


async def test_what_never_fails_again_is_not_shrunk() -> None:
    tried: list[Schedule] = []
    assert await shrunk(lambda trial: tried.append(trial.schedule), "1:close 5:reset") is None
    assert tried == [parse_schedule("1:close 5:reset")] * 3


async def test_a_failure_of_another_kind_does_not_count() -> None:
    assert await shrunk(needing("5:reset", violation=Violation.STUCK), "1:close 5:reset") is None


async def test_what_fails_now_and_then_has_a_few_chances() -> None:
    turns = itertools.count(1)

    def run(trial: Trial) -> None:
        if next(turns) % 3 == 0:
            fails(trial)

    assert await shrunk(run, "1:close 5:reset") == ()


# What a server is -------------------------------------------------------------------------------------------


async def test_a_server_of_both_views_is_discovered_as_such() -> None:
    async with naive_server() as url:
        target = await soon(discover(url, 17))
        assert target == Target(url, 17, frozenset(View))
        assert (target.host, target.port) == ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))


def lists(tools: Any) -> Callable[[Asked], Any]:
    async def script(asked: Asked) -> None:
        asked.answers(200, json.dumps({"id": 1, "result": tools}).encode())

    return script


@asynccontextmanager
async def standard(call: Callable[[Asked], Any]) -> AsyncGenerator[Scripted]:
    """A server of the standard view alone, whose tools these are."""
    async with scripted() as server:

        async def told(asked: Asked) -> None:
            asked.answers(404 if "session" in asked.path else 202)

        server.call, server.told = call, told
        yield server


async def test_a_server_of_the_standard_view_is_discovered_as_such() -> None:
    async with standard(lists({"tools": [{"name": "climb"}, {"name": "ladder"}]})) as server:
        assert (await soon(discover(server.url))).views == {View.STANDARD}


@pytest.mark.parametrize(
    "tools",
    [
        None,
        [],
        "x",
        {},
        {"tools": None},
        {"tools": {}},
        {"tools": [None, "ladder", ["ladder"], {"name": []}]},
    ],
)
async def test_a_server_without_a_ladder_cannot_be_judged_and_is_told_what_to_do(tools: Any) -> None:
    async with standard(lists(tools)) as server:
        with pytest.raises(TargetError, match="no tool called ladder") as raised:
            await soon(discover(server.url))
        assert "docs/how-to/test-your-own-server.md" in raised.value.hint


async def nowhere(asked: Asked) -> None:
    asked.answers(404)


async def test_a_server_whose_tools_cannot_be_listed_cannot_be_judged() -> None:
    async with standard(nowhere) as server:
        with pytest.raises(
            TargetError, match=r"no MCP server can be judged at .*tools/list at .* is answered 404"
        ):
            await soon(discover(server.url))


async def test_where_nothing_listens_nothing_can_be_judged() -> None:
    async with scripted() as server:
        url = server.url
    with pytest.raises(TargetError, match=rf"no MCP server can be judged at {url}: initialize at .*: \w"):
        await soon(discover(url))


@pytest.mark.parametrize(
    ("url", "through"),
    [
        ("http://localhost:8000/mcp", "http://127.0.0.1:9/mcp"),
        ("http://[::1]:8000/mcp/", "http://127.0.0.1:9/mcp/"),
        ("http://example.org", "http://127.0.0.1:9"),
        ("http://example.org/mcp?key=a%20b", "http://127.0.0.1:9/mcp?key=a%20b"),
    ],
)
def test_through_a_proxy_a_target_has_the_same_path(url: str, through: str) -> None:
    assert Target(url).through(9) == through


def test_a_target_without_a_port_has_that_of_http() -> None:
    assert (Target("http://example.org/mcp").host, Target("http://example.org/mcp").port) == (
        "example.org",
        80,
    )


# What is wrong ----------------------------------------------------------------------------------------------

CLIMB = Climb("r", 6, 0.0, (Kind.LOG, Kind.STRAY))


def judged(*messages: dict[str, Any], excused: bool = False) -> list[tuple[Violation, int, str]]:
    trial, account = Trial("fake", 1, ()), Account(CLIMB, 1)
    for message in messages:
        account.take(message, 0)
    judge(trial, account, excused=excused)
    assert trial.counts["events"] == len(account.rungs)
    return [(found.violation, found.amount, found.detail) for found in trial.findings]


def rungs(*numbers: int) -> list[dict[str, Any]]:
    return [rung(number, CLIMB) for number in numbers]


def test_a_whole_climb_is_in_order() -> None:
    assert judged(*rungs(1, 2, 3, 4, 5, 6), answer(CLIMB)) == []


def test_what_is_missing_is_counted_and_named() -> None:
    assert judged(*rungs(1, 2, 6), answer(CLIMB)) == [(Violation.MISSING, 3, "rungs 3–5 of 6 (log, stray)")]


def test_without_an_answer_nobody_knows_what_is_missing() -> None:
    assert judged(*rungs(1, 2)) == [(Violation.UNANSWERED, 1, "call 1: no answer; 2 of 6 rungs came")]


def test_an_error_in_place_of_the_result_is_told_as_it_is() -> None:
    error = {"id": 1, "error": {"code": -32000, "message": "outcome unknown" * 100}}
    ((violation, amount, detail),) = judged(*rungs(1, 2, 3, 4, 5, 6), error)
    assert (violation, amount) == (Violation.UNANSWERED, 1)
    assert detail.startswith("call 1 is answered {'id': 1, 'error'")
    assert len(detail) < 250


def test_who_was_told_that_there_is_no_more_misses_nothing_but_repeats_and_disorder_are_none_the_less() -> (
    None
):
    assert judged(*rungs(1, 3, 2, 3), excused=True) == [
        (Violation.REPEATED, 1, "rungs 3 of 6 (log)"),
        (Violation.REORDERED, 1, "rungs 2 of 6 (stray)"),
    ]


def test_a_second_answer_is_a_repeat() -> None:
    whole = rungs(1, 2, 3, 4, 5, 6)
    assert judged(*whole, answer(CLIMB), answer(CLIMB)) == [(Violation.REPEATED, 1, "a second answer")]
    assert judged(*whole, *rungs(6), answer(CLIMB), answer(CLIMB)) == [
        (Violation.REPEATED, 2, "rungs 6 of 6 (stray) and a second answer")
    ]


async def judged_by_number(*events: tuple[int, int]) -> list[tuple[Violation, int]]:
    """Of a session in which events brought these rungs, of which 7 is the answer."""
    trial = Trial("fake", 1, ())
    async with DoorSession(TARGET.url, Trace()) as session:
        account = session.ledger.start(CLIMB, 1)
        for number, brought in events:
            message = answer(CLIMB) if brought == 7 else rung(brought, CLIMB)
            session.take(block(number, json.dumps(message).encode()))
        judge_door(trial, session, account)
    return [(found.violation, found.amount) for found in trial.findings]


WHOLE = tuple(zip(range(1, 8), range(1, 8), strict=True))


async def test_by_number_everything_is_told_once() -> None:
    assert await judged_by_number(*WHOLE) == []
    assert await judged_by_number(*WHOLE[:2], *WHOLE[4:]) == [(Violation.MISSING, 2)]
    assert await judged_by_number(*WHOLE[:3], *WHOLE[1:]) == [(Violation.REPEATED, 2)]
    assert await judged_by_number(*WHOLE[:2], WHOLE[3], WHOLE[2], *WHOLE[4:]) == [(Violation.REORDERED, 1)]


async def test_a_rung_that_comes_again_under_a_number_of_its_own_is_a_repeat() -> None:
    assert await judged_by_number(*WHOLE[:3], (4, 3), (5, 4), (6, 5), (7, 6), (8, 7)) == [
        (Violation.REPEATED, 1)
    ]


async def test_what_is_repeated_does_not_excuse_what_is_not_answered() -> None:
    assert await judged_by_number(*WHOLE[:3], WHOLE[2]) == [
        (Violation.REPEATED, 1),
        (Violation.UNANSWERED, 1),
    ]


@pytest.mark.parametrize(
    ("text", "found", "checked"), [("0", 0, 1), ("1", 0, 1), ("2", 1, 1), ("many", 0, 0), ("9" * 5000, 0, 0)]
)
def test_a_climb_that_was_begun_twice_was_run_twice(text: str, found: int, checked: int) -> None:
    trial = Trial("fake", 1, ())
    judge_runs(trial, "r", {"id": 2, "result": {"content": [{"text": text}]}})
    assert len(trial.findings) == found
    assert trial.counts["runs checked"] == checked


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"error": {}},
        {"result": None},
        {"result": []},
        *({"result": {"content": content}} for content in (None, {}, [{}], [{"text": None}])),
    ],
)
def test_an_answer_that_says_nothing_of_runs_is_no_finding(answer: dict[str, Any]) -> None:
    trial = Trial("fake", 1, ())
    judge_runs(trial, "r", answer)
    assert (trial.findings, trial.counts["runs checked"]) == ([], 0)


@pytest.mark.parametrize("violation", Violation, ids=lambda violation: violation.value)
def test_every_violation_says_what_it_means(violation: Violation) -> None:
    assert len(violation.meaning) > 10
    assert [other for other in Violation if other.meaning == violation.meaning] == [violation]


def test_a_finding_is_on_the_timeline_and_a_timeline_is_bounded() -> None:
    trial = Trial("fake", 1, ())
    trial.find(Violation.STUCK, "for good")
    assert [(entry.lane, entry.what) for entry in trial.trace.entries] == [
        ("fault", "VIOLATION stuck: for good")
    ]
    for number in range(10_000):
        trial.trace.note("event", str(number))
        trial.trace.passed(1, True, number)
    assert len(trial.trace.entries) == len(trial.trace.bytes) == 4000
    assert trial.trace.entries[-1].what == "9999"


def test_a_result_keeps_no_timeline_of_a_trial_that_went_well() -> None:
    result = Result(experiment(fails))
    result.add(Trial("fake", 1, ()))
    assert (result.trials, result.failures) == (1, [])
