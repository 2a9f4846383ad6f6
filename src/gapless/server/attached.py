"""A connection as the process that serves it knows it: how to have it look again, how to end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Attached", "Wake"]


class Wake:
    """Tells the one task that waits for it to look again: an `asyncio.Event` for one, a tenth of its size."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake it, now or when it next waits."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """What it was woken for is known: it looks right after this."""
        self._set = False

    async def wait(self) -> None:
        """Wait to be woken since `clear`."""
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Attached:
    """One connection that is being served.

    Attributes:
        wake: has its loop look what there is to write.
        cut: ends it if it does not end itself; `None` once that was arranged.
        expiry: fires when its token is none any more.
    """

    __slots__ = ("cut", "expiry", "wake")

    def __init__(self, cut: Callable[[], object], expiry: asyncio.TimerHandle | None) -> None:
        self.wake = Wake()
        self.cut: Callable[[], object] | None = cut
        self.expiry = expiry
