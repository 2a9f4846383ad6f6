"""Whether every request of an inbox is settled, exactly once (L7), as far as a log can tell.

A log keeps the inbox whole and the outbox above the floor, each in its own order, and does not keep
which of two entries of different boxes came first. Therefore requests and answers are counted,
under each ID, and not paired. Where a part of either box is not there, nothing is concluded from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec

from gapless.errors import MalformedError
from gapless.protocol.jsonrpc import Kind as Message
from gapless.protocol.jsonrpc import RequestId, peek
from gapless.torture.audit.findings import Findings, Kind

__all__ = ["Requests", "Settled"]

_REFUSED: Final = ("malformed", "too-large")


class _Data(msgspec.Struct):
    reason: Any = None


class _Error(msgspec.Struct):
    data: _Data | None = None


class _Answer(msgspec.Struct):
    error: _Error | None = None


_answer: Final = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Settled:
    """How many requests a session had, and what became of them."""

    requests: int = 0
    answered: int = 0
    outcome_unknown: int = 0
    cancelled: int = 0
    refused: int = 0
    open: int = 0
    unseen: int = 0
    """Whose settlement would be in what is evicted or lost."""


@dataclass(slots=True)
class _Request:
    number: int
    method: str
    cancelled: bool = False


class Requests:
    """Takes a session's inbox and its answers, in any order, and says what became of each request.

    It holds a few words for each request.

    Args:
        open: what the session's record says is open: IDs and message numbers.
    """

    def __init__(self, open: dict[RequestId, int], findings: Findings) -> None:
        self._open = open
        self._findings = findings
        self._received = 0
        self._lost = 0
        self._placeholders = 0
        self._requests: dict[RequestId, list[_Request]] = {}
        self._answers: dict[RequestId, list[int]] = {}
        self._refusals: dict[RequestId, list[int]] = {}
        self._settled = Settled()
        self._unseen: list[int] = []

    def sent(self, number: int, digest: bytes, data: bytes) -> None:
        """Take the next message of the inbox."""
        if number != self._received + 1:
            self._lack(self._received + 1, number - 1)
        self._received = number
        if not data:
            self._placeholders += 1  # of the client's, or a message that was refused (L6)
            return
        if sha256(data).digest()[: len(digest)] != digest:
            self._findings.add(Kind.REFORMATTED, number)
        try:
            envelope = peek(data)
        except MalformedError:
            self._findings.add(Kind.MESSAGES_UNREADABLE, number)
            self._lost += 1
            return
        if envelope.kind is Message.REQUEST and envelope.id is not None:
            request = _Request(number, envelope.method or "")
            self._requests.setdefault(envelope.id, []).append(request)
        elif envelope.method == "notifications/cancelled" and envelope.target in self._requests:
            self._requests[envelope.target][-1].cancelled = True

    def answered(self, seq: int, data: bytes) -> None:
        """Take an event; any but a response is passed over."""
        try:
            envelope = peek(data)
        except MalformedError:
            return
        if envelope.kind is not Message.RESPONSE or envelope.id is None:
            return
        reason = _reason(data) if b'"reason"' in data else None
        self._settled.outcome_unknown += reason == "outcome-unknown"
        kept = self._refusals if reason in _REFUSED else self._answers
        kept.setdefault(envelope.id, []).append(seq)

    def end(self, received: int, *, ended: bool, whole: bool) -> Settled:
        """There is no more. `received` is what the log has noted; `whole`, whether it has every event."""
        if self._received < received:
            self._lack(self._received + 1, received)
        elif self._received > received:
            self._findings.add(Kind.MESSAGES_ABOVE, received + 1, self._received)
        for id in {**self._requests, **self._answers, **self._refusals}:
            self._count(id, ended=ended, whole=whole and not self._lost)
        if self._unseen:
            self._settled.unseen = len(self._unseen)
            detail = f"{len(self._unseen)} requests" if len(self._unseen) > 1 else ""
            self._findings.add(Kind.SETTLED_UNSEEN, min(self._unseen), max(self._unseen), detail)
        return self._settled

    def _lack(self, first: int, last: int) -> None:
        self._findings.add(Kind.MESSAGES_MISSING, first, last)
        self._lost += last - first + 1

    def _count(self, id: RequestId, *, ended: bool, whole: bool) -> None:
        requests, answers = self._requests.get(id, []), self._answers.get(id, [])
        settled = self._settled
        settled.requests += len(requests)
        due = requests
        if requests and self._open.get(id) == requests[-1].number and not ended:
            due = requests[:-1]
            settled.open += 1
        # A message that was refused has left a placeholder, and its error has the ID of no request;
        # or a backend has words like ours for the error that settles one.
        refusals = self._refusals.get(id, [])
        spare = max(0, len(due) - len(answers) - sum(request.cancelled for request in due))
        answers, refusals = answers + refusals[:spare], refusals[spare:]
        settled.refused += len(refusals)
        self._placeholders -= len(refusals)
        if not self._lost:
            if refusals and self._placeholders < 0:
                self._findings.add(Kind.REQUEST_UNKNOWN, refusals[-1], detail=_name(id))
            for seq in answers[len(due) :]:
                kind = Kind.REQUEST_RESETTLED if requests else Kind.REQUEST_UNKNOWN
                self._findings.add(kind, seq, detail=_name(id))
        settled.answered += min(len(answers), len(due))
        self._miss(id, due, len(answers), whole)

    def _miss(self, id: RequestId, due: list[_Request], answers: int, whole: bool) -> None:
        """Requests without an answer: cancelled by the client, or it is not there."""
        unanswered = max(0, len(due) - answers)
        kept = [request for request in due if not request.cancelled]
        cancelled = min(unanswered, len(due) - len(kept))
        self._settled.cancelled += cancelled
        for request in kept[len(kept) - unanswered + cancelled :]:
            if whole:
                detail = f"{request.method}, {_name(id)}"
                self._findings.add(Kind.REQUEST_UNSETTLED, request.number, detail=detail)
            else:
                self._unseen.append(request.number)


def _reason(data: bytes) -> Any:
    """What an error's data says is its reason; `None` where it has none."""
    try:
        error = _answer.decode(data).error
    except msgspec.DecodeError:
        return None
    return None if error is None or error.data is None else error.data.reason


def _name(id: RequestId) -> str:
    return f"request {msgspec.json.encode(id).decode()}"
