"""Access tokens that are JWTs, by the keys of who issues them (RFC 9068, RFC 7517)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httpx2
import jwt
import msgspec

from gapless.auth.base import DeniedError, Principal, Verifier
from gapless.errors import GaplessError, UsageError

__all__ = ["ALGORITHMS", "JwtVerifier"]

_log: Final = logging.getLogger("gapless.auth")

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
"""Signatures by a key pair: none that a server which verifies could make as well."""
_LEEWAY: Final = 30.0
"""Seconds that clocks may differ by."""
_AGAIN: Final = 30.0
"""Seconds between two requests for the keys, however many tokens name a key that is not known."""
_FRESH: Final = 300.0
"""Seconds after which keys are looked at anew, while those that are known are believed still."""
_OLD: Final = 600.0
"""Seconds after which they are looked at anew first: no key that was withdrawn is believed for longer."""
_GONE: Final = 3600.0
"""Seconds that keys are believed for while their issuer does not answer."""
_MOST: Final = 256 * 1024
_TIMEOUT: Final = 10.0
_METADATA: Final = ("oauth-authorization-server", "openid-configuration")


class JwtVerifier(Verifier):
    """Believes the JWTs that one issuer has signed for this server.

    Checked are the signature, by one of `algorithms`, `iss`, `aud`, `exp`, and `nbf` and `iat` where they
    are there; clocks may differ by 30 s. The principal is `sub`, under the issuer. Scopes are read from
    `scope` (RFC 9068), else from `scp`.

    Keys that the issuer has withdrawn are believed for 10 min at most, or for an hour while it does not
    answer. There is no other revocation: a token is good until it expires.
    """

    def __init__(
        self,
        issuer: str,
        audience: str,
        *,
        jwks: str | None = None,
        scopes: Sequence[str] = (),
        algorithms: Sequence[str] = ALGORITHMS,
    ) -> None:
        """
        Args:
            issuer: the URL that `iss` has to be.
            audience: what `aud` has to name: this server, by the URL that clients use (RFC 8707).
            jwks: the URL of the issuer's keys; by default its metadata names it (RFC 8414, or OpenID's).
            scopes: what a token has to grant.
            algorithms: the signatures that are believed.

        Raises:
            UsageError: a URL is not https (http is for loopback), or an algorithm needs a shared secret.
        """
        for url in (issuer, jwks):
            if url is not None and not _safe(url):
                raise UsageError(f"{url} is no https URL", hint="only a server on this machine may be http")
        unknown = [name for name in algorithms if name not in ALGORITHMS]
        if unknown or not algorithms:
            raise UsageError(f"no algorithm {', '.join(unknown)}", hint=f"known are {', '.join(ALGORITHMS)}")
        self.issuers = (issuer,)
        self.scopes = tuple(scopes)
        self._issuer, self._audience, self._jwks = issuer, audience, jwks
        self._algorithms = list(algorithms)
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._asked = self._got = -_GONE
        """When the keys were asked for last, and when they were had (s, monotonic)."""
        self._fetching = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._client: httpx2.AsyncClient | None = None

    async def start(self) -> None:
        """Fetch the keys.

        Raises:
            GaplessError: they cannot be had.
        """
        self._client = httpx2.AsyncClient(timeout=_TIMEOUT, headers={"Accept": "application/json"})
        try:
            await self._fetch()
        except OSError as error:
            await self.close()
            raise GaplessError(str(error), hint="--jwt-jwks names the URL of the issuer's keys") from None

    async def close(self) -> None:
        """Close the connections to the issuer."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
        if self._client is not None:
            await self._client.aclose()

    async def verify(self, token: str) -> Principal:
        """Whom a JWT stands for."""
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise DeniedError("this is no JWT") from None
        if header.get("alg") not in self._algorithms:
            raise DeniedError("this JWT's algorithm is not one that is believed")
        key = await self._key(header.get("kid"))
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=self._algorithms,
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY,
                options={"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise DeniedError(_why(error)) from None
        except (TypeError, ValueError):
            raise DeniedError("this JWT's key does not fit its algorithm") from None
        missing = [scope for scope in self.scopes if scope not in _granted(claims)]
        if missing:
            raise DeniedError(f"the token does not grant {' '.join(missing)}", "insufficient_scope")
        return Principal(f"{self._issuer} {claims['sub']}", float(claims["exp"]) + _LEEWAY)

    async def _key(self, id: str | None) -> jwt.PyJWK:
        """The key of that ID; without one, the only key there is.

        One that is known waits for nobody who asks for one that is not.

        Raises:
            DeniedError: there is none. OSError: the issuer cannot be asked.
        """
        age = time.monotonic() - self._got
        if id not in self._keys or age >= _OLD:
            await self._refresh(id)
        elif age >= _FRESH and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh(id))
        key = self._keys.get(id)
        if key is None:
            raise DeniedError("this JWT was signed by no key of the issuer")
        if time.monotonic() - self._got >= _GONE:
            raise OSError("the issuer does not answer, and its keys are too old to be believed")
        return key

    async def _refresh(self, id: str | None) -> None:
        """Look at the keys anew, unless somebody just did.

        Raises:
            OSError: it cannot be asked, and the key of that ID is not known.
        """
        async with self._fetching:
            if time.monotonic() < self._asked + _AGAIN:
                return
            try:
                await self._fetch()
            except OSError as error:
                _log.warning("the issuer's keys cannot be had: %s", error)
                if id not in self._keys:
                    raise

    async def _fetch(self) -> None:
        """Get the keys anew.

        Raises:
            OSError: they cannot be had.
        """
        self._asked = time.monotonic()
        url = self._jwks or await self._discover()
        try:
            found = jwt.PyJWKSet.from_dict(await self._get(url)).keys
        except (jwt.PyJWTError, KeyError, TypeError, ValueError) as error:
            raise OSError(f"{url} holds no keys: {error}") from None
        keys = {key.key_id: key for key in found if key.public_key_use in (None, "sig")}
        self._keys = {**keys, None: found[0]} if len(found) == 1 else keys
        self._got = time.monotonic()

    async def _discover(self) -> str:
        """The URL of the keys, by the issuer's metadata."""
        parts = urlsplit(self._issuer)
        path = parts.path.rstrip("/")
        tried = [f"{parts.scheme}://{parts.netloc}/.well-known/{name}{path}" for name in _METADATA]
        tried.append(f"{self._issuer.rstrip('/')}/.well-known/{_METADATA[1]}")
        told = ""
        for url in tried:
            try:
                metadata = await self._get(url)
            except OSError as error:
                told = str(error)
                continue
            named = metadata.get("jwks_uri")
            if metadata.get("issuer") == self._issuer and isinstance(named, str) and _safe(named):
                return named
            told = f"{url} is not the metadata of {self._issuer}"
        raise OSError(told)

    async def _get(self, url: str) -> dict[str, Any]:
        assert self._client is not None
        try:
            async with self._client.stream("GET", url) as response:
                data = b""
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > _MOST:
                        raise OSError(f"{url} answered more than {_MOST} bytes")
        except httpx2.HTTPError as error:
            raise OSError(f"{url} cannot be read: {str(error) or type(error).__name__}") from None
        if response.status_code != 200:
            raise OSError(f"{url} answered {response.status_code}")
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise OSError(f"{url} answered no JSON object") from None


def _safe(url: str) -> bool:
    try:
        parts = urlsplit(url)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False
    return bool(parts.netloc) and (parts.scheme == "https" or (parts.scheme == "http" and local))


def _granted(claims: dict[str, Any]) -> list[str]:
    for name in ("scope", "scp"):
        granted: Any = claims.get(name)
        if isinstance(granted, str):
            return granted.split()
        if isinstance(granted, list):
            return [scope for scope in cast("list[Any]", granted) if isinstance(scope, str)]
    return []


def _why(error: jwt.PyJWTError) -> str:
    match error:
        case jwt.ExpiredSignatureError():
            return "the token has expired"
        case jwt.ImmatureSignatureError():
            return "the token is not valid yet"
        case jwt.InvalidAudienceError():
            return "the token is for another server"
        case jwt.InvalidIssuerError():
            return "the token is of another issuer"
        case jwt.MissingRequiredClaimError():
            return f"the token has no {error.claim}"
        case _:
            return "the token's signature is wrong, or it is malformed"
