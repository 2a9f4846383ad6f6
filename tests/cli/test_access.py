"""Who may, from the command line: tokens, the flag without which nobody serves everybody, what is logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.auth import JwtVerifier, TokenFile
from gapless.cli.access import verifier
from gapless.errors import UsageError
from tests.cli.harness import Run, Serve, Start
from tests.cli.test_serve import ANY, STDIO, opened

ISSUER, URL = "https://issuer.example", "https://mcp.example/mcp"


def made(run: Run, folder: Path, name: str) -> str:
    """A token, and its line in the file `tokens`."""
    done = run("token", name)
    with (folder / "tokens").open("a") as file:
        file.write(done.out)
    token = done.err.strip().removeprefix(f"gapless: the token of {name}: ")
    assert done.out.startswith(f"{name}:")
    assert token not in done.out
    return token


def test_a_token_that_was_made_lets_in_and_no_other_does(run: Run, serve: Serve, tmp_path: Path) -> None:
    token = made(run, tmp_path, "alice")
    serving = serve("--log", "memory:", "--tokens", str(tmp_path / "tokens"), *STDIO)
    status, body = opened(serving.url)
    assert (status, body["error"]["data"]["reason"]) == (401, "unauthenticated")
    assert opened(serving.url, Authorization=f"Bearer {token}x")[0] == 401
    assert opened(serving.url, Authorization=f"Bearer {token}")[0] == 201
    called = run("call", serving.url, "climb", '{"steps": 2}', "--header", f"Authorization: Bearer {token}")
    assert (called.status, called.out) == (0, "climbed 2 steps\n")
    refused = run("call", serving.url, "climb")
    assert refused.status == 1
    assert "send a bearer token" in refused.err


def test_whose_line_is_taken_out_is_let_in_no_more(
    run: Run, serve: Serve, start: Start, tmp_path: Path
) -> None:
    token = made(run, tmp_path, "alice")
    made(run, tmp_path, "bob")
    file = tmp_path / "tokens"
    serving = serve("--log", "memory:", "--log-level", "info", "--tokens", str(file), *STDIO)
    bearer = f"Authorization: Bearer {token}"
    calling = start("call", serving.url, "climb", '{"steps": 100000, "delay": 0.05}', "--header", bearer)
    calling.says("step 5")
    file.write_text("".join(line for line in file.read_text().splitlines(True) if line.startswith("bob")))
    serving.says("code=4401")
    assert calling.ends() == 1
    assert "nobody has this token" in calling.err


BUSY = '{"steps": 30, "delay": 0.01}'


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_busy_run_logs_every_turn_and_no_secret(run: Run, serve: Serve, tmp_path: Path, form: str) -> None:
    token = made(run, tmp_path, "alice")
    serving = serve(
        *("--log", "memory:", "--log-level", "info", "--log-format", form),
        *("--tokens", str(tmp_path / "tokens"), *STDIO),
    )
    status, body = opened(serving.url, Authorization=f"Bearer {token}")
    assert status == 201
    bearer = ("--header", f"Authorization: Bearer {token}")
    for upgrade in ("auto", "never"):
        assert run("call", serving.url, "climb", BUSY, "--upgrade", upgrade, *bearer).status == 0
    serving.process.terminate()
    assert serving.ends() == 0
    told = serving.err
    for secret in (token, body["session"], "Bearer"):
        assert secret not in told
    lines = [line for line in told.splitlines() if "websocket-bound" in line or "ended" in line]
    assert len(lines) >= 3
    if form == "json":
        turns = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
        bound = next(turn for turn in turns if turn.get("turn") == "websocket-bound")
        assert {"session", "cursor", "generation", "committed", "at", "level"} <= set(bound)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_nobody_serves_everybody_by_mistake(run: Run, host: str) -> None:
    done = run("serve", "--log", "memory:", "--host", host, "--port", "0", *ANY)
    assert done.status == 2
    assert "lets everybody in who reaches it" in done.err
    assert "--allow-anonymous" in done.err


def test_with_tokens_every_network_is_served(run: Run, serve: Serve, tmp_path: Path) -> None:
    made(run, tmp_path, "alice")
    tokens = ("--tokens", str(tmp_path / "tokens"))
    serve("--log", "memory:", "--host", "0.0.0.0", *tokens, *ANY)


def test_behind_a_proxy_the_public_url_is_what_clients_may_call_it(serve: Serve) -> None:
    serving = serve("--log", "memory:", "--public-url", URL, *STDIO)
    assert opened(serving.url, Host="mcp.example", Origin="https://mcp.example")[0] == 201
    assert opened(serving.url, Host="evil.example")[0] == 421
    assert opened(serving.url, Host="mcp.example", Origin="https://evil.example")[0] == 403


Given = dict[str, Any]
WRONG: list[tuple[Given, str]] = [
    ({"audience": URL}, "--jwt-audience without --jwt-issuer"),
    ({"jwks": f"{ISSUER}/keys"}, "--jwt-jwks without --jwt-issuer"),
    ({"scopes": ["a"]}, "--scope without --jwt-issuer"),
    ({"issuer": ISSUER}, "without what its JWTs are for"),
    ({"issuer": ISSUER, "audience": URL, "tokens": "x"}, "both --tokens and --jwt-issuer"),
    ({"tokens": "/nowhere/tokens"}, "cannot be read"),
]
NOTHING: Given = dict.fromkeys(("tokens", "issuer", "audience", "jwks", "scopes", "public_url"))


def of(given: Given) -> Given:
    """These options, and none of the others."""
    return {**NOTHING, **given}


@pytest.mark.parametrize(("given", "told"), WRONG, ids=[told for _, told in WRONG])
def test_options_that_do_not_go_together_are_named(given: Given, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        verifier(**of(given))


def test_options_say_who_knows_the_tokens(tmp_path: Path) -> None:
    assert verifier(**NOTHING) is None
    assert verifier(**of({"public_url": URL})) is None
    (tmp_path / "tokens").touch()
    assert isinstance(verifier(**of({"tokens": str(tmp_path / "tokens")})), TokenFile)
    sayings: list[Given] = [{"audience": URL}, {"public_url": URL}]
    for audience in sayings:
        assert isinstance(verifier(**of({"issuer": ISSUER} | audience)), JwtVerifier)
