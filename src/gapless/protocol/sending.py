"""The client's sender: when a message is sent, how, and what a refusal of it means (L6, W5)."""

from __future__ import annotations

from typing import Any, Final

from gapless.errors import ConnectionGaveUpError, GaplessError, RefusedError, SessionEndedError, UsageError
from gapless.protocol.jsonrpc import Envelope, Kind, RequestId, error_response
from gapless.protocol.moves import Effect, Failed, Post, Refused, Send, Settle, Submit
from gapless.protocol.outgoing import Outgoing, encode_messages
from gapless.protocol.phases import Retry
from gapless.protocol.refusal import ENDED, Action, Reason, Refusal, read_refusal_error

__all__ = ["Sending", "StopFollowingError", "for_good"]

_BATCH: Final = 64 * 1024
"""Bytes of messages in one POST, one message above that apart."""


class StopFollowingError(Exception):
    """Ends the client: `error` says why, `live` whether the session may be deleted (L7)."""

    def __init__(self, error: GaplessError | None, *, live: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.live = live


def for_good(refusal: Refusal) -> StopFollowingError:
    """A refusal as an explicit end. Who was told that another holds the session does not delete it."""
    kind = SessionEndedError if refusal.row.action is Action.NEW_SESSION else RefusedError
    taken = refusal.reason in (Reason.MESSAGE_CONFLICT, Reason.WEBSOCKET_BOUND)
    error = kind(refusal.message, code=refusal.reason)
    return StopFollowingError(error, live=refusal.reason not in ENDED and not taken)


class Sending:
    """Sends what `outgoing` keeps: as frames on a socket, else in one POST at a time (L6).

    `told` is the first `received` that this process was told; nothing is sent before. Methods
    raise `StopFollowingError` where the client has to end.
    """

    def __init__(self, retry: Retry, process: str) -> None:
        self.outgoing = Outgoing()
        self.process = process
        self.told: int | None = None
        self.limit: int | None = None
        """The most bytes of one message, as the server advertised it."""
        self.attempt: int | None = None
        """The POST under way; below zero, so that it is never taken for a connection's attempt."""
        self.wake: float | None = None
        self._retry = retry
        self._failures = 0
        self._posts = 0
        self._several = False
        self._raced = False
        self._singly = False
        self._posted_on = 0
        self._answered: frozenset[RequestId] = frozenset()

    def submit(self, input: Submit) -> list[Effect]:
        """Number and keep a message; one above the limit is refused here (W5).

        In place of an answer goes an error under its ID, or the server would wait for it for ever (L7).

        Raises:
            UsageError: a request with this ID is in flight; nothing changed.
        """
        envelope = input.envelope
        if envelope.kind is Kind.REQUEST and envelope.id in self.outgoing.waiting:
            raise UsageError(f"a request with ID {envelope.id!r} is in flight")
        if self.limit is None or len(input.data) <= self.limit:
            self.outgoing.add(input.data, envelope)
            return []
        text = f"a message of {len(input.data)} bytes is above the server's limit of {self.limit}"
        about = {"reason": Reason.TOO_LARGE.value}
        if envelope.id is None or envelope.kind is Kind.NOTIFICATION:
            return []
        if envelope.kind is Kind.REQUEST:
            return [Settle(envelope.id, -32000, text, about)]
        answer = error_response(envelope.id, -32603, text, about)
        self.outgoing.add(answer, Envelope(Kind.RESPONSE, id=envelope.id))
        return []

    def flush(self, socket: int | None, connection: int) -> list[Effect]:
        """Send what is due: on `socket`, or in a POST made while `connection` was the latest attempt."""
        if self.told is None:
            return []
        if socket is not None:
            due = self.outgoing.due(None)
            if due:
                self.outgoing.sent = due[-1].number
                self._raced = True
            return [Send(socket, encode_messages([kept])) for kept in due]
        due = self.outgoing.due(0 if self._singly else self.limit or _BATCH)
        if not due or self.outgoing.posting is not None or self.wake is not None:
            return []
        self._posts += 1
        self.attempt, self._posted_on = -self._posts, connection
        self._several, self._raced = len(due) > 1, False
        self.outgoing.posting = self.outgoing.sent = due[-1].number
        return [Post(self.attempt, tuple(due))]

    def abandon(self, connection: int) -> None:
        """A POST made before `connection` may hang in one that died: its answer is not waited for."""
        if self.outgoing.posting is not None and self._posted_on < connection:
            self.outgoing.posting = self.attempt = None

    def state(self, received: Any, process: Any) -> bool:
        """A statement of `received` from which to resend; whether it was news (L6)."""
        if self.told is None and isinstance(received, int):
            self.told = received
            self.outgoing.rebase(received)
        news = self.note(received, process)
        self.outgoing.resend()
        return news

    def note(self, received: Any, process: Any = None) -> bool:
        """The server has everything up to `received`, from the process it names; whether that was news.

        If that is another process, and what we keep is under numbers it has used, ours was not
        received and never will be under them: that is a conflict, be its refusal lost or late.
        """
        if not isinstance(received, int):
            return False
        if isinstance(process, str) and self.process and process != self.process:
            if self.outgoing.overtaken(received):
                text = "another client process sends on this session"
                raise for_good(Refusal(Reason.MESSAGE_CONFLICT, text, received=received))
            return False
        return self.outgoing.note_received(received)

    def answered(self, received: int) -> bool:
        """The POST under way was answered; whether that was news."""
        self.outgoing.posting = None
        self._failures = 0
        news = self.note(received)
        if not self._raced:  # what went over a socket since is on its way
            self.outgoing.resend()
        self._singly = self._singly and self.outgoing.kept > 0
        return news

    def refused(self, input: Refused | Failed, now: float) -> list[Effect]:
        """The POST under way was refused, or got no answer."""
        self.outgoing.posting = None
        self.outgoing.resend()
        if isinstance(input, Failed) or (input.refusal is None and input.status != 413):
            self._later(None, now)  # nobody's answer: the same again, which is harmless (L6)
            return []
        refusal = input.refusal or Refusal(Reason.TOO_LARGE, "the message is larger than the server takes")
        had = self.outgoing.received
        told = had if refusal.received is None else refusal.received
        effects: list[Effect] = []
        match refusal.reason:
            case Reason.TOO_LARGE if self._raced and told <= had:
                pass  # it went over a socket since, and may have been taken there: that will tell
            case Reason.TOO_LARGE if self._several:
                self._singly = True  # the body was too large, or one of its messages: one by one tells
            case Reason.TOO_LARGE:
                # Read whole it used its number, else a placeholder takes it: it is never sent again.
                effects = self._fail(told if told > had else had + 1, refusal)
            case Reason.MALFORMED | Reason.DUPLICATE_ID if told > had:
                effects = self._fail(told, refusal)
            case _:
                if refusal.row.action not in (Action.RESEND, Action.RETRY):
                    raise for_good(refusal)
        if self.note(told) or effects:
            self._failures = 0  # a number was used up: that is no standstill
        self._later(input.retry_after if refusal.row.action is Action.RETRY else 0.0, now)
        return effects

    def told_refused(self, body: dict[str, Any]) -> list[Effect]:
        """`refused`: a message's number is used and its request fails, or another took over (L6)."""
        refusal, number = read_refusal_error(body.get("error")), body.get("n")
        if refusal is None or not isinstance(number, int):
            return []
        if refusal.reason is Reason.MESSAGE_CONFLICT:
            raise for_good(refusal)
        return self._fail(number, refusal)

    def wants(self, id: RequestId) -> bool:
        """Whether the application waits for the answer under this ID; it is settled by it."""
        if id in self._answered:
            self._answered -= {id}
            return False
        self.outgoing.settle(id)
        return True

    def _fail(self, number: int, refusal: Refusal) -> list[Effect]:
        """A message is refused under its number: its request fails, whichever word comes first (L6)."""
        was = self.outgoing.hollow(number)
        if was is None or was.request is None or not self.outgoing.settle(was.request):
            return []
        self._answered |= {was.request}
        return [Settle(was.request, -32000, refusal.message, {"reason": refusal.reason.value})]

    def _later(self, delay: float | None, now: float) -> None:
        self._failures += 1
        if self._failures > self._retry.attempts:
            raise StopFollowingError(ConnectionGaveUpError("messages could not be sent"))
        self.wake = now + (self._retry.delay(self._failures) if delay is None else delay)

    def copy(self) -> Sending:
        """An independent copy."""
        other = object.__new__(Sending)
        other.__dict__.update(self.__dict__)
        other.outgoing = self.outgoing.copy()
        return other
