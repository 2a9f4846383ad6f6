"""The refusals of §8: one table, read by the server that refuses and by the client that reacts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, cast

import msgspec

__all__ = [
    "CLOSE_ACK_WINDOW",
    "CLOSE_EVICTED",
    "CLOSE_FENCED",
    "CLOSE_GOING_AWAY",
    "CLOSE_MALFORMED",
    "CLOSE_NORMAL",
    "CLOSE_OVER",
    "CLOSE_RESTART",
    "CLOSE_UNAUTHENTICATED",
    "CLOSE_UNSUPPORTED_DATA",
    "ENDED",
    "Action",
    "Reason",
    "Refusal",
    "Row",
    "read_refusal",
    "read_refusal_error",
]


class Reason(StrEnum):
    """Why the server refused, in the word that goes over the wire."""

    HOST_FORBIDDEN = "host-forbidden"
    ORIGIN_FORBIDDEN = "origin-forbidden"
    MALFORMED = "malformed"
    UNAUTHENTICATED = "unauthenticated"
    INSUFFICIENT_SCOPE = "insufficient-scope"
    SESSION_UNKNOWN = "session-unknown"
    SESSION_SUPERSEDED = "session-superseded"
    SESSION_EXPIRED = "session-expired"
    SESSION_ENDED = "session-ended"
    BACKEND_LOST = "backend-lost"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    NOT_ACCEPTABLE = "not-acceptable"
    UNSUPPORTED_MEDIA_TYPE = "unsupported-media-type"
    WRONG_VIEW = "wrong-view"
    DUPLICATE_ID = "duplicate-id"
    CURSOR_EVICTED = "cursor-evicted"
    CURSOR_AHEAD = "cursor-ahead"
    CURSOR_FOREIGN = "cursor-foreign"
    WEBSOCKET_BOUND = "websocket-bound"
    TICKET_SPENT = "ticket-spent"
    MESSAGE_GAP = "message-gap"
    MESSAGE_CONFLICT = "message-conflict"
    UPGRADE_UNAVAILABLE = "upgrade-unavailable"
    TOO_LARGE = "too-large"
    URL_TOO_LONG = "url-too-long"
    HEADERS_TOO_LARGE = "headers-too-large"
    REQUEST_TIMEOUT = "request-timeout"
    LIMIT = "limit"
    STORAGE = "storage"


class Action(StrEnum):
    """What the client does next; one action for each refusal (§8)."""

    FAIL = "fail"
    """Fail loudly: the request cannot succeed."""
    REAUTHENTICATE = "reauthenticate"
    """Refresh the token, once per expiry."""
    NEW_SESSION = "open-new-session"
    """The session is over for this client: settle what is open (L7), open another."""
    RETRY = "retry"
    """The same again after a backoff, a bounded number of times."""
    RESUME = "resume"
    """Resume the event stream from one's own cursor."""
    RESEND = "resend"
    """Send again from `received + 1`."""
    CLOSE_DOOR = "close-door"
    """The door cannot be passed at this URL (U6)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: HTTP status, WebSocket close code, and what the client does."""

    status: int
    close: int | None
    action: Action

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.action in (Action.RETRY, Action.REAUTHENTICATE, Action.RESEND)


