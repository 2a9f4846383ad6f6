"""Who may: tokens on every endpoint and on the handshake, whose session is whose, what is published of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.auth.base import DeniedError, Principal, Verifier
from gapless.log.base import SessionKey, Stored
from gapless.log.sqlite import SqliteLog
from gapless.server.access import Access
from tests.server.harness import BOTH, JSON, Answer, Serve, Server, Session, Socket, note, request, soon


class Known(Verifier):
    """Knows `ann` and `bob` by their names; `brief` for a moment; and `poor`, who may not."""

    issuers = ("https://issuer.example",)
    scopes = ("tools", "more")

    def __init__(self) -> None:
        self.expires: dict[str, float] = {}
        self.down = False

    async def verify(self, token: str) -> Principal:
        if self.down:
            raise OSError("the issuer does not answer")
        if token == "poor":
            raise DeniedError('no "more"', "insufficient_scope")
        if token not in ("ann", "bob"):
            raise DeniedError("nobody has this token")
        return Principal(token, self.expires.get(token))


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
async def server(serve: Serve, known: Known) -> Server:
    return await serve(verifier=known)


def as_(server: Server, name: str | None) -> None:
    """From here on every request is of that principal."""
    server.headers.clear()
    if name is not None:
        server.headers["Authorization"] = f"Bearer {name}"


async def everywhere(session: Session, token: str) -> dict[str, Answer]:
    """What each endpoint answers."""
    server = session.server
    streams = {"Mcp-Session-Id": token}
    found = {
        "message": await session.post(1, note()),
        "events": await session.get(),
        "upgrade": await session.upgrade(session.start),
        "ack": await session.ack(session.start),
        "end": await session.delete(),
        "post": await server.ask("POST", "/mcp", JSON | BOTH | streams, note()),
        "get": await server.ask("GET", "/mcp", {"Accept": "text/event-stream"} | streams),
        "delete": await server.ask("DELETE", "/mcp", streams),
    }
    for name, ticket in (("handshake", None), ("with a ticket", "x")):
        denied = await session.knock(session.start, ticket)
        assert isinstance(denied, Answer), name
        found[name] = denied
    return found


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "Bearer",
        "Bearer ",
        "Basic YW5uOmFubg==",
        "Bearer ann, Bearer ann",
        "Bearer a b",
        "Bearer carl",
        "ann",
    ],
)
async def test_nobody_is_let_in_without_a_token(server: Server, sent: str | None) -> None:
    as_(server, "ann")
    session, streams = await server.started(), await server.initialized()
    server.headers.clear()
    if sent is not None:
        server.headers["Authorization"] = sent
    answers = await everywhere(session, streams.token)
    answers["open"] = await server.ask("POST", "/mcp/session")
    answers["initialize"] = await server.ask("POST", "/mcp", JSON | BOTH, request(0, "initialize"))
    for where, answer in answers.items():
        assert answer.reason == (401, "unauthenticated"), where
        if where != "with a ticket" or sent is not None:
            told = answer.header("www-authenticate")
            known_at = f"http://{server.host}/.well-known/oauth-protected-resource/mcp"
            assert f'resource_metadata="{known_at}", scope="tools more"' in told, where
            assert ('error="invalid_token"' in told) == (sent is not None)


CHARACTERS = st.one_of(st.characters(max_codepoint=255), st.sampled_from(" ,;=\t\0an"))


@given(
    text=st.one_of(
        st.text(CHARACTERS, max_size=40),
        st.tuples(st.text(CHARACTERS, max_size=3), st.text(CHARACTERS, max_size=3), st.integers(0, 10)).map(
            lambda parts: "Bearer ann"[: parts[2]] + parts[0] + "Bearer ann"[parts[2] :] + parts[1]
        ),
        st.sampled_from(["Bearer ann", "bearer  ann", "BEARER bob"]),
    )
)
def test_nothing_but_a_token_lets_anybody_in(text: str) -> None:
    """Whatever is in `Authorization`: who gets in has a token in it, as it was made, and nothing else."""
    access = Access(verifier=Known())
    scope = {"type": "http", "scheme": "http", "path": "/mcp", "query_string": b"access_token=ann"}
    scope["headers"] = [(b"host", b"localhost"), (b"authorization", text.encode("latin-1"))]
    found = asyncio.run(access.principal(scope))
    scheme, _, token = text.partition(" ")
    known = scheme.lower() == "bearer" and token.strip(" ") in ("ann", "bob") and not token.endswith(" ")
    assert isinstance(found, Principal) == known
    if isinstance(found, Principal):
        assert found.name == token.strip(" ")


async def test_a_token_in_a_url_is_none(server: Server) -> None:
    answer = await server.ask("POST", "/mcp/session?access_token=ann")
    assert answer.reason == (401, "unauthenticated")


async def test_a_token_twice_is_none(server: Server) -> None:
    wire = await server.wire()
    head = f"POST /mcp/session HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: 0\r\n"
    await wire.write(f"{head}Authorization: Bearer ann\r\nAuthorization: Bearer bob\r\n\r\n".encode())
    assert (await wire.answer()).reason == (401, "unauthenticated")


async def test_too_little_scope_is_forbidden_and_the_challenge_names_what_is_asked(server: Server) -> None:
    as_(server, "poor")
    answer = await server.ask("POST", "/mcp/session")
    assert answer.reason == (403, "insufficient-scope")
    told = answer.header("www-authenticate")
    assert told.startswith('Bearer error="insufficient_scope", error_description="no ?more?", ')
    assert told.endswith('scope="tools more"')


async def test_a_verifier_that_cannot_tell_is_to_be_asked_again(server: Server, known: Known) -> None:
    as_(server, "ann")
    known.down = True
    answer = await server.ask("POST", "/mcp/session")
    assert answer.reason == (503, "limit")
    assert answer.header("retry-after") == "1"
    assert b"issuer" not in answer.body, "nor is why for whoever asks"


@pytest.mark.rule("B4")
async def test_the_session_of_somebody_else_is_none_of_yours(server: Server) -> None:
    as_(server, "ann")
    session, streams = await server.started(), await server.initialized()
    as_(server, "bob")
    answers = await everywhere(session, streams.token)
    assert answers.pop("with a ticket").reason == (404, "session-unknown")
    nobodys = await server.ask("DELETE", f"/mcp/session/{'x' * 43}")
    for where, answer in answers.items():
        assert answer.reason == (404, "session-unknown"), where
        assert answer.body == nobodys.body, where
    as_(server, "ann")
    assert (await session.post(2, note())).status == 202


async def test_a_ticket_stands_for_who_asked_for_it_once(server: Server) -> None:
    as_(server, "ann")
    session = await server.started()
    offer = await session.pend(session.start)
    as_(server, None)
    for wrong in ("x", offer["ticket"][:-1], ""):
        assert (await session.denied(session.start, wrong)).reason == (401, "unauthenticated")
    socket = await session.bind(session.start, offer["ticket"])
    assert (await socket.control("resume-cursor"))["from"] == session.start
    assert (await session.denied(session.start, offer["ticket"])).reason == (401, "unauthenticated")


async def test_a_ticket_that_is_none_tells_nothing_of_the_session_and_starts_nothing(
    serve: Serve, known: Known, tmp_path: Path
) -> None:
    """Whoever holds a session's token, from a log say, and no ticket: live, ended, stored, or never there."""
    first = await serve(SqliteLog(tmp_path / "log.db"), verifier=known)
    as_(first, "ann")
    live, ended, kept = [await first.started() for _ in range(3)]
    assert (await ended.delete()).status == 204
    first.headers.clear()
    for session in (live, ended):
        assert (await session.denied(session.start, "x")).reason == (401, "unauthenticated")
    await serve.stop(first)
    second = await serve(SqliteLog(tmp_path / "log.db"), verifier=known)
    kept.server = second
    stored = await kept.denied(kept.start, "x")
    kept.base = f"/mcp/session/{'x' * 43}"
    never = await kept.denied(kept.start, "x")
    assert stored.reason == never.reason == (401, "unauthenticated")
    assert stored.body == never.body
    assert not list(second.app.sessions.all()), "nobody has taken it over"
    assert not second.backends.all


