"""What is explored: a few small worlds, each about one thing, which together cover §11.

Every scenario is explored to its end. `DEEP` widens the same ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gapless.protocol.session import View
from gapless.protocol.settings import Limits
from tests.explore.client import RETRY
from tests.explore.world import Scenario

__all__ = ["DEEP", "DEFAULT"]

_ONE: Final = {"steps": 1}
_TWO: Final = {"steps": 2}
_SSE: Final = {"policy": "never"}

# Of two clients one is refused again and again; that it gives up soon keeps their worlds small.
_SOON: Final = {"retry": replace(RETRY, attempts=2)}
_ONE_SOON: Final = _ONE | _SOON
_TWO_SOON: Final = _TWO | _SOON
_SSE_SOON: Final = _SSE | _SOON

_AGING: Final = Limits(retain_seconds=5.0, retain_events=60)
"""Every event is evicted for itself; the number is never reached."""

_NETWORK: Final = frozenset({"break", "lose"})
_RESTART: Final = frozenset({"restart"})
_BACKEND: Final = frozenset({"backend"})
_BURNED: Final = frozenset({"session-superseded"})
_TAKEN: Final = frozenset({"message-conflict"})
_EVICTED: Final = frozenset({"cursor-evicted"})
_DOWN: Final = frozenset({"gave-up"})
"""A server that is down for long is given up."""
_ELSEWHERE: Final = frozenset({"websocket-bound"})
"""Whoever is refused for long because of another's socket gives up, and leaves the session to it."""

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
        ends=_EVICTED,
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
        ends=_EVICTED,
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
        ends=_EVICTED,
    ),
    # Retention at the door: the limits are reached, or time passes, at any moment of it.
    Scenario(
        "eviction at the limit, two steps",
        _TWO,
        limits=Limits(retain_events=2),
        before=1,
        emits=2,
        acks=True,
        prompt=True,
        ends=_EVICTED,
    ),
    Scenario(
        "eviction by age, two steps",
        _TWO,
        limits=_AGING,
        before=1,
        emits=1,
        ages=1,
        acks=True,
        prompt=True,
        ends=_EVICTED,
    ),
    Scenario(
        "pins that lapse, two steps",
        _TWO,
        limits=Limits(retain_events=2),
        before=1,
        emits=2,
        lapses=1,
        prompt=True,
        ends=_EVICTED,
    ),
    Scenario(
        "pins that lapse, by age", _ONE, limits=_AGING, before=1, emits=1, lapses=1, acks=True, ends=_EVICTED
    ),
    # The one limit that pins yield to; it is reached with an event above the gap, and inside of it.
    Scenario(
        "eviction by bytes",
        _ONE,
        limits=Limits(retain_bytes=200),
        before=1,
        emits=2,
        acks=True,
        prompt=True,
        ends=_EVICTED,
    ),
    Scenario(
        "eviction by bytes, two steps",
        _TWO,
        limits=Limits(retain_bytes=230),
        before=1,
        emits=2,
        prompt=True,
        ends=_EVICTED,
    ),
    Scenario(
        "eviction by bytes and a fault",
        _ONE,
        limits=Limits(retain_bytes=200),
        before=1,
        emits=2,
        faults=1,
        kinds=frozenset({"break"}),
        prompt=True,
        ends=_EVICTED,
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
    # The server dies, and another process takes over what it finds in the log.
    Scenario(
        "the server restarts",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        faults=1,
        kinds=_RESTART,
        prompt=True,
        ends=_DOWN | {"backend-lost"},
    ),
    Scenario(
        "the server restarts, two steps",
        _TWO,
        before=1,
        emits=1,
        faults=1,
        kinds=_RESTART,
        prompt=True,
        ends=_DOWN | {"backend-lost"},
    ),
    Scenario(
        "the server restarts, two clients",
        _ONE_SOON,
        _SSE_SOON,
        before=1,
        emits=0,
        faults=1,
        kinds=_RESTART,
        prompt=True,
        ends=_DOWN | _ELSEWHERE | {"backend-lost"},
    ),
    # The MCP server dies, and its owner goes on with another (N2). One that has answered nothing yet is lost.
    Scenario(
        "the backend dies",
        _SSE,
        emits=1,
        asks=2,
        faults=1,
        kinds=_BACKEND,
        on_backend_loss="restart",
        prompt=True,
        ends=frozenset({"backend-lost"}),
    ),
    Scenario(
        "the backend dies, then the server",
        _SSE,
        emits=0,
        asks=1,
        faults=2,
        kinds=_BACKEND | _RESTART,
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN | {"backend-lost"},
    ),
    # The same where sessions outlive the server: what is restored suffices to go on.
    Scenario(
        "a session outlives the server",
        _SSE,
        emits=0,
        asks=1,
        faults=1,
        kinds=_RESTART,
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN,
    ),
    Scenario(
        "a session outlives the server, one step",
        _ONE,
        emits=0,
        asks=1,
        faults=1,
        kinds=_RESTART,
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN,
    ),
    Scenario(
        "a session outlives the server, two steps",
        _TWO,
        before=1,
        emits=1,
        faults=1,
        kinds=_RESTART,
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN,
    ),
    Scenario(
        "a session outlives the server, two steps, two faults",
        _TWO,
        before=1,
        emits=0,
        faults=2,
        kinds=_RESTART | {"break"},
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN,
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
    # Two clients with one token, each of them ours.
    Scenario("two clients at the door", _ONE_SOON, _ONE_SOON, before=1, emits=0, ends=_ELSEWHERE),
    Scenario(
        "two clients at the door, one is late",
        _ONE_SOON,
        _ONE_SOON,
        before=1,
        emits=0,
        faults=2,
        kinds=frozenset({"late"}),
        prompt=True,
        ends=_ELSEWHERE | _DOWN,
    ),
    Scenario(
        "two clients at the door, two steps",
        _TWO_SOON,
        _TWO_SOON,
        before=1,
        emits=0,
        prompt=True,
        ends=_ELSEWHERE,
    ),
    Scenario(
        "two clients at the door, one step and two",
        _ONE_SOON,
        _TWO_SOON,
        before=1,
        emits=0,
        ends=_ELSEWHERE,
    ),
    Scenario(
        "two clients, one of them at the door",
        _ONE_SOON,
        _SSE_SOON,
        before=1,
        emits=1,
        prompt=True,
        ends=_ELSEWHERE,
    ),
    Scenario(
        "two clients post",
        _SSE,
        _SSE,
        emits=0,
        asks=1,
        faults=1,
        kinds=frozenset({"break"}),
        prompt=True,
        ends=_TAKEN,
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
        ends=_EVICTED,
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
    Scenario(
        "eviction at the limit, two steps, a fault",
        _TWO,
        limits=Limits(retain_events=2),
        before=1,
        emits=2,
        lapses=1,
        faults=1,
        kinds=_NETWORK,
        prompt=True,
        ends=_EVICTED,
    ),
    Scenario(
        "a session outlives the server, twice",
        _ONE,
        before=1,
        emits=0,
        asks=1,
        faults=2,
        kinds=_RESTART,
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN,
    ),
    Scenario(
        "a session outlives the server, two clients",
        _ONE_SOON,
        _ONE_SOON,
        before=1,
        emits=0,
        faults=1,
        kinds=_RESTART,
        on_backend_loss="restart",
        prompt=True,
        ends=_DOWN | _ELSEWHERE,
    ),
    Scenario(
        "two clients at the door, a fault",
        _ONE_SOON,
        _ONE_SOON,
        before=1,
        emits=0,
        faults=1,
        kinds=_NETWORK | {"late"},
        prompt=True,
        ends=_DOWN | _ELSEWHERE,
    ),
    Scenario(
        "two clients at the door, two steps, a fault",
        _TWO_SOON,
        _TWO_SOON,
        before=1,
        emits=0,
        faults=1,
        kinds=frozenset({"break", "late"}),
        prompt=True,
        ends=_DOWN | _ELSEWHERE,
    ),
    Scenario(
        "two clients post, requests doubled",
        _SSE,
        _SSE,
        emits=0,
        asks=1,
        faults=1,
        kinds=frozenset({"duplicate"}),
        prompt=True,
        ends=_TAKEN,
    ),
)
"""What `make explore` explores."""