_TABLE: Final[dict[Reason, Row]] = {
    Reason.HOST_FORBIDDEN: Row(421, None, Action.FAIL),
    Reason.ORIGIN_FORBIDDEN: Row(403, None, Action.FAIL),
    Reason.MALFORMED: Row(400, 4400, Action.FAIL),
    Reason.UNAUTHENTICATED: Row(401, 4401, Action.REAUTHENTICATE),
    Reason.INSUFFICIENT_SCOPE: Row(403, 4403, Action.FAIL),
    Reason.SESSION_UNKNOWN: Row(404, 4404, Action.NEW_SESSION),
    Reason.SESSION_SUPERSEDED: Row(404, 4404, Action.NEW_SESSION),
    Reason.SESSION_EXPIRED: Row(404, 4404, Action.NEW_SESSION),
    Reason.SESSION_ENDED: Row(404, 4404, Action.NEW_SESSION),
    Reason.BACKEND_LOST: Row(404, 4404, Action.NEW_SESSION),
    Reason.NOT_FOUND: Row(404, None, Action.FAIL),
    Reason.METHOD_NOT_ALLOWED: Row(405, None, Action.FAIL),
    Reason.NOT_ACCEPTABLE: Row(406, None, Action.FAIL),
    Reason.UNSUPPORTED_MEDIA_TYPE: Row(415, None, Action.FAIL),
    Reason.WRONG_VIEW: Row(409, None, Action.FAIL),
    Reason.DUPLICATE_ID: Row(409, None, Action.FAIL),
    Reason.CURSOR_EVICTED: Row(409, 4409, Action.NEW_SESSION),
    Reason.CURSOR_AHEAD: Row(409, 4409, Action.NEW_SESSION),
    Reason.CURSOR_FOREIGN: Row(409, 4409, Action.NEW_SESSION),
    Reason.WEBSOCKET_BOUND: Row(409, 4409, Action.RETRY),
    Reason.TICKET_SPENT: Row(409, 4409, Action.RESUME),
    Reason.MESSAGE_GAP: Row(409, None, Action.RESEND),
    Reason.MESSAGE_CONFLICT: Row(409, None, Action.FAIL),
    Reason.UPGRADE_UNAVAILABLE: Row(426, None, Action.CLOSE_DOOR),
    Reason.TOO_LARGE: Row(413, 1009, Action.FAIL),
    Reason.URL_TOO_LONG: Row(414, None, Action.FAIL),
    Reason.HEADERS_TOO_LARGE: Row(431, None, Action.FAIL),
    Reason.REQUEST_TIMEOUT: Row(408, None, Action.RETRY),
    Reason.LIMIT: Row(503, 1013, Action.RETRY),
    Reason.STORAGE: Row(503, 1013, Action.RETRY),
}

ENDED: Final = frozenset(
    {
        Reason.SESSION_UNKNOWN,
        Reason.SESSION_SUPERSEDED,
        Reason.SESSION_EXPIRED,
        Reason.SESSION_ENDED,
        Reason.BACKEND_LOST,
    }
)
"""The reasons of a session that is no more; all 404 (B4)."""

CLOSE_NORMAL: Final = 1000
CLOSE_MALFORMED: Final = 4400
CLOSE_UNAUTHENTICATED: Final = 4401
CLOSE_OVER: Final = 4404
CLOSE_EVICTED: Final = 4409
CLOSE_GOING_AWAY: Final = 1001
CLOSE_RESTART: Final = 1012
CLOSE_UNSUPPORTED_DATA: Final = 1003
CLOSE_ACK_WINDOW: Final = 4408
CLOSE_FENCED: Final = 4410

_CODE: Final = -32000


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal, on its way to a response, a denial or a close.

    `committed`, `floor` and `received` describe the server and are bare integers (C2). `own` says of a
    `limit` that it is the client's own share that is used up, which is 429.
    """

    reason: Reason
    message: str
    committed: int | None = None
    floor: int | None = None
    received: int | None = None
    own: bool = False

    @property
    def status(self) -> int:
        """The status of the response that says so."""
        return 429 if self.own else self.row.status

    @property
    def row(self) -> Row:
        """The table's row for this reason."""
        return _TABLE[self.reason]

    def error(self) -> dict[str, Any]:
        """The JSON-RPC error object of §8."""
        data: dict[str, Any] = {"reason": self.reason.value}
        if self.committed is not None:
            data["resume-cursor"] = self.committed
        if self.floor is not None:
            data["floor"] = self.floor
        if self.received is not None:
            data["received"] = self.received
        data["retryable"] = self.row.retryable
        data["action"] = self.row.action.value
        return {"code": _CODE, "message": self.message, "data": data}

    def body(self, id: int | str | None = None) -> bytes:
        """The refusal as a response body: an error, of the request of that ID if there is one."""
        return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": self.error()})


def read_refusal(body: bytes) -> Refusal | None:
    """Read a refusal from a response body; `None` if it is not one of ours (a proxy's page, say)."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return read_refusal_error(_get(found, "error"))


def read_refusal_error(error: Any) -> Refusal | None:
    """Read a refusal from its JSON-RPC error object, as `refused` blocks hold it."""
    data = _get(error, "data")
    word, message = _get(data, "reason"), _get(error, "message")
    try:
        reason = Reason(word)
    except ValueError:
        return None
    return Refusal(
        reason,
        message if isinstance(message, str) else reason.value,
        _integer(_get(data, "resume-cursor")),
        _integer(_get(data, "floor")),
        _integer(_get(data, "received")),
    )


def _get(value: Any, key: str) -> Any:
    return cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
