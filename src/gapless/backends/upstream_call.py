"""One request to an upstream server, and what an HTTP answer that is no event stream means for it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx2
import msgspec

from gapless.backends.upstream import Headway, shown
from gapless.errors import MalformedError
from gapless.protocol.jsonrpc import (
    Envelope,
    Kind,
    RequestId,
    error_response,
    one_line,
    outcome_unknown,
    peek,
)
from gapless.protocol.media import JSON, media_type
from gapless.protocol.revisions import STREAM_VIEW

__all__ = ["SERVER_ERROR", "Call", "refusal", "settled_version", "under"]

SERVER_ERROR: Final = -32000
_UNSUPPORTED_VERSION: Final = -32022
_OF_2026: Final = (-32020, -32022, -32601, -32602)
"""How a server of 2026-07-28 may refuse `initialize`: headers, version, method, or parameters."""
_UNREAD: Final = (400, 404, 405, 406)
"""How a server of earlier revisions may refuse 2026-07-28."""
_QUOTED: Final = 300


class Call:
    """A request that was sent, or is about to be.

    Attributes:
        modern: its 2026-07-28 headers; `None` if it is of an earlier revision.
        heard: set once the server has begun to answer, or will not.
        refused: the server has no session for it, and so has not taken it.
        cancelled: the client does not wait for it any more.
        task: what sends it and reads its answer.
    """

    __slots__ = ("cancelled", "data", "headway", "heard", "id", "method", "modern", "refused", "task")

    def __init__(self, data: bytes, envelope: Envelope, modern: dict[str, str] | None) -> None:
        assert envelope.id is not None
        self.id: RequestId = envelope.id
        self.method = envelope.method
        self.data = data
        self.modern = modern
        self.headway = Headway()
        self.heard = asyncio.Event()
        self.refused = False
        self.cancelled = False
        self.task: asyncio.Task[None]

    @property
    def initialize(self) -> bool:
        """Whether it opens a session."""
        return self.method == "initialize"

    def over(self) -> None:
        """Nothing more is sent of it, and nothing heard: whoever waits for that goes on."""
        self.headway.out.set()
        self.heard.set()


class _Error(msgspec.Struct):
    code: Any = SERVER_ERROR
    message: Any = ""
    data: Any = msgspec.UNSET


class _Refused(msgspec.Struct):
    error: _Error
    id: Any = None


class _Said(msgspec.Struct):
    protocolVersion: Any = None


class _Answer(msgspec.Struct):
    result: _Said | None = None


def settled_version(line: bytes) -> str | None:
    """The revision that an answer to `initialize` settles on, if it can be stated in a header."""
    try:
        result = msgspec.json.decode(line, type=_Answer).result
    except (msgspec.DecodeError, RecursionError):
        return None
    version = None if result is None else result.protocolVersion
    stated = isinstance(version, str) and version.isascii() and version.isprintable() and version.strip()
    return version if stated else None


def under(id: RequestId, line: bytes) -> bytes:
    """A response as one to the request `id`."""
    fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    fields["id"] = msgspec.Raw(msgspec.json.encode(id))
    return msgspec.json.encode(fields)


def refusal(name: str, call: Call, response: httpx2.Response, data: bytes) -> bytes:
    """The error that settles a call which was answered with a status, and with `data`, instead of a result.

    An error of the server's own passes, under the call's ID. Of anything else only the status does: it
    may be a proxy's page. From 500 on nobody knows whether the server has run it.
    """
    status = response.status_code
    said = f"{name} answered {status} {response.reason_phrase}".rstrip()
    refused = _refused(data) if media_type(response.headers) == JSON else None
    words = "" if refused is None else f": {str(refused.error.message)[:_QUOTED]}"
    if status in (401, 403):
        said += f"{words}; --upstream-header, or headers= in code, sets what it is sent"
    elif call.modern is not None and status in _UNREAD and (refused is None or refused.id != call.id):
        return _too_old(call, said + words)  # refused before anybody looked at what is in it
    elif refused is not None:
        if call.initialize and refused.error.code in _OF_2026:
            refused.error.message = f"{said} to initialize{words}; it may speak 2026-07-28 only"
        return msgspec.json.encode({"jsonrpc": "2.0", "id": call.id, "error": refused.error})
    elif 300 <= status < 400:
        said += f", to {shown(response.headers.get('location', ''))!r}; redirects are not followed"
    elif status == 200:
        said += f" with {media_type(response.headers) or 'no media type'!r}"
    if status >= 500:
        return outcome_unknown(call.id, said, status=status)
    return error_response(call.id, SERVER_ERROR, said, {"status": status})


def _refused(data: bytes) -> _Refused | None:
    """The JSON-RPC error in a body, if that is what it is."""
    try:
        line = one_line(data)
        return msgspec.json.decode(line, type=_Refused) if peek(line).kind is Kind.RESPONSE else None
    except (MalformedError, msgspec.DecodeError, RecursionError):
        return None


def _too_old(call: Call, said: str) -> bytes:
    """The error at which a client of both eras falls back to `initialize` (M7)."""
    assert call.modern is not None
    requested = call.modern["MCP-Protocol-Version"]
    text = f"{said}; it seems not to speak {requested}"
    data = {"supported": list(STREAM_VIEW), "requested": requested}
    return error_response(call.id, _UNSUPPORTED_VERSION, text, data)
