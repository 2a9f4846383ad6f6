"""An authorization server, as far as it signs tokens and publishes its keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.server.harness import Uvicorn, listening, soon

__all__ = ["AUDIENCE", "Issuer", "issuer"]

AUDIENCE = "https://mcp.example/mcp"


class Issuer:
    """Its keys, and how often somebody has asked for them.

    Attributes:
        url: its issuer identifier.
        published: the IDs of the keys that are published.
        broken: answer the keys with 500.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str, tuple[str, Any]] = {
            "rsa": ("RS256", rsa.generate_private_key(65537, 2048)),
            "ec": ("ES256", ec.generate_private_key(ec.SECP256R1())),
            "ed": ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
        }
        self.published = ["rsa", "ec", "ed"]
        self.asked = 0
        self.broken = False

    def jwks(self, request: Request) -> Response:
        self.asked += 1
        return Response(status_code=500) if self.broken else JSONResponse(self.document())

    def document(self) -> dict[str, Any]:
        """The keys that are published."""
        keys: list[dict[str, Any]] = []
        for id in self.published:
            algorithm, key = self.keys[id]
            found: Any = jwt.get_algorithm_by_name(algorithm)
            keys.append({**found.to_jwk(key.public_key(), as_dict=True), "kid": id, "use": "sig"})
        return {"keys": keys}

    def metadata(self, request: Request) -> Response:
        return JSONResponse({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    def token(self, by: str = "rsa", kid: str | None = None, **claims: Any) -> str:
        """A token that does, but for the claims given; `None` leaves one out."""
        algorithm, key = self.keys[by]
        now = time.time()
        whole = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": now + 600, "iat": now} | claims
        said = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(said, key, algorithm, headers={"kid": kid or by})


@asynccontextmanager
async def issuer(known_as: str = "oauth-authorization-server") -> AsyncIterator[Issuer]:
    """An issuer that serves its keys, and its metadata at that well-known name."""
    sock = listening()
    found = Issuer(f"http://127.0.0.1:{sock.getsockname()[1]}")
    app = Starlette(routes=[Route("/keys", found.jwks), Route(f"/.well-known/{known_as}", found.metadata)])
    server = Uvicorn(app, sock)
    await soon(server.start())
    try:
        yield found
    finally:
        await server.stop()
