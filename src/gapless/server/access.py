"""Who may ask: Host, Origin and principal, before anything else (§8, §9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from gapless.protocol.refusal import Reason, Refusal

__all__ = ["ANONYMOUS", "LOOPBACK", "Access"]

ANONYMOUS: Final = "anonymous"
"""The principal where nobody is authenticated: then the token in the path is the only secret."""

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Access:
    """Allow-lists against DNS rebinding and cross-site requests.

    Attributes:
        hosts: host names that `Host` may carry, with or without a port; `*` allows any.
        origins: origins (`https://app.example`) that `Origin` may carry, `*` any. Requests
            without `Origin` do not come from a browser and are allowed. A loopback host name
            stands for its `http` and `https` origins at any port.
    """

    hosts: Sequence[str] = LOOPBACK
    origins: Sequence[str] = LOOPBACK

    def check(self, headers: Headers) -> Refusal | None:
        """The refusal of a request by its Host or Origin, in that order."""
        host = headers.get("host", "")
        if not _allowed(host, self.hosts):
            return Refusal(Reason.HOST_FORBIDDEN, f"Host {host[:100]!r} is not allowed; set allowed_hosts")
        origin = headers.get("origin")
        if origin is not None and not self._origin_allowed(origin):
            return Refusal(
                Reason.ORIGIN_FORBIDDEN, f"Origin {origin[:100]!r} is not allowed; set allowed_origins"
            )
        return None

    def _origin_allowed(self, origin: str) -> bool:
        if "*" in self.origins or origin in self.origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and _allowed(
            parts.netloc, [name for name in self.origins if "://" not in name]
        )

    def principal(self, headers: Headers) -> str:
        """Whose request this is."""
        return ANONYMOUS


def _allowed(host: str, names: Sequence[str]) -> bool:
    if "*" in names:
        return True
    names = [name.lower() for name in names]
    name, _, port = host.rpartition(":")
    bare = name if name and port.isdigit() and not host.endswith("]") else host
    return host.lower() in names or bare.lower() in names
