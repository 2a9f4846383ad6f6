"""A peek at the JSON-RPC envelope: kind, ID, method, progress token. The payload stays raw bytes (W4).

msgspec lets invalid UTF-8, raw line ends and deep nesting through in places: all three are
checked here first, so that whatever passed `peek` is one line of valid UTF-8 JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final, cast

import msgspec

from gapless.errors import MalformedError

__all__ = [
    "Envelope",
    "Kind",
    "RequestId",
    "error_response",
    "one_line",
    "outcome_unknown",
    "peek",
    "peek_lines",
    "salvage",
]

RequestId = int | str
"""A JSON-RPC request ID; `1` and `"1"` are different (M6)."""


class Kind(Enum):
    """What a JSON-RPC message is."""

    REQUEST = "request"
    NOTIFICATION = "notification"
    RESPONSE = "response"


_NOTIFICATION: Final = Kind.NOTIFICATION


class Envelope(msgspec.Struct, frozen=True):
    """What routing and settling need to know of a message, and nothing else.

    `target` is the request that a notification speaks of: `params.requestId` of
    `notifications/cancelled`. `token` is the progress token: of a request the one it hands
    out (`params._meta.progressToken`), of `notifications/progress` the one it reports on.
    """

    kind: Kind
    id: RequestId | None = None
    method: str | None = None
    token: RequestId | None = None
    target: RequestId | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a notification that speaks of no request: nothing but its bytes matters."""
        return self.kind is _NOTIFICATION and self.method not in _SPEAK_OF


class _Meta(msgspec.Struct):
    progressToken: Any = None


class _Params(msgspec.Struct):
    meta: _Meta | None = msgspec.field(default=None, name="_meta")
    progressToken: Any = None
    requestId: Any = None


class _Message(msgspec.Struct, gc=False):
    jsonrpc: Any = None
    id: Any = msgspec.UNSET
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"")
    result: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


_LF: Final = 10
_CR: Final = 13
_SPEAK_OF: Final = frozenset(
    {"notifications/progress", "notifications/cancelled", "notifications/subscriptions/acknowledged"}
)
"""Notifications that speak of a request."""

_message: Final = msgspec.json.Decoder(_Message)
_params: Final = msgspec.json.Decoder(_Params)


def one_line(data: bytes) -> bytes:
    """The same JSON text without white space that breaks the line.

    Raises:
        MalformedError: not valid JSON.
    """
    data = data.strip(b" \t\r\n")
    if _LF not in data and _CR not in data:
        return data
    try:
        return msgspec.json.format(data, indent=-1)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from None


def peek(data: bytes) -> Envelope:
    """Read the envelope of one single-line JSON-RPC message.

    Raises:
        MalformedError: not one line of valid UTF-8 JSON (lone surrogates, NaN, raw controls,
            nesting too deep), not a single object, or no JSON-RPC 2.0 message; its `args[0]`
            says which. Batches are refused whole (W5).
    """
    if _LF in data or _CR in data:
        raise MalformedError("a JSON text holds a raw line end")
    try:
        data.decode()
    except UnicodeDecodeError:
        raise MalformedError("a JSON text is not UTF-8") from None
    return _peek(data)


def peek_lines(lines: Sequence[bytes]) -> Iterator[tuple[bytes, Envelope | MalformedError | None]]:
    """Read the envelopes of many messages: of each line the message as one line, and what `peek` says of it.

    `None` is said of white space. What can be checked of all of them together is, which is quick.
    """
    whole = b"\n".join(lines)
    try:
        whole.decode()
        sound = _CR not in whole
    except UnicodeDecodeError:
        sound = False
    for line in lines:
        envelope = _peek_or_none(line) if sound else None
        if envelope is not None:
            yield line, envelope
            continue
        try:
            message = one_line(line)
            yield message, peek(message) if message else None
        except MalformedError as error:
            yield line, error


def _peek_or_none(line: bytes) -> Envelope | None:
    try:
        return _peek(line)
    except MalformedError:
        return None


def _peek(data: bytes) -> Envelope:
    """The same of a single line of UTF-8."""
    try:
        message = _message.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"not a JSON-RPC message: {error}") from None
    if message.jsonrpc != "2.0":
        raise MalformedError('not a JSON-RPC message: "jsonrpc" is not "2.0"')
    method = message.method
    if method is None:
        return _response(message)
    if message.result or message.error:  # to some readers it is a response, and then nobody answers it
        raise MalformedError("a JSON-RPC message with a method, and a result or an error")
    if message.id is msgspec.UNSET:
        if method not in _SPEAK_OF:
            return Envelope(_NOTIFICATION, None, method)
        params = _peek_params(message.params)
        return Envelope(
            Kind.NOTIFICATION,
            method=method,
            token=_id_or_none(params.progressToken),
            target=_id_or_none(params.requestId),
        )
    params = _peek_params(message.params)
    return Envelope(
        Kind.REQUEST,
        id=_id(message.id),
        method=method,
        token=_id_or_none(params.meta.progressToken) if params.meta else None,
    )


def _response(message: _Message) -> Envelope:
    if not message.result and not message.error:
        raise MalformedError("a JSON-RPC message without method, result or error")
    if message.id is None or message.id is msgspec.UNSET:
        return Envelope(Kind.RESPONSE)
    return Envelope(Kind.RESPONSE, id=_id(message.id))


def _peek_params(raw: msgspec.Raw) -> _Params:
    data = bytes(raw)
    if not data.startswith(b"{"):
        return _Params()
    try:
        return _params.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return _Params()


def _id(value: Any) -> RequestId:
    found = _id_or_none(value)
    if found is None:
        raise MalformedError("a JSON-RPC ID is neither a string nor an integer of 64 bits")
    return found


def _id_or_none(value: Any) -> RequestId | None:
    if isinstance(value, str):
        return value
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and -(2**63) <= value < 2**63 else None


def salvage(data: bytes) -> Envelope | None:
    """The envelope of a request that `peek` refuses, if its ID can be read all the same (L6).

    `None` for whatever is no single object with a method and an ID: then nobody waits for it.
    """
    try:
        found: Any = json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    message = cast("dict[str, Any]", found)
    id, method = _id_or_none(message.get("id")), message.get("method")
    if id is None or not isinstance(method, str):
        return None
    if isinstance(id, str):
        id = id.encode(errors="replace").decode()
    return Envelope(Kind.REQUEST, id=id, method=method)


def error_response(
    id: RequestId | None, code: int, message: str, data: dict[str, Any] | None = None
) -> bytes:
    """One line of JSON: a JSON-RPC error under `id`."""
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error})


def outcome_unknown(id: RequestId | None, why: str, **about: Any) -> bytes:
    """The error that settles a request which may have run, and which nobody will answer (L7)."""
    told = f"{why}; the outcome is unknown"
    return error_response(id, -32000, told, {"reason": "outcome-unknown", **about})
