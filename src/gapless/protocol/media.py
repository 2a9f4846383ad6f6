"""The media types of bodies, for either side of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["JSON", "STREAM", "media_type"]

JSON: Final = "application/json"
STREAM: Final = "text/event-stream"


def media_type(headers: Mapping[str, str]) -> str:
    """What `Content-Type` names, without parameters, in lower case; empty if there is none.

    `headers` are those of an HTTP library: found by a name in lower case, however it was sent.
    """
    return headers.get("content-type", "").partition(";")[0].strip().lower()
