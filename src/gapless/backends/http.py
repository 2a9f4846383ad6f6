"""MCP servers over Streamable HTTP, upstream: a session there for each session here, or none in 2026-07-28.

A client of an earlier revision gets an upstream session, one of 2026-07-28 plain requests: its messages
say which it is, and the upstream server whether it speaks that. A session that the upstream server has
forgotten (404) is one backend that is lost: the next one shakes hands anew, and the client goes on.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from typing import Final

from gapless.backends.base import Backend, Sink
from gapless.backends.modern import Modern
from gapless.backends.upstream import Upstream, checked_headers, checked_url
from gapless.backends.upstream_session import UpstreamSession
from gapless.errors import BackendError

__all__ = ["HttpBackends"]

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""The default limit on a server's message: 4 MiB."""

_log: Final = logging.getLogger("gapless.backends.http")


class HttpBackends:
    """Opens sessions on the MCP server at `url`.

    Args:
        url: its endpoint, http(s). What is in its query is shown nowhere.
        headers: sent with every request. Their values are shown nowhere.
        max_message_bytes: what one of its messages may have. A longer one is never held in memory:
            an error takes its place (W5).
        log: told, as warnings, what was dropped.

    Raises:
        UsageError: `url` is none, or holds a password; or a header is none, or one that the transport sets.
    """

    spawns = False

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        log: logging.Logger = _log,
    ) -> None:
        self._url = checked_url(url)
        self._headers = checked_headers(headers or {})
        self._limit = max_message_bytes
        self._log = log
        self._modern = Modern()
        # One for all sessions, for it takes its time; where nothing is to be verified, an empty one.
        secure = self._url.startswith("https:")
        self._tls = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def start(self) -> None:
        """Do nothing: what all sessions share needs no start."""

    async def open(self, sink: Sink) -> Backend:
        """Make ready for a session. The server hears of it with the first message.

        Raises:
            BackendError: the environment names a proxy that cannot be used.
        """
        try:
            upstream = Upstream(self._url, self._headers, self._tls)
        except (ImportError, ValueError) as error:
            raise BackendError(f"the environment names an unusable proxy: {error}") from None
        return UpstreamSession(upstream, sink, self._modern, self._limit, self._log)

    async def close(self) -> None:
        """Do nothing: sessions have closed what was theirs."""
