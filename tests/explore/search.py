"""The search: every world that can be reached, breadth first, and from each a way to rest.

Safety is checked in every state as it is made. Liveness is checked on the finished graph: with faults
ended, and leaving out whatever nobody can count on, every state leads to rest; and the graph without
faults has no cycle, so that every run, however it is scheduled, comes to rest in a bounded number of
steps (§11.5).
"""

from __future__ import annotations

import gc
import itertools
from array import array
from collections import deque
from dataclasses import dataclass
from time import process_time
from typing import Any

from gapless.protocol.session import View
from tests.explore.parts import Violation
from tests.explore.world import FAULTS, Action, Scenario, StreamUniverse, Universe, World

__all__ = ["Found", "Result", "explore"]


@dataclass(frozen=True, slots=True)
class Result:
    """What an exploration went through."""

    name: str
    states: int
    transitions: int
    longest: int
    servers: int
    clients: int
    seconds: float
    ends: frozenset[str]
    actions: frozenset[str]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.states} states, {self.transitions} transitions, "
            f"{self.longest} steps to rest at most, {self.servers} server × {self.clients} client states, "
            f"{self.seconds:.1f} s"
        )


class Found(AssertionError):
    """A violation, with the shortest way to it."""


class _Graph:
    def __init__(self, universe: Any) -> None:
        self.universe = universe
        self.seen: dict[int, int] = {}
        self.parents = array("i")
        self.acts: list[Action | None] = []
        self.sources, self.targets = array("i"), array("i")
        self.sure = array("b")
        self.rests = array("b")
        self.transitions = 0

    def add(self, key: int, parent: int, action: Action | None, rests: bool) -> int:
        number = self.seen[key] = len(self.seen)
        self.parents.append(parent)
        self.acts.append(action)
        self.rests.append(rests)
        return number


def explore(scenario: Scenario, *, universe: Any = None, most: int = 5_000_000) -> Result:
    """Explore a scenario to its end.

    Raises:
        Found: something is wrong; its text is the shortest trace that shows it.
    """
    # Nothing here is garbage before the end, and looking for some would take a third of the time.
    gc.disable()
    try:
        return _explore(scenario, universe or _universe(scenario), most)
    finally:
        gc.enable()


def _universe(scenario: Scenario) -> Universe:
    return Universe(scenario) if scenario.view is View.SESSION else StreamUniverse(scenario)


def _explore(scenario: Scenario, universe: Any, most: int) -> Result:
    began = process_time()
    graph = _Graph(universe)
    first = universe.first()
    graph.add(first.number, -1, None, universe.rests(first))
    queue: deque[tuple[int, World]] = deque([(0, first)])
    while queue:
        number, world = queue.popleft()
        for action in universe.actions(world):
            graph.transitions += 1
            try:
                after = universe.apply(world, action)
                key = after.number
                target = graph.seen.get(key)
                if target is None:
                    universe.check(after)
            except Exception as error:
                if not isinstance(error, Violation | AssertionError | KeyError):
                    raise
                found = Found(_tell(graph, number, action, f"{type(error).__name__}: {error}"))
                raise found from (None if isinstance(error, Violation) else error)
            if target is None:
                if len(graph.seen) >= most:
                    raise Found(_tell(graph, number, action, f"{scenario.name}: more than {most} states"))
                target = graph.add(key, number, action, universe.rests(after))
                queue.append((target, after))
            if target != number and action[0] not in FAULTS:
                graph.sources.append(number)
                graph.targets.append(target)
                graph.sure.append(action[0] not in universe.unsure)
    longest = _check_liveness(graph)
    return Result(
        scenario.name,
        len(graph.seen),
        graph.transitions,
        longest,
        len(universe.servers.table),
        sum(len(peers.table) for peers in universe.peers),
        process_time() - began,
        frozenset(universe.ends),
        frozenset(act[0] for act in graph.acts if act is not None),
    )


def _check_liveness(graph: _Graph) -> int:
    """Every state reaches rest by sure steps alone, and no run without faults goes on for ever."""
    count = len(graph.seen)
    back: list[list[int]] = [[] for _ in range(count)]
    ahead: list[list[int]] = [[] for _ in range(count)]
    degree = array("i", bytes(4 * count))
    for source, target, sure in zip(graph.sources, graph.targets, graph.sure, strict=True):
        ahead[source].append(target)
        degree[target] += 1
        if sure:
            back[target].append(source)
    reached = bytearray(graph.rests)
    stack = [n for n in range(count) if reached[n]]
    while stack:
        for source in back[stack.pop()]:
            if not reached[source]:
                reached[source] = 1
                stack.append(source)
    stuck = [n for n in range(count) if not reached[n]]
    if stuck:
        moving = set(itertools.compress(graph.sources, graph.sure))
        dead = next((n for n in stuck if n not in moving), stuck[0])
        raise Found(_tell(graph, dead, None, "§11.5: from here nothing leads to rest"))
    longest = array("i", bytes(4 * count))
    stack = [n for n in range(count) if not degree[n]]
    done = 0
    while stack:
        n = stack.pop()
        done += 1
        for target in ahead[n]:
            longest[target] = max(longest[target], longest[n] + 1)
            degree[target] -= 1
            if not degree[target]:
                stack.append(target)
    if done < count:
        looping = next(n for n in range(count) if degree[n])
        raise Found(_tell(graph, looping, None, "§11.5: a run without faults can come back here for ever"))
    return max(longest)


def _tell(graph: _Graph, number: int, action: Action | None, problem: str) -> str:
    """The shortest way to a state, step by step, with what both machines did."""
    path: list[Action] = [] if action is None else [action]
    while number:
        act = graph.acts[number]
        assert act is not None
        path.append(act)
        number = graph.parents[number]
    universe = graph.universe
    world = universe.first()
    lines = [problem, f"scenario: {universe.scenario.name}", *universe.describe(world)]
    for n, act in enumerate(reversed(path), 1):
        lines.append(f"{n}. {' '.join(map(str, act))}")
        lines += universe.explain(world, act)
        try:
            world = universe.apply(world, act)
            universe.check(world)
        except Exception as error:  # the last step is the one that shows it
            lines.append(f"=> {type(error).__name__}: {error}")
            break
        lines += universe.describe(world)
    return "\n".join(lines)
