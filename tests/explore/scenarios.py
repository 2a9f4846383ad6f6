"""What is explored: a few small worlds, each about one thing, which together cover §11.

Every scenario is explored to its end. `DEEP` widens the same ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gapless.protocol.session import View
from gapless.protocol.settings import Limits
from tests.explore.world import Scenario

__all__ = ["DEEP", "DEFAULT"]

_ONE: Final = {"steps": 1}
_TWO: Final = {"steps": 2}
_SSE: Final = {"policy": "never"}

_NETWORK: Final = frozenset({"break", "lose"})
_BURNED: Final = frozenset({"session-superseded"})

DEFAULT: Final = (
    # The door, with feeds and commits that take their time.
    Scenario("one step", _ONE, before=1, emits=2, faults=1),
    Scenario("two steps", _TWO, before=1, emits=1, faults=1),
    # Two faults, at any two moments.
    Scenario("one step, two faults", _ONE, before=1, emits=1, faults=2, prompt=True),
    Scenario("two steps, two faults", _TWO, before=2, emits=0, faults=2, prompt=True),
    Scenario(
        "one step, late requests", _ONE, before=1, emits=0, faults=2, kinds=_NETWORK | {"delay"}, prompt=True
    ),
    Scenario(
        "two steps, late and doubled requests",
        _TWO,
        before=1,
        emits=0,
        faults=2,
        kinds=frozenset({"lose", "delay", "duplicate"}),
        prompt=True,
    ),
    Scenario("one step, eaten", _ONE, before=1, emits=1, faults=1, kinds=frozenset({"eat"})),
    Scenario(
        "two steps, eaten",
        _TWO,
        before=1,
        emits=1,
        faults=1,
        kinds=frozenset({"eat"}),
        ends=frozenset({"upgrade-unavailable"}),
    ),
    # Retention.
    Scenario(
        "eviction at the limit",
        _ONE,
        limits=Limits(retain_events=2),
        before=1,
        emits=2,
        acks=True,
        slow=True,
        ends=frozenset({"cursor-evicted"}),
    ),
    Scenario(
        "eviction by age",
        _ONE,
        limits=Limits(retain_seconds=5.0),
        before=1,
        emits=2,
        ages=1,
        acks=True,
        prompt=True,
        ends=frozenset({"cursor-evicted"}),
    ),
    Scenario(
        "eviction and a fault",
        _SSE,
        limits=Limits(retain_events=2),
        before=1,
        emits=3,
        faults=1,
        acks=True,
        prompt=True,
        ends=frozenset({"cursor-evicted"}),
    ),
    # Messages.
    Scenario(
        "requests by POST",
        _SSE,
        emits=0,
        asks=2,
        faults=1,
        kinds=_NETWORK | {"duplicate", "delay"},
        prompt=True,
    ),
    Scenario(
        "requests by POST, two faults",
        _SSE,
        emits=0,
        asks=1,
        faults=2,
        kinds=_NETWORK | {"duplicate"},
        prompt=True,
    ),
    Scenario(
        "requests across the door",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        faults=1,
        kinds=_NETWORK | {"duplicate", "delay"},
        prompt=True,
    ),
    # Ends.
    Scenario(
        "the session ends",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        closes=1,
        ends=frozenset({"session-expired", "session-ended"}),
    ),
    Scenario(
        "the server restarts",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        faults=1,
        kinds=frozenset({"restart"}),
        prompt=True,
        ends=frozenset({"backend-lost"}),
    ),
    Scenario(
        "the client restarts",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        faults=1,
        kinds=frozenset({"crash"}),
        prompt=True,
    ),
    Scenario(
        "the client restarts, two steps",
        _TWO,
        before=1,
        emits=1,
        faults=1,
        kinds=frozenset({"crash"}),
        prompt=True,
        # A process that does not know that it was at the door resumes at the boundary (B1).
        ends=frozenset({"non-resumable-boundary", "session-superseded"}),
    ),
    Scenario(
        "the application moves",
        {"policy": "never", "steps": 2},
        before=1,
        emits=0,
        faults=1,
        moves=2,
        prompt=True,
    ),
    # A second, naive client with the same token.
    Scenario("a sibling resumes", _TWO, before=1, emits=0, siblings=("resume",), ends=_BURNED),
    Scenario(
        "siblings, bound",
        _ONE,
        before=1,
        emits=0,
        faults=1,
        kinds=frozenset({"late"}),
        siblings=("handshake", "resume"),
        prompt=True,
    ),
    Scenario(
        "a sibling negotiates",
        _TWO,
        before=0,
        emits=1,
        moves=1,
        siblings=("negotiate",),
        prompt=True,
        ends=_BURNED,
    ),
    Scenario("a sibling negotiates below U", _TWO, before=1, emits=1, siblings=("negotiate from the start",)),
    Scenario(
        "siblings without a cursor of their own",
        _TWO,
        before=1,
        emits=0,
        siblings=("resume without a cursor", "resume at a server position", "resume at a forged cursor"),
        prompt=True,
        ends=_BURNED,
    ),
    # The stream view.
    Scenario(
        "streams",
        view=View.STREAM,
        emits=1,
        asks=1,
        faults=1,
        kinds=frozenset({"break", "delay"}),
        prompt=True,
    ),
    Scenario(
        "streams and eviction",
        view=View.STREAM,
        limits=Limits(retain_events=1),
        emits=1,
        asks=1,
        faults=1,
        kinds=frozenset({"break"}),
        prompt=True,
        ends=frozenset({"cursor-evicted"}),
    ),
)
"""What `make test` explores."""


def _deeper(scenario: Scenario) -> Scenario:
    """The same with feeds that take their time; where they do already, with one event more."""
    if scenario.prompt:
        return replace(scenario, prompt=False, name=f"{scenario.name}, slow feeds")
    return replace(scenario, emits=scenario.emits + 1, name=f"{scenario.name}, one event more")


DEEP: Final = (
    *map(_deeper, DEFAULT),
    Scenario("one step, two faults, slow feeds, commits and events", _ONE, before=1, emits=2, faults=2),
    Scenario("two steps, two faults, slow feeds, commits and events", _TWO, before=1, emits=1, faults=2),
    Scenario(
        "requests across the door, two faults",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        faults=2,
        kinds=_NETWORK | {"duplicate", "delay", "late"},
        prompt=True,
    ),
    Scenario(
        "streams, two faults",
        view=View.STREAM,
        emits=1,
        asks=1,
        faults=2,
        kinds=_NETWORK,
        prompt=True,
    ),
)
"""What `make explore` explores."""
