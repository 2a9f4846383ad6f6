"""JWTs: which are believed, by whose keys, and what each of the others is told."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt as pyjwt
import pytest

from gapless.auth import jwt as module
from gapless.auth.base import DeniedError
from gapless.auth.jwt import JwtVerifier
from gapless.errors import GaplessError, UsageError
from tests.auth.issuer import AUDIENCE, Issuer, issuer


@asynccontextmanager
async def verifying(of: Issuer, **options: Any) -> AsyncIterator[JwtVerifier]:
    verifier = JwtVerifier(of.url, AUDIENCE, **options)
    await verifier.start()
    try:
        yield verifier
    finally:
        await verifier.close()


@pytest.mark.parametrize("by", ["rsa", "ec", "ed"])
@pytest.mark.parametrize("known_as", ["oauth-authorization-server", "openid-configuration"])
async def test_a_token_of_the_issuer_stands_for_its_subject(by: str, known_as: str) -> None:
    async with issuer(known_as) as of, verifying(of) as verifier:
        principal = await verifier.verify(of.token(by, exp=2_000_000_000))
        assert principal.name == f"{of.url} ann"
        assert principal.expires == 2_000_000_030, "clocks may differ by 30 s"


def unsigned(of: Issuer) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    claims = {"iss": of.url, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600}
    return f"{part({'alg': 'none', 'kid': 'rsa'})}.{part(claims)}."


def by_its_public_key(of: Issuer) -> str:
    """The algorithm is one of a shared secret, and the secret is what everybody may know."""
    secret = str(of.document())
    claims = {"iss": of.url, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600}
    return pyjwt.encode(claims, secret, "HS256", headers={"kid": "rsa"})


REFUSED: dict[str, tuple[Any, str]] = {
    "no JWT": (lambda of: "abc", "no JWT"),
    "not signed": (unsigned, "algorithm"),
    "a shared secret": (by_its_public_key, "algorithm"),
    "expired": (lambda of: of.token(exp=time.time() - 31), "expired"),
    "not yet": (lambda of: of.token(nbf=time.time() + 60), "not valid yet"),
    "for another": (lambda of: of.token(aud="https://other.example/mcp"), "another server"),
    "of another": (lambda of: of.token(iss="https://other.example"), "another issuer"),
    "no audience": (lambda of: of.token(aud=None), "no aud"),
    "no expiry": (lambda of: of.token(exp=None), "no exp"),
    "no subject": (lambda of: of.token(sub=None), "no sub"),
    "another's key": (lambda of: of.token("ec", kid="rsa"), "wrong|does not fit"),
    "an unknown key": (lambda of: of.token(kid="x"), "no key of the issuer"),
    "tampered": (lambda of: of.token()[:-8] + "AAAAAAAA", "wrong"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_any_other_token_is_refused_and_told_why(kind: str) -> None:
    make, told = REFUSED[kind]
    async with issuer() as of, verifying(of) as verifier:
        token = make(of)
        with pytest.raises(DeniedError, match=told) as denied:
            await verifier.verify(token)
        assert denied.value.error == "invalid_token"
        assert token not in str(denied.value)


@pytest.mark.parametrize("claim", [{"scope": "read tools"}, {"scp": ["read", "tools"]}])
async def test_scopes_have_to_be_granted(claim: dict[str, Any]) -> None:
    async with issuer() as of, verifying(of, scopes=["tools"]) as verifier:
        assert (await verifier.verify(of.token(**claim))).name.endswith(" ann")
        lacking: list[dict[str, Any]] = [{}, {"scope": "toolsmith"}, {"scp": 3}]
        for fewer in lacking:
            with pytest.raises(DeniedError, match="does not grant tools") as denied:
                await verifier.verify(of.token(**fewer))
            assert denied.value.error == "insufficient_scope"


async def test_a_key_that_is_new_is_fetched_but_not_at_everybodys_whim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with issuer() as of:
        of.published = ["rsa"]
        async with verifying(of) as verifier:
            of.published = ["rsa", "ec"]
            for _ in range(20):
                with pytest.raises(DeniedError, match="no key"):
                    await verifier.verify(of.token("ec"))
            assert of.asked == 1
            monkeypatch.setattr(module, "_AGAIN", 0.0)
            assert (await verifier.verify(of.token("ec"))).name.endswith(" ann")
            assert of.asked == 2


async def test_an_issuer_that_does_not_answer_leaves_known_keys_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async with issuer() as of:
        of.published = ["rsa"]
        async with verifying(of) as verifier:
            of.broken = True
            monkeypatch.setattr(module, "_AGAIN", 0.0)
            with pytest.raises(OSError, match="answered 500"):
                await verifier.verify(of.token("ec"))
            assert (await verifier.verify(of.token())).name.endswith(" ann")


async def test_a_key_that_the_issuer_has_withdrawn_is_believed_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaked, say. Somebody may have used it all day, or nobody for hours."""
    monkeypatch.setattr(module, "_AGAIN", 0.0)
    async with issuer() as of:
        for age in ("_FRESH", "_OLD"):
            of.published = ["rsa", "ec"]
            async with verifying(of) as verifier:
                of.published = ["rsa"]
                assert (await verifier.verify(of.token("ec"))).name.endswith(" ann"), "it has just been had"
                with monkeypatch.context() as later:
                    later.setattr(module, age, 0.0)
                    if age == "_FRESH":
                        await verifier.verify(of.token("ec"))  # nobody waits for the look that this begins
                        refreshing = verifier._refreshing  # pyright: ignore[reportPrivateUsage]
                        assert refreshing is not None
                        await refreshing
                    with pytest.raises(DeniedError, match="no key"):
                        await verifier.verify(of.token("ec"))
                    assert (await verifier.verify(of.token("rsa"))).name.endswith(" ann")


async def test_a_known_key_waits_for_nobody_who_asks_for_another() -> None:
    async with issuer() as of, verifying(of) as verifier, asyncio.timeout(5):
        async with verifier._fetching:  # pyright: ignore[reportPrivateUsage]
            assert (await verifier.verify(of.token())).name.endswith(" ann")


async def test_keys_of_an_issuer_that_is_gone_are_not_believed_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_AGAIN", 0.0)
    monkeypatch.setattr(module, "_OLD", 0.0)
    async with issuer() as of:
        async with verifying(of) as verifier:
            token = of.token()
            of.broken = True
            assert (await verifier.verify(token)).name.endswith(" ann")
            monkeypatch.setattr(module, "_GONE", 0.0)
            with pytest.raises(OSError, match="too old"):
                await verifier.verify(token)
    assert "answered 500" in caplog.text, "its operator is told why"


async def test_a_server_without_its_issuer_does_not_start() -> None:
    async with issuer() as of:
        of.broken = True
        with pytest.raises(GaplessError, match="answered 500"):
            async with verifying(of):
                pass


@pytest.mark.parametrize(
    "url", ["http://issuer.example", "issuer.example", "ftp://issuer.example", "https://"]
)
def test_an_issuer_is_reached_by_https(url: str) -> None:
    with pytest.raises(UsageError, match="no https URL"):
        JwtVerifier(url, AUDIENCE)


@pytest.mark.parametrize("algorithms", [["HS256"], ["none"], ["RS256", "HS512"], []])
def test_algorithms_are_those_of_key_pairs(algorithms: list[str]) -> None:
    with pytest.raises(UsageError, match="no algorithm"):
        JwtVerifier("https://issuer.example", AUDIENCE, algorithms=algorithms)