async def test_a_session_of_somebody_else_costs_one_look_into_the_log_as_none_does(
    serve: Serve, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer of 404 takes must not tell which of the two it is."""
    server = await serve(verifier=known)
    as_(server, "ann")
    session = await server.started()
    as_(server, "bob")
    looks: list[SessionKey] = []
    load = server.log.load

    async def counting(key: SessionKey) -> Stored | None:
        looks.append(key)
        return await load(key)

    monkeypatch.setattr(server.log, "load", counting)
    for base in (session.base, f"/mcp/session/{'x' * 43}"):
        looks.clear()
        assert (await server.ask("DELETE", base)).reason == (404, "session-unknown")
        assert len(looks) == 1, base


async def test_a_ticket_dies_with_the_token_of_who_asked_for_it(server: Server, known: Known) -> None:
    as_(server, "ann")
    session = await server.started()
    known.expires["ann"] = time.time() - 1
    offer = await session.pend(session.start)
    as_(server, None)
    assert (await session.denied(session.start, offer["ticket"])).reason == (401, "unauthenticated")


async def test_an_event_stream_ends_when_its_token_expires_and_a_fresh_one_resumes(
    server: Server, known: Known
) -> None:
    as_(server, "ann")
    session, streams = await server.started(), await server.initialized()
    known.expires["ann"] = time.time() + 0.3
    ending = [await session.events(session.start), await streams.listen(), await streams.call(7)]
    for stream in ending:
        await stream.end()
    del known.expires["ann"]
    await session.backend.say(note(step=1))
    assert (await (await session.events(session.start)).message())["params"] == {"step": 1}


async def test_a_socket_closes_with_4401_when_its_token_expires(server: Server, known: Known) -> None:
    as_(server, "ann")
    session = await server.started()
    known.expires["ann"] = time.time() + 0.3
    socket = await session.bind(session.start)
    assert await socket.closed() == 4401
    del known.expires["ann"]
    assert isinstance(await session.knock((await session.ids())[0]), Socket)


async def test_whoever_is_revoked_is_cut_off_and_nobody_else(server: Server) -> None:
    held: dict[str, Any] = {}
    for name in ("ann", "bob"):
        as_(server, name)
        session = await server.started()
        held[name] = session, await session.bind(session.start)
    await server.app.sessions.revoke("ann")
    assert await held["ann"][1].closed() == 4401
    session, socket = held["bob"]
    await socket.cross()
    await session.backend.say(note(step=1))
    while (await socket.event()).event != "message":
        pass


async def test_the_verifier_watches_for_as_long_as_it_is_served(serve: Serve) -> None:
    class Watching(Known):
        said = ""

        async def start(self) -> None:
            self.said += "start "

        async def watch(self, revoke: Any) -> None:
            self.said += "watch "
            await revoke("ann")

        async def close(self) -> None:
            self.said += "close"

    watching = Watching()
    server = await serve(verifier=watching)
    as_(server, "ann")
    await server.open()
    await serve.stop(server)
    assert watching.said == "start watch close"


# What is published ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["", "/mcp"])
async def test_the_metadata_says_who_gives_out_tokens_for_what(server: Server, at: str) -> None:
    answer = await server.ask("GET", f"/.well-known/oauth-protected-resource{at}")
    assert answer.json() == {
        "resource": f"http://{server.host}/mcp",
        "authorization_servers": ["https://issuer.example"],
        "bearer_methods_supported": ["header"],
        "scopes_supported": ["tools", "more"],
    }


async def test_behind_a_proxy_the_public_url_is_what_tokens_are_for(serve: Serve, known: Known) -> None:
    server = await serve(verifier=known, public_url="https://mcp.example/tools/mcp")
    host = {"Host": "mcp.example", "Origin": "https://mcp.example"}
    answer = await server.ask("POST", "/mcp/session", host)
    known_at = "https://mcp.example/.well-known/oauth-protected-resource/tools/mcp"
    assert f'resource_metadata="{known_at}"' in answer.header("www-authenticate")
    for at in ("", "/mcp", "/tools/mcp"):  # the last is the one that is advertised
        metadata = await server.ask("GET", f"/.well-known/oauth-protected-resource{at}", host)
        assert metadata.json()["resource"] == "https://mcp.example/tools/mcp"


async def test_a_server_that_asks_for_no_tokens_publishes_nothing(serve: Serve) -> None:
    server = await serve()
    assert (await server.ask("GET", "/.well-known/oauth-protected-resource/mcp")).status == 404


async def test_the_metadata_is_for_named_hosts_and_to_be_read(server: Server) -> None:
    at = "/.well-known/oauth-protected-resource"
    assert (await server.ask("GET", at, {"Host": "evil.example"})).reason == (421, "host-forbidden")
    assert (await server.ask("POST", at)).reason == (405, "method-not-allowed")


# Pages of other origins -----------------------------------------------------------------------------


async def test_a_page_of_a_named_origin_may_send_our_headers_and_read_our_answers(
    serve: Serve, known: Known
) -> None:
    server = await serve(verifier=known, origins=("https://app.example",))
    origin = {"Origin": "https://app.example"}
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, mcp-client, mcp-message-number, last-event-id",
    }
    before = await server.ask("OPTIONS", "/mcp/session", origin | asked)
    assert before.status == 200
    assert before.header("access-control-allow-origin") == "https://app.example"
    as_(server, "ann")
    answer = await server.ask("POST", "/mcp/session", origin)
    assert answer.header("access-control-allow-origin") == "https://app.example"
    assert "Mcp-Session-Id" in answer.header("access-control-expose-headers")


async def test_a_page_of_another_origin_may_not(serve: Serve) -> None:
    server = await serve(origins=("https://app.example",))
    answer = await server.ask("POST", "/mcp/session", {"Origin": "https://evil.example"})
    assert answer.reason == (403, "origin-forbidden")
    assert answer.all("access-control-allow-origin") == []


async def test_no_origin_is_named_by_default(server: Server) -> None:
    as_(server, "ann")
    answer = await soon(server.ask("POST", "/mcp/session", {"Origin": "http://localhost:3000"}))
    assert answer.status == 201
    assert answer.all("access-control-allow-origin") == []
