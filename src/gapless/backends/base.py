"""What carries the MCP server behind a session: one backend per session, messages as raw bytes.

A backend is opened with a *sink*, the one thing it may call back. Its messages are single
lines of valid UTF-8 JSON (W4): what a server emits that is not is answered or dropped inside the
backend, and never reaches the sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Protocol

from gapless.protocol.jsonrpc import Envelope, RequestId

__all__ = ["Backend", "BackendFactory", "Sink"]


class Sink(Protocol):
    """Where a backend's messages go."""

    def emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
    ) -> Awaitable[None] | None:
        """Hand over one message, in the order the server wrote it; or a run of `plain` ones, at once.

        Where something is returned, the next may come only once that is done: this is the backend's
        backpressure. `related` is the request that the message belongs to where the backend knows it (M1).
        """
        ...

    async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
        """The MCP server is gone and will send nothing more: called once, last, unless `close` was called.

        Of the requests it was sent, those in `untaken` certainly did not reach it: a fresh one gets them.
        """
        ...


class Backend(ABC):
    """One running MCP server, or one session of one."""

    @abstractmethod
    async def send(self, data: bytes, envelope: Envelope) -> None:
        """Hand one client message to the server; returns when it has been accepted.

        Raises:
            BackendError: the server is gone; `lost` has been or will be called.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the server, forcibly if need be, within 5 seconds. Idempotent; nothing is emitted after."""


class BackendFactory(Protocol):
    """Opens backends; one is shared by all sessions of a server."""

    spawns: bool
    """Whether each session has a process of its own."""

    async def start(self) -> None:
        """Enter whatever all sessions share (an in-process server's lifespan), once."""
        ...

    async def open(self, sink: Sink) -> Backend:
        """Start a backend for a new session.

        Raises:
            BackendError: it cannot be started (no such command, say).
        """
        ...

    async def close(self) -> None:
        """Leave what `start` entered. All backends have been closed by then."""
        ...
