"""A connection as the process that serves it knows it: how to have it look again, how to end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

__all__ = ["Attached", "Cuttable", "Wake"]


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


class Cuttable:
    """A block that its own task runs, and that others may cut short, at any time and more than once.

    One that was is left as if it had come to its end: `async with cuttable: …`, from which no
    cancellation gets out but those of others.
    """

    __slots__ = ("_scope",)

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)

    def cut(self) -> None:
        """Have it end now; without effect where it has."""
        with suppress(RuntimeError):
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            await self._scope.__aexit__(exc_type, exc, traceback)
        except TimeoutError:
            return True  # it was cut: one that was raised within is not raised here again
        return False


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
