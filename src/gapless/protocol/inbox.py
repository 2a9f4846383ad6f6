"""The inbox of one session: numbers, digests, client processes (L6), and what is still open (L7)."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from gapless.protocol.carried import LISTEN
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId

__all__ = ["Inbox", "OpenRequest", "Verdict"]


_RETIRED: Final = 256
"""How many processes are remembered that were replaced: whoever changes them fills no memory."""


class Verdict(Enum):
    """What to do with a numbered message (L6)."""

    ACCEPT = "accept"
    REPEAT = "repeat"
    GAP = "gap"
    CONFLICT = "conflict"


class OpenRequest(msgspec.Struct, frozen=True):
    """A request that waits for its one settlement (L7)."""

    id: RequestId
    number: int
    stream: int
    method: str
    token: RequestId | None


class Inbox:
    """Which client messages were received, from which process, and which requests are open.

    `received` is the highest number accepted and `process` whose it is; `durable` the highest one
    the log has confirmed, and `durable_process` whose that is: only those are ever stated (L2).
    """

    __slots__ = ("asked", "durable", "durable_process", "open", "process", "received", "retired")

    def __init__(self) -> None:
        self.received = 0
        self.durable = 0
        self.process: str | None = None
        self.durable_process: str | None = None
        self.open: dict[RequestId, OpenRequest] = {}
        self.asked: dict[RequestId, int] = {}
        """Server→client requests that the client has not answered: ID to event number."""
        self.retired: tuple[str, ...] = ()
        """Client processes that a newcomer has replaced, of late (L6)."""

    def judge(self, process: str, number: int, same: bool) -> Verdict:
        """Judge a numbered message; `same` says that an earlier one under this number had these bytes."""
        if process in self.retired:
            return Verdict.CONFLICT
        if number == self.received + 1:
            return Verdict.ACCEPT
        if number > self.received:
            return Verdict.GAP
        return Verdict.REPEAT if same else Verdict.CONFLICT

    def accept(self, process: str | None) -> int:
        """Take the next number for a message of `process`; older processes may send no more (L6)."""
        if process is not None and process != self.process:
            if self.process is not None:
                self.retired = (*self.retired, self.process)[-_RETIRED:]
            self.process = process
        self.received += 1
        return self.received

    def confirm(self, received: int, process: str | None) -> None:
        """The log has everything up to a number, the last of it from a process."""
        self.durable, self.durable_process = received, process

    def open_request(self, envelope: Envelope, number: int, stream: int) -> None:
        """Note a request that a backend is about to get."""
        assert envelope.id is not None and envelope.method is not None
        self.open[envelope.id] = OpenRequest(envelope.id, number, stream, envelope.method, envelope.token)

    def settle(self, id: RequestId | None) -> OpenRequest | None:
        """Settle an open request; `None` if it is not open (already settled, or never asked)."""
        return None if id is None else self.open.pop(id, None)

    def note_client(self, envelope: Envelope) -> OpenRequest | None:
        """Note what a client message answers or cancels; the request it cancels, if any (L7)."""
        if envelope.kind is Kind.RESPONSE and envelope.id is not None:
            self.asked.pop(envelope.id, None)
        if envelope.method == "notifications/cancelled":
            return self.settle(envelope.target)
        return None

    def note_backend(self, envelope: Envelope, seq: int) -> None:
        """Note what a backend message asks of the client, or no longer asks."""
        if envelope.kind is Kind.REQUEST and envelope.id is not None:
            self.asked[envelope.id] = seq
        elif envelope.method == "notifications/cancelled" and envelope.target is not None:
            self.asked.pop(envelope.target, None)

    @property
    def working(self) -> bool:
        """Whether a request is in flight that awaits neither the client nor news (§8, session expiry).

        Which request a question belongs to is not always known: as many requests as there are
        open questions are taken to await the client.
        """
        busy = sum(1 for request in self.open.values() if request.method != LISTEN)
        return busy > len(self.asked)

    def copy(self) -> Inbox:
        """An independent copy."""
        other = Inbox()
        other.received, other.process = self.received, self.process
        other.confirm(self.durable, self.durable_process)
        other.open, other.asked, other.retired = dict(self.open), dict(self.asked), self.retired
        return other
