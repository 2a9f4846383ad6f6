"""What happens to sessions, for people: a log line for each turn of a transport, and counters."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from gapless.protocol.delivery import Delivery, Medium
from gapless.protocol.inputs import (
    Dropped,
    Effect,
    Handshake,
    Input,
    Listen,
    Lost,
    Message,
    Offered,
    Refused,
    Revive,
    Serving,
    Upgrade,
)
from gapless.protocol.refusal import Reason
from gapless.protocol.session import Session
from gapless.server.metrics import Metrics

if TYPE_CHECKING:
    from gapless.server.tracing import Spans

__all__ = ["JsonLines", "Observer", "Turn", "Turned"]

_turns: Final = logging.getLogger("gapless.turns")


class Turn(StrEnum):
    """A turn that a session's transport takes."""

    OPENED = "opened"
    LISTENING = "listening"
    """An event stream goes on after `cursor`."""
    OFFERED = "upgrade-accepted"
    BOUND = "websocket-bound"
    """A socket goes on after `cursor`, under `generation`."""
    CROSSED = "gap-crossed"
    """The socket's client has acknowledged the whole gap (U3)."""
    DROPPED = "dropped"
    """A connection is gone; `code` is what it was closed with, where we closed it."""
    TAKEN_OVER = "taken-over"
    """This process goes on with the session of one that is gone (N2)."""
    BACKEND_LOST = "backend-lost"
    BACKEND_REVIVED = "backend-revived"
    ABANDONED = "abandoned"
    """This process serves the session no more: another has taken it, or a commit failed (N1)."""
    ENDED = "ended"
    """The session is over, for `reason`."""


@dataclass(frozen=True, slots=True)
class Turned:
    """One turn; `session` is the first 8 hexadecimal digits of what the log knows the session by."""

    turn: Turn
    session: str
    view: str
    state: str
    committed: int
    cursor: int | None = None
    generation: int | None = None
    code: int | None = None
    reason: str | None = None


class Observer:
    """Is told of everything that happens, where it happens."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics or Metrics()

    def spans(self, session: str, machine: Session) -> Spans | None:
        """What makes a session's OpenTelemetry spans; `None` where nobody has asked for any."""
        if "opentelemetry.trace" not in sys.modules:
            return None  # whoever sets a tracer provider has imported it
        from gapless.server.tracing import spans

        return spans(session, machine)

    def saw(
        self,
        session: str,
        machine: Session,
        input: Input,
        effects: list[Effect],
        *,
        over: Reason | None,
        gone: Delivery | None,
    ) -> None:
        """The machine of a session has taken an input, and these are the effects.

        Args:
            over: the reason that the session had ended for before.
            gone: the delivery of a connection that was dropped.
        """
        match input, effects:
            case Listen(), [Serving()]:
                self._resumed(input, Medium.EVENTS, machine.reason)
                self.turned(Turn.LISTENING, session, machine, cursor=_stated(input))
            case Listen(), [Refused(refusal)]:
                self._resumed(input, Medium.EVENTS, refusal.reason)
            case Upgrade(), [Offered()]:
                self.turned(Turn.OFFERED, session, machine, cursor=_stated(input))
            case Handshake(), [Serving(delivery)]:
                self.metrics.upgrades.labels("bound").inc()
                self._resumed(input, Medium.SOCKET, None)
                generation = delivery.generation
                self.turned(Turn.BOUND, session, machine, cursor=_stated(input), generation=generation)
            case Handshake(), [Refused(refusal)]:
                self._resumed(input, Medium.SOCKET, refusal.reason)
            case Dropped(), _ if gone is not None:
                generation = gone.generation or None
                self.turned(Turn.DROPPED, session, machine, code=gone.close, generation=generation)
            case Lost(), _:
                self.turned(Turn.TAKEN_OVER if input.taken_over else Turn.BACKEND_LOST, session, machine)
            case Revive(), _:
                self.turned(Turn.BACKEND_REVIVED, session, machine)
            case Message(), [Refused(refusal), *_] if input.connection is not None:
                self.refused(refusal.reason)  # told by a block; what answers a request is counted there
            case _:
                pass
        if machine.reason is not over:
            self.turned(Turn.ENDED, session, machine, reason=str(machine.reason))

    def _resumed(self, input: Listen | Handshake, medium: Medium, refused: Reason | None) -> None:
        """Somebody asked to go on after an event."""
        cursor = input.cursor
        if cursor is not None and (cursor.stated.seq or cursor.stated.stream):
            outcome = "resumed" if refused is None else refused.value
            self.metrics.resumes.labels(medium.value, outcome).inc()

    def turned(self, turn: Turn, session: str, machine: Session, **about: Any) -> None:
        """A transport has taken a turn: count it, and log a line at INFO."""
        self.metrics.turns.labels(turn.value, machine.view.value).inc()
        if not _turns.isEnabledFor(logging.INFO):
            return
        state, committed = machine.door.state.name, machine.outbox.committed
        turned = Turned(turn, session, machine.view.value, state, committed, **about)
        said = {name: value for name, value in asdict(turned).items() if value is not None}
        told = " ".join(f"{name}={value}" for name, value in said.items() if name not in ("turn", "session"))
        _turns.info("session %s: %s, %s", session, turn.value, told, extra={"turned": said})

    def crossed(self, session: str, machine: Session, seconds: float) -> None:
        """So long after its handshake was accepted a client has the whole gap."""
        self.metrics.pauses.observe(seconds)
        self.turned(Turn.CROSSED, session, machine)

    def committed(self, events: int, messages: int, seconds: float) -> None:
        """A commit took so long, and made so many events and client messages durable."""
        self.metrics.commits.observe(seconds)
        if events:
            self.metrics.events.inc(events)
        if messages:
            self.metrics.messages.inc(messages)

    def refused(self, reason: Reason) -> None:
        """Somebody was told so."""
        self.metrics.refusals.labels(reason.value).inc()


class JsonLines(logging.Formatter):
    """Records as JSON, one to a line: `at` (RFC 3339), `level`, `logger`, `message`; of turns, all fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "at": f"{at}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "turned", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _stated(input: Listen | Upgrade | Handshake) -> int | None:
    return None if input.cursor is None else input.cursor.stated.seq
