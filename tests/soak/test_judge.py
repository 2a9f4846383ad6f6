"""A judge of growth that could not find any would find none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.soak.judge import BOUNDS, grown, judge_growth, judge_rest

MIB = 2**20
HOUR, THREE_MINUTES = 3600, 180


def series(seconds: int, value: Callable[[int], float]) -> list[tuple[float, float]]:
    return [(float(at), value(at)) for at in range(seconds)]


def noisy(level: float, noise: float, slope: float = 0.0, seed: int = 1) -> Callable[[int], float]:
    rng = random.Random(seed)
    return lambda at: level + slope * at + rng.uniform(-noise, noise)


@pytest.mark.parametrize("seconds", [THREE_MINUTES, HOUR])
@pytest.mark.parametrize("seed", range(10))
def test_noise_about_a_level_is_no_growth(seconds: int, seed: int) -> None:
    assert judge_growth({"memory": series(seconds, noisy(90 * MIB, 4 * MIB, seed=seed))}) == []
    assert judge_growth({"descriptors": series(seconds, noisy(40, 15, seed=seed))}) == []
    assert judge_growth({"tasks": series(seconds, noisy(50, 30, seed=seed))}) == []


def test_what_warms_up_in_the_first_third_is_no_growth() -> None:
    def warming(at: int) -> float:
        return 60 * MIB + min(at, 55) * MIB / 2

    assert judge_growth({"memory": series(THREE_MINUTES, warming)}) == []


def test_peaks_and_one_step_are_no_growth() -> None:
    def peaked(at: int) -> float:
        return (90 + 40 * (at % 50 < 5)) * MIB

    def stepped(at: int) -> float:
        return (90 + 3 * (at > 120)) * MIB

    assert judge_growth({"memory": series(THREE_MINUTES, peaked)}) == []
    assert judge_growth({"memory": series(THREE_MINUTES, stepped)}) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_in_the_noise_is_found(seed: int) -> None:
    leak = noisy(90 * MIB, 4 * MIB, slope=80 * 1024, seed=seed)
    (told,) = judge_growth({"memory": series(THREE_MINUTES, leak)})
    assert told.startswith("memory grew by")


@pytest.mark.parametrize("name", ["memory", "graves", "segments"])
@pytest.mark.parametrize("seed", range(5))
def test_what_happens_to_be_in_flight_is_no_growth_and_a_leak_beneath_it_is(name: str, seed: int) -> None:
    most = BOUNDS[name].most

    def wandering(leak: float) -> Callable[[int], float]:
        """As good as nothing in flight, or more and more of it."""
        rng = random.Random(seed)
        return lambda at: (
            most * (20 + leak * at / HOUR + (rng.random() > 0.25) * rng.uniform(0, 2 + at / 400))
        )

    assert judge_growth({name: series(HOUR, wandering(0.0))}) == []
    assert len(judge_growth({name: series(HOUR, wandering(2.2))})) == 1


def test_an_hour_finds_a_leak_that_three_minutes_cannot() -> None:
    leak = noisy(90 * MIB, 4 * MIB, slope=4 * 1024)
    assert judge_growth({"memory": series(THREE_MINUTES, leak)}) == []
    assert judge_growth({"memory": series(HOUR, leak)}) != []


@pytest.mark.parametrize("name", BOUNDS)
def test_whatever_is_watched_may_not_grow(name: str) -> None:
    most = BOUNDS[name].most
    seconds = HOUR * 2 / 3
    below = series(HOUR, lambda at: 100 + 0.9 * most * at / seconds)
    above = series(HOUR, lambda at: 100 + 1.1 * most * at / seconds)
    assert judge_growth({name: below}) == []
    assert len(judge_growth({name: above})) == 1


def test_what_shrinks_is_fine() -> None:
    assert judge_growth({"memory": series(THREE_MINUTES, noisy(90 * MIB, MIB, slope=-100 * 1024))}) == []


def test_the_growth_is_that_of_the_last_two_thirds() -> None:
    found = grown(series(300, lambda at: float(at)))
    assert found.grown == pytest.approx(200, rel=0.01)
    assert found.level == pytest.approx(200, rel=0.01)
    assert found.most == 299


@pytest.mark.parametrize("count", [0, 1, 20])
def test_too_few_samples_are_no_verdict(count: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        judge_growth({"memory": series(count, noisy(1, 0))})


@pytest.mark.parametrize("name", [name for name, bound in BOUNDS.items() if bound.left is not None])
def test_what_is_left_when_nobody_is_there_is_told(name: str) -> None:
    left = BOUNDS[name].left
    assert left is not None
    assert judge_rest({name: 7}, {name: 7 + left}) == []
    (told,) = judge_rest({name: 7}, {name: 8 + left})
    assert told.startswith(f"{name} at rest")
