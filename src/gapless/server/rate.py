"""How often something may be done: a token bucket."""

from __future__ import annotations

__all__ = ["Rate"]


class Rate:
    """Lets so many through at once, and from then on as many in a minute.

    Args:
        per_minute: how many; above 0.
        now: seconds by the clock that `take` is given.
    """

    __slots__ = ("_at", "_left", "_most")

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = per_minute
        self._left = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """Let one through: 0; or the seconds after which there is room again."""
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) * 60 / self._most
