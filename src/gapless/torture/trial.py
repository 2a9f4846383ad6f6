"""What a trial is, what it may find wrong, and what every experiment offers."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, Protocol
from urllib.parse import urlsplit

from gapless.torture.schedule import Schedule

__all__ = [
    "RUN",
    "Bytes",
    "Described",
    "Entry",
    "Experiment",
    "Finding",
    "Target",
    "Trace",
    "Trial",
    "View",
    "Violation",
]

RUN: Final = re.compile(r"[a-z]+-\d+-[0-9a-f]{12}")
"""What names the climbs of a trial."""

_KEPT: Final = 4000
"""Entries of a timeline that are kept: the latest."""


class Violation(Enum):
    """Something that must not happen; the value is its name in reports."""

    MISSING = "missing"
    REPEATED = "repeated"
    REORDERED = "reordered"
    FOREIGN = "foreign"
    UNANSWERED = "unanswered"
    RUN_TWICE = "run twice"
    NOT_RUN = "not run"
    STUCK = "stuck"
    FORCED = "forced renegotiation"
    DUAL_NEGOTIATION = "dual negotiation"
    NOT_BURNED = "not burned"
    ABOVE_CURSOR = "above the cursor"
    NO_ECHO = "no cursor in the 101"
    STALE_ECHO = "stale cursor"
    ECHO_BELIEVED = "echo believed"
    SILENT_CURSOR = "silent cursor"
    FALSE_CAUGHT_UP = "false caught-up"
    DELAYED = "delayed"
    MEMORY = "memory"
    DENIED = "denied"
    LOG_BROKEN = "log broken"

    @property
    def meaning(self) -> str:
        """What it means to whoever runs an agent on that server."""
        return _MEANING[self]


_MEANING: Final = {
    Violation.MISSING: "events were skipped for good, and no error was raised",
    Violation.REPEATED: "events that the client had processed came again",
    Violation.REORDERED: "events overtook one another",
    Violation.FOREIGN: "events of another session were sent",
    Violation.UNANSWERED: "a call got no result, or an error in its place",
    Violation.RUN_TWICE: "a call's side effects happened more than once",
    Violation.NOT_RUN: "a call was answered with a result, and its side effects never happened",
    Violation.STUCK: "client and server wait for each other: a deadlock until some timeout",
    Violation.FORCED: "the client lost its session and had to negotiate a new one",
    Violation.DUAL_NEGOTIATION: "a second upgrade-accepted was minted while the first was pending",
    Violation.NOT_BURNED: "a resume at the boundary was not refused with session-superseded",
    Violation.ABOVE_CURSOR: "frames above the echoed cursor came before its cursor-ack",
    Violation.NO_ECHO: "the upgrade omits its cursor: the client cannot reconcile what it has processed",
    Violation.STALE_ECHO: "the 101's cursor was computed before the drain, and stale when it was read",
    Violation.ECHO_BELIEVED: "a position that the server had told was taken for one the client had processed",
    Violation.SILENT_CURSOR: "a cursor that the server cannot know got 200 and silence, not a refusal",
    Violation.FALSE_CAUGHT_UP: "the client was told that nothing more would come while something was due",
    Violation.DELAYED: "a slow or silent reader held up the others",
    Violation.MEMORY: "readers that do not read cost memory without bound",
    Violation.DENIED: "what one process of the server had acknowledged, the next one denied",
    Violation.LOG_BROKEN: "the log does not hold together, or is not what the client was sent",
}


class View(Enum):
    """How a server is spoken to."""

    SESSION = "session"
    """The session view of the continuity protocol: one stream, proven cursors, the door."""
    STANDARD = "standard"
    """Streamable HTTP as MCP has it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that listens on this machine or elsewhere.

    Attributes:
        url: of its MCP endpoint.
        pid: its process, if that is known: its memory is then watched.
        views: what it speaks.
    """

    url: str
    pid: int | None = None
    views: frozenset[View] = frozenset(View)

    @property
    def host(self) -> str:
        """The host to connect to."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """The port to connect to."""
        return urlsplit(self.url).port or 80

    def through(self, port: int) -> str:
        """The URL of the same endpoint through a proxy on this machine."""
        return urlsplit(self.url)._replace(netloc=f"127.0.0.1:{port}").geturl()


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation in one trial, in words."""

    violation: Violation
    detail: str
    amount: int = 1
    """How many events or calls it is about."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One moment on a trial's timeline: seconds since it began, whose lane, what."""

    at: float
    lane: str
    what: str


@dataclass(frozen=True, slots=True)
class Bytes:
    """So many bytes went through a connection's proxy: to the client, or to the server."""

    at: float
    link: int
    down: bool
    count: int


class Trace:
    """A trial's timeline. Lanes: `fault`, `wire`, `client`, `event`; and the bytes of each connection."""

    def __init__(self) -> None:
        self.began: Final = time.monotonic()
        self.entries: deque[Entry] = deque(maxlen=_KEPT)
        self.bytes: deque[Bytes] = deque(maxlen=_KEPT)

    @property
    def now(self) -> float:
        """Seconds since the trial began."""
        return time.monotonic() - self.began

    def note(self, lane: str, what: str) -> None:
        """Something happened."""
        self.entries.append(Entry(self.now, lane, what))

    def passed(self, link: int, down: bool, count: int) -> None:
        """Bytes went through the proxy."""
        self.bytes.append(Bytes(self.now, link, down, count))


@dataclass(slots=True)
class Trial:
    """One trial and what came of it.

    Attributes:
        measures: what was measured, in milliseconds unless the name says otherwise.
        counts: what was counted.
    """

    experiment: str
    seed: int
    schedule: Schedule
    trace: Trace = field(default_factory=Trace)
    findings: list[Finding] = field(default_factory=list[Finding])
    measures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    counts: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    run: str = ""
    """Names its climbs: no other trial, and no repeat of this one, has the same."""
    since: int | None = None
    """The seed of the trial with which that which this one went on with began; `None` is this one's own."""

    def __post_init__(self) -> None:
        self.run = f"{self.experiment}-{self.seed}-{secrets.token_hex(6)}"  # as RUN has it

    @property
    def failed(self) -> bool:
        """Whether anything was found wrong."""
        return bool(self.findings)

    def find(self, violation: Violation, detail: str, amount: int = 1) -> None:
        """Something is wrong."""
        self.findings.append(Finding(violation, detail, amount))
        self.trace.note("fault", f"VIOLATION {violation.value}: {detail}")

    def measure(self, name: str, value: float) -> None:
        """Something was measured."""
        self.measures.setdefault(name, []).append(value)


class Described(Protocol):
    """What every experiment says of itself."""

    name: ClassVar[str]
    about: ClassVar[str]
    """In one line."""
    trials: ClassVar[int]
    """How many make a verdict."""
    serve: ClassVar[tuple[str, ...]]
    """How `gapless serve` is to be started for it."""

    def plan(self, seed: int) -> Schedule:
        """The faults of a trial, drawn from its seed alone."""
        ...


class Experiment(Described, Protocol):
    """A kind of trial. One object serves many trials, each with its own proxy."""

    views: ClassVar[frozenset[View]]
    """What the server must speak: one of these will do."""
    jobs: ClassVar[int]
    """How many run at once."""

    async def run(self, target: Target, trial: Trial) -> None:
        """Carry a trial out, and note in it what was found.

        Raises:
            TargetError: the server cannot be judged: it is not there, or has no ladder.
        """
        ...
