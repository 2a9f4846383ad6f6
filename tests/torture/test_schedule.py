"""Schedules are written and read, drawn from a seed alone, and have nothing in them that is never done."""

from __future__ import annotations

import random

import pytest

from gapless.errors import UsageError
from gapless.torture.experiments import EXPERIMENTS
from gapless.torture.schedule import (
    AT_ONCE,
    HANDSHAKE,
    REQUEST,
    Fault,
    Step,
    draw,
    format_schedule,
    parse_schedule,
)
from gapless.torture.trial import Experiment

every_fault = pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
every_experiment = pytest.mark.parametrize("kind", EXPERIMENTS.values(), ids=EXPERIMENTS)


# In words --------------------------------------------------------------------------------------------------


@every_fault
def test_a_step_is_read_as_it_is_written(fault: Fault) -> None:
    schedule = (Step(0, fault.value), Step(12, fault.value))
    assert format_schedule(schedule) == f"0:{fault.value} 12:{fault.value}"
    assert parse_schedule(format_schedule(schedule)) == schedule
    assert [step.fault for step in schedule] == [fault, fault]


def test_no_faults_are_no_words() -> None:
    assert parse_schedule("") == parse_schedule("  ") == ()
    assert format_schedule(()) == ""


def test_steps_are_sorted_by_their_moment_and_not_by_their_digits() -> None:
    schedule = parse_schedule("30:swallow\n 4:close  12:reset 4:buffer")
    assert format_schedule(schedule) == "4:buffer 4:close 12:reset 30:swallow"


NO_STEPS = (
    "reset",
    "12",
    ":reset",
    "12:",
    "x:reset",
    "-1:reset",
    "1.5:reset",
    "²:reset",
    "12:RESET",
    "1:2:reset",
)


@pytest.mark.parametrize("word", [*NO_STEPS, "9" * 5000 + ":reset"], ids=lambda word: word[:9])
def test_what_is_no_step_is_named_and_the_faults_that_there_are_are_listed(word: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_schedule(f"3:close {word}")
    assert word in str(raised.value)
    assert all(fault.value in raised.value.hint for fault in Fault)


# In code ---------------------------------------------------------------------------------------------------


def test_a_schedule_is_drawn_from_the_seed_alone() -> None:
    def drawn(seed: int) -> tuple[Step, ...]:
        return draw(random.Random(seed), AT_ONCE, 20, 100)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(drawn(1)) == 20
    assert list(drawn(1)) == sorted(drawn(1))
    assert {step.fault for step in drawn(1)} <= set(AT_ONCE)
    assert all(0 <= step.at < 100 for step in drawn(1))


@every_fault
def test_every_fault_says_what_it_does(fault: Fault) -> None:
    assert len(fault.meaning) > 10
    assert [other for other in Fault if other.meaning == fault.meaning] == [fault]


def test_the_groups_of_faults_have_nothing_in_common() -> None:
    assert len({*AT_ONCE, *REQUEST, *HANDSHAKE}) == len(AT_ONCE) + len(REQUEST) + len(HANDSHAKE)


@every_experiment
def test_a_plan_is_a_function_of_the_seed_alone(kind: type[Experiment]) -> None:
    first, second = kind(), kind()
    plans = [first.plan(seed) for seed in range(100)]
    assert [second.plan(seed) for seed in reversed(range(100))] == plans[::-1]
    assert all(list(plan) == sorted(plan) for plan in plans)
    assert all(parse_schedule(format_schedule(plan)) == plan for plan in plans)


@pytest.mark.parametrize("name", ["resume", "storm", "boundary"])
def test_seeds_differ(name: str) -> None:
    plans = {EXPERIMENTS[name]().plan(seed) for seed in range(100)}
    assert len(plans) > (3 if name == "boundary" else 90)


def test_every_fault_is_drawn_by_some_experiment() -> None:
    drawn = {step.fault for kind in EXPERIMENTS.values() for seed in range(500) for step in kind().plan(seed)}
    assert drawn == set(Fault)
