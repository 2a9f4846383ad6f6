"""What differs per MCP revision, and nothing else."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gapless.protocol.jsonrpc import RequestId

__all__ = ["STREAM_VIEW", "primes", "requested_revision", "unsupported_version"]

STREAM_VIEW: Final = ("2025-03-26", "2025-06-18", "2025-11-25")
"""The revisions whose Streamable HTTP the stream view speaks, oldest first (§7)."""

_PRIMED_SINCE: Final = "2025-11-25"
_UNSUPPORTED: Final = -32022


def primes(revision: str | None) -> bool:
    """Whether a client of this revision expects priming blocks (M5). Revisions are dates, and sort so."""
    return revision is not None and revision >= _PRIMED_SINCE


class _Params(msgspec.Struct):
    protocolVersion: Any = None


class _Initialize(msgspec.Struct):
    params: _Params | None = None


def requested_revision(initialize: bytes) -> str | None:
    """The revision that an `initialize` request asks for; `None` if it names none."""
    try:
        params = msgspec.json.decode(initialize, type=_Initialize).params
    except msgspec.DecodeError:
        return None
    version = params.protocolVersion if params is not None else None
    return version if isinstance(version, str) else None


def unsupported_version(id: RequestId | None, requested: str) -> bytes:
    """The error that makes a dual-era client fall back to `initialize` (M7)."""
    data = {"supported": list(STREAM_VIEW), "requested": requested}
    text = f"protocol version {requested} is not spoken on this endpoint"
    error = {"code": _UNSUPPORTED, "message": text, "data": data}
    return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error})
