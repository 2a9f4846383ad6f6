"""A trial's faults: what is done to its connections, and when; written `12:reset 30:swallow`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gapless.errors import UsageError

__all__ = [
    "AT_ONCE",
    "HANDSHAKE",
    "REQUEST",
    "Fault",
    "Schedule",
    "Step",
    "draw",
    "format_schedule",
    "parse_schedule",
]


class Fault(Enum):
    """What can be done. Some strike at once, on what carries events; others wait for their moment."""

    # At once, on every connection that carries events.
    RESET = "reset"
    CLOSE = "close"
    HALF_CLOSE = "half-close"
    HALF_OPEN = "half-open"
    SWALLOW = "swallow"
    DELAY = "delay"
    THROTTLE = "throttle"
    SPLIT = "split"
    COALESCE = "coalesce"
    # At once, on every connection there is.
    CUT_ALL = "cut-all"
    OUTAGE = "outage"
    # At the next event stream that is asked for.
    CUT_HEAD = "cut-head"
    BUFFER = "buffer"
    NOT_FOUND = "not-found"
    # At the next result that passes.
    CUT_RESULT = "cut-result"
    CUT_END = "cut-end"
    # At the next POST.
    CUT_FIRST = "cut-first"
    LOST_ANSWER = "lost-answer"
    REPEAT = "repeat"
    # Through the door, and at the next handshake.
    MOVE = "move"
    REFUSE_200 = "refuse-200"
    REFUSE_400 = "refuse-400"
    REFUSE_403 = "refuse-403"
    REFUSE_502 = "refuse-502"
    STRIP_UPGRADE = "strip-upgrade"
    STRIP_ECHO = "strip-echo"
    EAT_101 = "eat-101"
    HOLD_101 = "hold-101"
    CUT_101 = "cut-101"
    CUT_GAP = "cut-gap"

    @property
    def meaning(self) -> str:
        """What it does."""
        return _MEANING[self]


_MEANING: Final = {
    Fault.RESET: "TCP reset of what carries events",
    Fault.CLOSE: "orderly end of what carries events",
    Fault.HALF_CLOSE: "the client's side is told of an end, the server's is not",
    Fault.HALF_OPEN: "no bytes and no FIN any more, either way",
    Fault.SWALLOW: "bytes to the client vanish for 30 ms, then a reset",
    Fault.DELAY: "every byte arrives 30 ms later",
    Fault.THROTTLE: "4 KiB a second, for half a second",
    Fault.SPLIT: "one byte a segment, for 200 ms",
    Fault.COALESCE: "what comes within 50 ms arrives at once",
    Fault.CUT_ALL: "reset of every connection, requests under way included",
    Fault.OUTAGE: "nothing connects for 150 ms",
    Fault.CUT_HEAD: "the next event stream is cut before its head arrives",
    Fault.BUFFER: "the next event stream is held back whole until it ends",
    Fault.NOT_FOUND: "the next event stream is answered by a stranger's text/plain 404",
    Fault.CUT_RESULT: "a reset in place of the next result",
    Fault.CUT_END: "a reset between the next result and its stream's end",
    Fault.CUT_FIRST: "the next POST's stream is cut before its first event ID",
    Fault.LOST_ANSWER: "the next POST is carried out, its answer lost",
    Fault.REPEAT: "the next POST reaches the server twice",
    Fault.MOVE: "the client goes through the door",
    Fault.REFUSE_200: "the next handshake is answered 200 by a proxy",
    Fault.REFUSE_400: "the next handshake is answered 400 by a proxy",
    Fault.REFUSE_403: "the next handshake is answered 403 by a proxy",
    Fault.REFUSE_502: "the next handshake is answered 502 by a proxy",
    Fault.STRIP_UPGRADE: "the next handshake arrives as a plain GET",
    Fault.STRIP_ECHO: "the next 101 loses its X-MCP-Resume-Cursor",
    Fault.EAT_101: "the next 101 never arrives, and no FIN",
    Fault.HOLD_101: "the next 101 is held back for 200 ms",
    Fault.CUT_101: "a reset in place of the next 101",
    Fault.CUT_GAP: "a reset after the next 101, inside the gap",
}

AT_ONCE: Final = (
    Fault.RESET,
    Fault.CLOSE,
    Fault.HALF_CLOSE,
    Fault.SWALLOW,
    Fault.DELAY,
    Fault.THROTTLE,
    Fault.SPLIT,
    Fault.COALESCE,
)
"""Faults that any client of any server may meet, and get over within moments."""

REQUEST: Final = (Fault.LOST_ANSWER, Fault.REPEAT, Fault.NOT_FOUND, Fault.CUT_HEAD, Fault.BUFFER)
"""Faults of single requests."""

HANDSHAKE: Final = (
    Fault.REFUSE_200,
    Fault.REFUSE_400,
    Fault.REFUSE_403,
    Fault.REFUSE_502,
    Fault.STRIP_UPGRADE,
    Fault.STRIP_ECHO,
    Fault.EAT_101,
    Fault.HOLD_101,
    Fault.CUT_101,
    Fault.CUT_GAP,
)
"""Faults of the door."""


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A fault, done or armed once the client has received `at` messages."""

    at: int
    name: str

    @property
    def fault(self) -> Fault:
        """What is done."""
        return Fault(self.name)


Schedule = tuple[Step, ...]


def parse_schedule(text: str) -> Schedule:
    """Read a schedule: `12:reset 30:swallow`.

    Raises:
        UsageError: it is not one.
    """
    steps: list[Step] = []
    known = [fault.value for fault in Fault]
    for word in text.split():
        at, _, name = word.partition(":")
        if name not in known or not at.isdecimal() or len(at) > 9:
            hint = "write a count of messages, a colon and a fault, such as 12:reset; faults are "
            raise UsageError(f"{word!r} is no step of a schedule", hint=hint + ", ".join(known))
        steps.append(Step(int(at), name))
    return tuple(sorted(steps))


def format_schedule(schedule: Schedule) -> str:
    """The reverse of `parse_schedule`."""
    return " ".join(f"{step.at}:{step.name}" for step in schedule)


def draw(rng: random.Random, faults: Sequence[Fault], count: int, until: int) -> Schedule:
    """`count` faults at random moments of a climb of `until` rungs."""
    return tuple(sorted(Step(rng.randrange(until), rng.choice(faults).value) for _ in range(count)))
