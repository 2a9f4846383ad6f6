"""The two streams that the SDK's sessions take, without a queue or a task between them and the driver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream

__all__ = ["Messages", "Sink"]

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Messages(ObjectReceiveStream[T_co]):
    """What there is to receive: to receive a message is to accept it.

    Args:
        take: returns the next message, or raises `anyio.EndOfStream`.
    """

    def __init__(self, take: Callable[[], Awaitable[T_co]]) -> None:
        self._take = take
        self._closed = False

    async def receive(self) -> T_co:
        """The next message.

        Raises:
            anyio.ClosedResourceError: this end is closed.
            anyio.EndOfStream: the session is over.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        return await self._take()

    def close(self) -> None:
        """Receive no more."""
        self._closed = True

    async def aclose(self) -> None:
        """Receive no more."""
        self.close()


class Sink(ObjectSendStream[T_contra]):
    """Where to send: what is sent is numbered and kept when `send` returns.

    Args:
        give: takes a message.
    """

    def __init__(self, give: Callable[[T_contra], Awaitable[None]]) -> None:
        self._give = give
        self._closed = False

    async def send(self, item: T_contra) -> None:
        """Send a message; waits while too many have not been received.

        Raises:
            anyio.ClosedResourceError: this end is closed.
            anyio.BrokenResourceError: the session is over.
            UsageError: a request with the ID of one in flight.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        await self._give(item)

    def close(self) -> None:
        """Send no more."""
        self._closed = True

    async def aclose(self) -> None:
        """Send no more."""
        self.close()
