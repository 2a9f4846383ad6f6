"""What the client can be about, where each phase may lead, and how it backs off."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

__all__ = ["ALLOWED", "CARRYING", "LIVE", "Phase", "Policy", "Retry"]


class Phase(Enum):
    """What the client is about."""

    NEW = "new"
    OPENING = "opening"
    """The session is being opened."""
    LISTENING = "listening"
    """An event stream was asked for."""
    STREAMING = "streaming"
    """An event stream is being read."""
    NEGOTIATING = "negotiating"
    """An upgrade was asked for in band (two steps)."""
    KNOCKING = "knocking"
    """A handshake was sent; no event stream is read until its answer (U10)."""
    BRIDGING = "bridging"
    """The socket is there; the gap up to `C` is being processed (U3)."""
    BOUND = "bound"
    """The socket is live, the gap acknowledged."""
    RESTING = "resting"
    """Backing off before the next move."""
    OVER = "over"


LIVE: Final = frozenset(Phase) - {Phase.NEW, Phase.OVER}
CARRYING: Final = frozenset({Phase.STREAMING, Phase.BRIDGING, Phase.BOUND})
"""A connection carries events, or a sign of life now and then (C8)."""
_NEXT: Final = frozenset({Phase.LISTENING, Phase.KNOCKING, Phase.NEGOTIATING, Phase.RESTING, Phase.OVER})

ALLOWED: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.NEW: frozenset({Phase.OPENING, Phase.LISTENING, Phase.OVER}),
    Phase.OPENING: frozenset({Phase.LISTENING, Phase.RESTING, Phase.OVER}),
    Phase.LISTENING: frozenset({Phase.STREAMING, Phase.RESTING, Phase.OVER}),
    Phase.STREAMING: _NEXT,
    Phase.NEGOTIATING: frozenset({Phase.KNOCKING, Phase.STREAMING, Phase.RESTING, Phase.OVER}),
    Phase.KNOCKING: frozenset({Phase.BRIDGING, Phase.STREAMING, Phase.RESTING, Phase.OVER}),
    Phase.BRIDGING: frozenset({Phase.BOUND, Phase.RESTING, Phase.OVER}),
    Phase.BOUND: frozenset({Phase.RESTING, Phase.OVER}),
    Phase.RESTING: frozenset({Phase.OPENING, Phase.LISTENING, Phase.KNOCKING, Phase.NEGOTIATING, Phase.OVER}),
    Phase.OVER: frozenset(),
}
"""Where each phase may lead; `handle` checks every step against it."""

Policy = Literal["auto", "never", "require"]


@dataclass(frozen=True, slots=True)
class Retry:
    """How the client backs off: delays in seconds, doubled from `first` up to `most`."""

    first: float = 0.1
    most: float = 10.0
    attempts: int = 12
    """Failures in a row, without progress in between, before it gives up (§11.5)."""
    door_first: float = 1.0
    door_most: float = 60.0

    def delay(self, failures: int) -> float:
        """The delay after so many failures in a row."""
        return min(self.most, self.first * 2.0 ** max(0, failures - 1))

    def door_delay(self, failures: int) -> float:
        """How long the door is left alone after so many handshakes that came to nothing (B7)."""
        return min(self.door_most, self.door_first * 2.0 ** max(0, failures - 1)) if failures else 0.0
