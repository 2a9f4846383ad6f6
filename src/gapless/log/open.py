"""Logs by URL. A store's driver is imported when a URL asks for it."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from gapless.errors import UsageError
from gapless.log.base import Log

__all__ = ["open_log"]

_ACCEPTED: Final = (
    "memory:, sqlite:///relative/name.db or sqlite:////absolute/name.db, with ?synchronous=normal if need be"
)


def open_log(url: str) -> Log:
    """The log a URL names. It is not started yet.

    Args:
        url: `memory:`; or `sqlite:///name.db` for a file relative to the working directory,
            `sqlite:////path/name.db` for an absolute one, either with `?synchronous=` and
            `full`, `normal` or `off`. Characters special to a URL are percent-encoded.

    Raises:
        UsageError: anything else.
    """
    if url == "memory:":
        from gapless.log.memory import MemoryLog

        return MemoryLog()
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _unknown(url) from None
    path = unquote(parts.path)[1:]
    if not url.startswith("sqlite:///") or not path or "\0" in path or parts.fragment:
        raise _unknown(url)
    if [name for name, _ in options] not in ([], ["synchronous"]):
        raise _unknown(url)
    from gapless.log.sqlite import SqliteLog

    return SqliteLog(path, synchronous=dict(options).get("synchronous", "full"))


def _unknown(url: str) -> UsageError:
    return UsageError(f"{url!r} names no log", hint=f"accepted: {_ACCEPTED}")
