"""Who may ask: Host, Origin and bearer token, before anything else (§8, §9; RFC 6750, RFC 9728)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from gapless.auth.base import ANONYMOUS, Denial, DeniedError, Principal, Verifier
from gapless.protocol.refusal import Reason, Refusal

__all__ = ["LOOPBACK", "METADATA", "Access", "Challenge"]

"""The principal where nobody is authenticated: then the token in the path is the only secret."""

METADATA: Final = "/.well-known/oauth-protected-resource"
"""Where the metadata of a protected resource is, its own path after it (RFC 9728 §3.1)."""

_BEARER: Final = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([A-Za-z0-9\-._~+/]{1,8192}=*)")

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Challenge:
    """Why somebody is not let in, and the `WWW-Authenticate` that says how to be."""

    refusal: Refusal
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Access:
    """Allow-lists against DNS rebinding and cross-site requests, and who knows bearer tokens.

    Attributes:
        hosts: host names that `Host` may carry, with or without a port; `*` allows any.
        origins: origins (`https://app.example`) that `Origin` may carry, `*` any. Requests
            without `Origin` do not come from a browser and are allowed. A loopback host name
            stands for its `http` and `https` origins at any port.
        verifier: knows whom a token stands for; without one everybody is anonymous.
        path: where the endpoints are mounted.
        public_url: that of the endpoints as clients know it; by default what their `Host` says.
    """

    hosts: Sequence[str] = LOOPBACK
    origins: Sequence[str] = LOOPBACK
    verifier: Verifier | None = None
    path: str = "/mcp"
    public_url: str | None = None

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

    async def principal(self, scope: Scope) -> Principal | Challenge:
        """Whose request this is. A token is taken from `Authorization` alone, never from a URL."""
        verifier = self.verifier
        if verifier is None:
            return ANONYMOUS
        given = Headers(scope=scope).getlist("authorization")
        if not given:
            return self._challenge(scope, verifier, "send a bearer token: Authorization: Bearer ...")
        bearer = _BEARER.fullmatch(given[0])
        if len(given) > 1 or bearer is None:
            return self._challenge(scope, verifier, "Authorization is not one bearer token", "invalid_token")
        try:
            return await verifier.verify(bearer[1])
        except DeniedError as denied:
            return self._challenge(scope, verifier, str(denied), denied.error)
        except OSError:  # why, is not for whoever asks
            return Challenge(Refusal(Reason.LIMIT, "the token cannot be verified now"), {})

    def _challenge(
        self, scope: Scope, verifier: Verifier, told: str, error: Denial | None = None
    ) -> Challenge:
        said: dict[str, str] = {}
        if error is not None:
            said |= {"error": error, "error_description": _quotable(told)}
        if verifier.issuers:
            said["resource_metadata"] = self._metadata_url(scope)
        if verifier.scopes:
            said["scope"] = " ".join(verifier.scopes)
        reason = Reason.INSUFFICIENT_SCOPE if error == "insufficient_scope" else Reason.UNAUTHENTICATED
        parts = ", ".join(f'{name}="{value}"' for name, value in said.items())
        return Challenge(Refusal(reason, told), {"WWW-Authenticate": f"Bearer {parts}".rstrip()})

    def resource(self, scope: Scope) -> str:
        """The URL of the endpoints, which is what tokens are for (RFC 8707)."""
        if self.public_url is not None:
            return self.public_url
        scheme = "https" if scope["scheme"] in ("https", "wss") else "http"
        host = Headers(scope=scope).get("host", "")
        return f"{scheme}://{host}{scope.get('root_path', '')}{self.path.rstrip('/')}"

    def _metadata_url(self, scope: Scope) -> str:
        parts = urlsplit(self.resource(scope))
        return f"{parts.scheme}://{parts.netloc}{METADATA}{parts.path}"

    def metadata(self, scope: Scope) -> dict[str, Any] | None:
        """What is published of the resource (RFC 9728); `None` if nobody gives out tokens for it."""
        verifier = self.verifier
        if verifier is None or not verifier.issuers:
            return None
        return {
            "resource": self.resource(scope),
            "authorization_servers": list(verifier.issuers),
            "bearer_methods_supported": ["header"],
            **({"scopes_supported": list(verifier.scopes)} if verifier.scopes else {}),
        }


def _quotable(text: str) -> str:
    """As RFC 6750 §3 has an error's description: printable ASCII, neither quotes nor backslashes."""
    return re.sub(r"[^\x20-\x21\x23-\x5b\x5d-\x7e]", "?", text)


def _allowed(host: str, names: Sequence[str]) -> bool:
    if "*" in names:
        return True
    names = [name.lower() for name in names]
    name, _, port = host.rpartition(":")
    bare = name if name and port.isdigit() and not host.endswith("]") else host
    return host.lower() in names or bare.lower() in names
