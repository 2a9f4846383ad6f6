"""The client's side of the inbox: numbering, keeping until received, resending (L6)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from gapless.protocol.block import encode_block
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId

__all__ = ["Kept", "Outgoing", "encode_messages"]


@dataclass(slots=True)
class Kept:
    """A numbered message, kept until the server states that it has it. Empty data: a placeholder."""

    number: int
    data: bytes
    request: RequestId | None
    answer: RequestId | None = None
    """The server's request that it answers."""


class Outgoing:
    """Messages on their way to the server, and the requests that wait for an answer.

    `received` is the highest number that the server is known to have; `sent` the highest one
    written to the connection in use, so that nothing is sent twice without cause.
    """

    __slots__ = ("_kept", "numbered", "posting", "received", "sent", "size", "waiting")

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self.numbered = received
        self.sent = received
        self.posting: int | None = None
        """The last number of the POST under way: one at a time."""
        self.waiting: dict[RequestId, int] = {}
        self.size = 0
        """Bytes of the messages that wait to be received by the server."""
        self._kept: deque[Kept] = deque()

    def add(self, data: bytes, envelope: Envelope) -> None:
        """Number a message and keep it."""
        self.numbered += 1
        request = envelope.id if envelope.kind is Kind.REQUEST else None
        if request is not None:
            self.waiting[request] = self.numbered
        elif envelope.method == "notifications/cancelled" and envelope.target is not None:
            self.waiting.pop(envelope.target, None)  # settled by its own cancellation (L7)
        answer = envelope.id if envelope.kind is Kind.RESPONSE else None
        self._kept.append(Kept(self.numbered, data, request, answer))
        self.size += len(data)

    def rebase(self, received: int) -> None:
        """A newcomer is told where to number from: what it kept so far follows `received` (L6)."""
        self.received = self.sent = self.numbered = received
        for kept in self._kept:
            self.numbered += 1
            kept.number = self.numbered
            if kept.request is not None and kept.request in self.waiting:
                self.waiting[kept.request] = kept.number

    @property
    def kept(self) -> int:
        """How many messages wait to be received by the server."""
        return len(self._kept)

    @property
    def answers(self) -> set[RequestId]:
        """The server's requests whose answers wait to be received by it."""
        return {kept.answer for kept in self._kept if kept.answer is not None}

    def settle(self, id: RequestId | None) -> bool:
        """A request got its answer; whether it was waiting for one."""
        return id is not None and self.waiting.pop(id, None) is not None

    def note_received(self, number: int) -> bool:
        """The server has everything up to `number`; whether that was news."""
        if number <= self.received or number > self.numbered:
            return False
        self.received = number
        self.sent = max(self.sent, number)
        while self._kept and self._kept[0].number <= number:
            self.size -= len(self._kept.popleft().data)
        return True

    def overtaken(self, received: int) -> bool:
        """Whether a message that is kept has a number that was received, from somebody else."""
        return bool(self._kept) and self._kept[0].number <= received

    def resend(self) -> None:
        """Send again from `received + 1`."""
        self.sent = self.received

    def hollow(self, number: int) -> Kept | None:
        """Make a message the server would not read a placeholder; what it was, if it was still kept (L6)."""
        for kept in self._kept:
            if kept.number == number:
                was = replace(kept)
                self.size -= len(kept.data)
                kept.data, kept.request, kept.answer = b"", None, None
                return was
        return None

    def due(self, limit: int | None) -> list[Kept]:
        """The messages to send next, in order: about `limit` bytes of them, but one at least, or all."""
        out: list[Kept] = []
        size = 0
        for kept in self._kept:
            if kept.number <= self.sent:
                continue
            if limit is not None and out and size + len(kept.data) > limit:
                break
            out.append(kept)
            size += len(kept.data)
        return out

    def copy(self) -> Outgoing:
        """An independent copy."""
        other = Outgoing()
        other.received, other.numbered, other.sent = self.received, self.numbered, self.sent
        other.posting, other.waiting, other.size = self.posting, dict(self.waiting), self.size
        other._kept = deque(map(replace, self._kept))
        return other


def encode_messages(messages: list[Kept]) -> bytes:
    """Blocks of numbered messages, for a frame or a body of several (W2, L6)."""
    return b"".join(encode_block("message", kept.data, str(kept.number)) for kept in messages)
