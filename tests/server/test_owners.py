"""N1: several processes on one log. One owns a session, all of them serve it, and its owner may go."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from gapless.log.base import OwnerId, SessionKey
from gapless.log.sqlite import SqliteLog
from gapless.server import endpoint
from tests.server.harness import (
    EventStream,
    Serve,
    Server,
    Session,
    Socket,
    note,
    on_both_servers,
    request,
    result,
    seq_of,
    soon,
)
from tests.server.restarts import called, hold_up, key_of, logged, recovered, shaken, stored

NEVER = 1000.0
"""A lease whose end no test lives to see."""


@dataclass
class Pair:
    """Two servers on one log: the first owns what is opened through it."""

    first: Server
    second: Server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
async def pair(serve: Serve, path: Path) -> Pair:
    """Two servers that wait for each other as long as it takes."""
    return Pair(*[await serve(SqliteLog(path), lease=NEVER) for _ in range(2)])


def owner_of(server: Server) -> OwnerId:
    """A server among the owners of its log."""
    return server.app.sessions.lease.id


# A session of the other process --------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N1")
async def test_every_endpoint_of_a_session_is_served_by_the_process_that_does_not_own_it(
    serve: Serve, path: Path
) -> None:
    first, second = [await serve(SqliteLog(path), lease=NEVER) for _ in range(2)]
    session = await shaken(first)
    session.server = second
    stream = await session.events(session.start)
    assert (await stream.message())["id"] == 0
    assert (await session.post(3, request(1))).json() == {"received": 3}
    assert (await session.backend.take())["id"] == 1
    await session.backend.say(result(1))
    event = await stream.event()
    assert json.loads(event.data or b"") == result(1)
    assert (await session.ack(event.id)).json() == {"ack": 2}
    offer = await session.pend(str(event.id))
    assert [block.event for block in await stream.end() if block.data] == ["upgrade-accepted"]
    bound = await session.bind(str(event.id), offer["ticket"])
    assert [each.event for each in await bound.cross()] == ["upgrade-accepted"]
    await bound.say(4, request(2))
    assert await bound.control("received") == {"received": 4, "process": "p"}
    assert (await session.backend.take())["id"] == 2
    bound.drop()
    again = await session.bind(session.start)
    assert len(await again.cross()) == 4
    assert (await session.delete()).status == 204
    assert await again.closed() == 4404
    for server in (first, second):
        session.server = server
        assert (await session.get(session.start)).reason == (404, "session-ended")
    assert second.backends.all == []


@on_both_servers
@pytest.mark.rule("N1", "M1", "M2", "M3")
async def test_the_stream_view_is_served_by_the_process_that_does_not_own_it(
    serve: Serve, path: Path
) -> None:
    first, second = [await serve(SqliteLog(path), lease=NEVER) for _ in range(2)]
    streams = await called(first)
    streams.server = second
    listening = await streams.listen()
    call = await streams.call(1)
    primed = (await call.block()).id
    assert (await streams.backend.take())["id"] == 1
    await streams.backend.say(note("news"), result(1))
    assert (await listening.message())["method"] == "news"
    assert await call.message() == result(1)
    assert await call.end() == []
    resumed = await streams.listen(primed)
    assert await resumed.message() == result(1)
    assert (await streams.post(note("x"))).status == 202
    assert (await second.ask("DELETE", "/mcp", streams.headers)).status == 204
    assert (await streams.get()).reason == (404, "session-ended")
    assert second.backends.all == []


@pytest.mark.rule("S6", "L7")
@pytest.mark.parametrize("got", [True, False])
async def test_a_call_of_the_stream_view_whose_owner_went_with_it_is_not_run_again(
    serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch, got: bool
) -> None:
    """It has no number by which to tell a repeat. One that never got to the owner is run."""
    first, second = [await serve(SqliteLog(path), lease=NEVER) for _ in range(2)]
    streams = await called(first)

    async def pass_on(
        address: str, scope: Scope, receive: Receive, send: Send, **_: object
    ) -> Receive | None:
        """The owner is gone; with the request, or before that."""
        await serve.stop(first)
        if not got:
            return receive
        taken = [await receive()]

        async def again() -> Message:
            return taken.pop() if taken else await receive()

        return again

    monkeypatch.setattr(endpoint, "pass_on", pass_on)
    streams.server = second
    if got:
        answer = await streams.post(request(7))
        assert (answer.status, answer.json()["id"]) == (200, 7)
        assert answer.json()["error"]["data"] == {"reason": "outcome-unknown"}
        assert second.backends.all == []
    else:
        call = await streams.call(7)
        assert (await call.block()).id
        assert (await (await second.backends.opened()).take())["method"] == "initialize"


@pytest.mark.rule("N1", "B6", "B8")
async def test_a_newcomer_through_one_process_probes_the_socket_that_is_bound_through_the_other(
    serve: Serve, path: Path
) -> None:
    """Both ways: it does not matter which of them owns the session."""
    first, second = [await serve(SqliteLog(path), lease=NEVER, probe_timeout=0.3) for _ in range(2)]
    for bound_at, asked_at in ((first, second), (second, first)):
        session = await shaken(first)
        session.server = bound_at
        bound = await session.bind(session.start)
        await bound.cross()
        session.server = asked_at
        asking = asyncio.ensure_future(session.get(session.start))
        await bound.control("probe")
        await bound.send(b"event: probe-ack\ndata: {}\n\n")
        assert (await asking).reason == (409, "websocket-bound")
        stream = await session.events(session.start)
        assert await bound.closed() == 4410
        assert [event.event for event in await stream.events(2)] == ["message", "upgrade-accepted"]


@pytest.mark.rule("N1", "S5")
async def test_what_was_passed_on_is_not_passed_on_again(pair: Pair) -> None:
    """The session has changed hands meanwhile: here, to an owner whose address is that of another."""
    session = await shaken(pair.first)
    (address,) = [o.address for o in await pair.first.log.owners() if o.id == owner_of(pair.first)]
    found = await stored(pair.first, session)
    await pair.first.log.acquire(found.key, found.fence, await pair.first.log.join(address))
    pair.first.app.sessions._live.clear()
    session.server = pair.second
    assert (await session.get(session.start)).reason == (503, "limit")
    assert (await session.denied(session.start)).reason == (503, "limit")


@pytest.mark.rule("N1")
async def test_a_session_that_is_a_process_s_own_and_not_live_there_is_taken_up_again(pair: Pair) -> None:
    session = await shaken(pair.first)
    fence = (await stored(pair.first, session)).fence
    pair.first.app.sessions._live.clear()
    assert (await session.get("junk")).reason == (400, "malformed")
    found = await stored(pair.first, session)
    assert (found.owner, found.fence) == (owner_of(pair.first), fence + 1)


@pytest.mark.rule("N1", "B9")
async def test_a_session_that_lives_elsewhere_is_not_ours_to_expire(serve: Serve, path: Path) -> None:
    first = await serve(SqliteLog(path), lease=NEVER)
    session = await shaken(first)
    second = await serve(SqliteLog(path), lease=NEVER, session_expiry=0.001)
    for _ in range(3):
        await second.app.sessions._sweep()
    assert second.app.sessions._orphans == {}, "it has not begun to count"
    assert (await session.post(3, request(1))).json() == {"received": 3}
    assert await second.app.sessions._load(key_of(session.token), expire=True) is not None
    assert (await session.post(4, request(2))).json() == {"received": 4}


@pytest.mark.rule("N1")
async def test_a_session_that_is_opened_while_losses_are_looked_into_is_none_of_them(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve()
    looked, go = asyncio.Event(), asyncio.Event()
    owned = server.log.owned

    async def slowly(owner: OwnerId) -> frozenset[SessionKey]:
        found = await owned(owner)
        looked.set()
        await go.wait()
        return found

    monkeypatch.setattr(server.log, "owned", slowly)
    looking = asyncio.create_task(server.app.sessions._check_owned())
    await soon(looked.wait())
    session = await shaken(server)
    go.set()
    await soon(looking)
    assert (await session.post(3, request(1))).json() == {"received": 3}
    assert not session.backend.closed.is_set()


@pytest.mark.rule("N1")
async def test_a_session_that_nobody_knows_is_not_asked_for_anywhere(pair: Pair) -> None:
    session = await pair.first.open()
    session.server = pair.second
    session.base = session.base.replace(session.token, "a" * 43)
    assert (await session.get()).reason == (404, "session-unknown")


@pytest.mark.rule("N1", "B4")
async def test_the_end_of_a_session_is_told_by_a_process_that_never_served_it(
    serve: Serve, pair: Pair
) -> None:
    session = await shaken(pair.first)
    await session.delete()
    await serve.stop(pair.first)
    session.server = pair.second
    assert (await session.get()).reason == (404, "session-ended")
    assert pair.second.backends.all == []


# The owner goes ------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("N1", "N2", "S1")
@pytest.mark.parametrize("medium", ["events", "socket"])
async def test_when_the_owner_ends_its_connections_end_everywhere_and_the_other_process_goes_on(
    serve: Serve, path: Path, medium: str
) -> None:
    first, second = [await serve(SqliteLog(path), lease=NEVER) for _ in range(2)]
    session = await shaken(first)
    session.server = second
    connection: EventStream | Socket
    if medium == "events":
        connection = await session.events(session.start)
        cursor = str((await connection.event()).id)
    else:
        connection = await session.bind(session.start)
        cursor = str((await connection.cross())[-1].id)
    await session.post(3, request(1))
    await session.backend.take()
    first.app.sessions.drain(1012)
    if isinstance(connection, EventStream):
        assert [block for block in await connection.end() if block.data] == []
    else:
        assert await connection.closed() == 1012
    assert (await session.get(cursor)).reason == (503, "limit"), "it is about to go"
    await serve.stop(first)
    assert [owner.id for owner in await second.log.owners()] == [owner_of(second)]
    stream = await session.events(cursor)
    event = await stream.event()
    assert seq_of(event.id) == seq_of(cursor) + 1
    assert json.loads(event.data or b"")["error"]["data"] == {"reason": "outcome-unknown"}
    backend = await recovered(second)
    await session.post(4, request(2))
    assert (await backend.take())["id"] == 2


@pytest.mark.rule("N1")
async def test_of_two_that_are_asked_at_once_for_a_dead_process_s_session_one_owns_it_and_one_passes_on(
    serve: Serve, path: Path
) -> None:
    dead = await serve(SqliteLog(path))
    sessions = [await shaken(dead) for _ in range(4)]
    await serve.stop(dead)
    servers = [await serve(SqliteLog(path), lease=NEVER) for _ in range(2)]
    before = {session.token: (await stored(servers[0], session)).fence for session in sessions}

    async def ask(session: Session, server: Server) -> EventStream:
        asker = Session(server, session.opened)
        stream = await asker.events(asker.start)
        assert (await stream.message())["id"] == 0
        return stream

    asked = [(session, server) for session in sessions for server in servers]
    streams = await asyncio.gather(*(ask(*each) for each in asked))
    while sum(len(server.backends.all) for server in servers) < len(sessions):
        await servers[0].ask("GET", "/mcp")
    for server in servers:
        for backend in tuple(server.backends.all):
            await recovered(server, backend)
    for stream in streams:
        assert [(await stream.message())["method"] for _ in range(2)] == [
            "notifications/tools/list_changed",
            "notifications/resources/list_changed",
        ]
    for session in sessions:
        found = await stored(servers[0], session)
        assert found.fence == before[session.token] + 1
        assert found.owner in {owner_of(server) for server in servers}
    assert sum(len(server.backends.all) for server in servers) == len(sessions)


# An owner that is dead, or silent, without a word --------------------------------------------------


class Ghost:
    """An owner that shows no life: its socket refuses (`dead`), is not there (`missing`), or says nothing."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / "door.sock"
        self.id = OwnerId(0)
        self.asked = asyncio.Event()
        self._kind = kind
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def haunt(self, server: Server, *sessions: Session) -> None:
        """Own these sessions."""
        if self._kind == "dead":
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(self.path))
        elif self._kind == "silent":
            self._server = await asyncio.start_unix_server(self._accept, self.path)
        self.id = await server.log.join(str(self.path))
        for session in sessions:
            found = await stored(server, session)
            await server.log.acquire(found.key, found.fence, self.id)

    def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        self._writers.append(writer)

    def leave(self) -> None:
        """Vanish."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()


@pytest.fixture
async def ghost() -> AsyncIterator[Callable[[str], Ghost]]:
    """Makes ghosts. Their folder is apart: a socket's path may not be long."""
    made: list[Ghost] = []
    with tempfile.TemporaryDirectory() as folder:

        def make(kind: str) -> Ghost:
            made.append(Ghost(Path(folder), kind))
            return made[-1]

        yield make
        for each in made:
            each.leave()


async def left_behind(serve: Serve, path: Path) -> Session:
    """A session whose process is gone."""
    server = await serve(SqliteLog(path))
    session = await shaken(server)
    await session.post(3, request(7))
    await serve.stop(server)
    return session


@pytest.mark.rule("N1", "N2")
async def test_an_owner_whose_socket_refuses_is_struck_off_and_not_waited_for(
    serve: Serve, path: Path, ghost: Callable[[str], Ghost]
) -> None:
    session = await left_behind(serve, path)
    session.server = server = await serve(SqliteLog(path), lease=NEVER)
    dead = ghost("dead")
    await dead.haunt(server, session)
    stream = await session.events(session.start)
    assert [seq_of(event.id) for event in await stream.events(2)] == [1, 2]
    assert [owner.id for owner in await server.log.owners()] == [owner_of(server)]
    assert not dead.path.exists()


@pytest.mark.rule("N1")
async def test_a_dead_process_that_owned_nothing_is_swept_off(
    serve: Serve, path: Path, ghost: Callable[[str], Ghost]
) -> None:
    server = await serve(SqliteLog(path), lease=NEVER)
    dead = ghost("dead")
    await dead.haunt(server)
    await server.app.sessions._sweep()
    assert [owner.id for owner in await server.log.owners()] == [owner_of(server)]
    assert not dead.path.exists()


@on_both_servers
@pytest.mark.rule("N1", "S5")
@pytest.mark.parametrize("asked", ["events", "handshake", "message"])
async def test_an_owner_that_hangs_is_waited_for_until_its_lease_is_over(
    serve: Serve, path: Path, ghost: Callable[[str], Ghost], asked: str
) -> None:
    session = await left_behind(serve, path)
    session.server = server = await serve(SqliteLog(path), lease=0.3)
    await server.ask("GET", "/mcp")
    hanging = ghost("silent")
    await hanging.haunt(server, session)
    match asked:
        case "events":
            stream = await session.events(session.start)
            assert [seq_of(event.id) for event in await stream.events(2)] == [1, 2]
        case "handshake":
            socket = await session.bind(session.start)
            assert [seq_of(event.id) for event in (await socket.cross())[:2]] == [1, 2]
        case _:
            assert (await session.post(4, request(8))).json() == {"received": 4}
    assert hanging.asked.is_set(), "it was asked first"
    await recovered(server)
    assert (await stored(server, session)).owner == owner_of(server)


@pytest.mark.rule("N1")
async def test_an_owner_that_cannot_be_reached_may_live_until_its_lease_is_over(
    serve: Serve, path: Path, ghost: Callable[[str], Ghost]
) -> None:
    session = await left_behind(serve, path)
    session.server = server = await serve(SqliteLog(path), lease=1.0)
    await ghost("missing").haunt(server, session)
    fence = (await stored(server, session)).fence
    refused = await session.get(session.start)
    assert refused.reason == (503, "limit")
    assert refused.header("retry-after") == "1"
    assert (await stored(server, session)).fence == fence
    while (answer := await session.get("junk")).reason == (503, "limit"):
        pass
    assert answer.reason == (400, "malformed")
    assert [owner.id for owner in await server.log.owners()] == [owner_of(server)], "it is struck off too"


# An owner that stood still -------------------------------------------------------------------------


async def _taken_by(serve: Serve, path: Path, session: Session, owner: Server) -> Server:
    """The session's owner stands still, as another process sees it, which goes on with the session."""
    other = await serve(SqliteLog(path), lease=0.2)
    session.server = other
    while (await stored(other, session)).owner == owner_of(owner):
        await session.get("junk")
    owner.app.sessions.lease._until = 0.0  # and by its own clock
    return other


@pytest.mark.rule("N1", "B8")
async def test_a_process_learns_by_its_next_sign_of_life_that_a_session_was_taken_from_it(
    serve: Serve, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = await serve(SqliteLog(path), lease=1.0)
    quiet, bound, kept = await shaken(old), await shaken(old), await shaken(old)
    stream = await quiet.events(quiet.start)
    assert (await stream.message())["id"] == 0
    socket = await bound.bind(bound.start)
    await socket.cross()
    listening = await kept.events(kept.start)
    assert old.app.sessions._janitor is not None
    old.app.sessions._janitor.cancel()  # it would come, in its own time
    with caplog.at_level(logging.CRITICAL, "gapless"):
        other = await old.log.join("/nowhere/door.sock")
        for each in (quiet, bound):
            found = await stored(old, each)
            await old.log.acquire(found.key, found.fence, other)
        assert await socket.closed() == 1012
        assert [block for block in await stream.end() if block.data] == []
        for each in (quiet, bound):
            await soon(each.backend.closed.wait())
    await kept.backend.say(note("on"))
    assert [(await listening.message()).get("method") for _ in range(2)] == [None, "on"]
    assert not kept.backend.closed.is_set()


@pytest.mark.rule("N1", "S6")
async def test_a_process_that_stood_still_appends_nothing_dispatches_nothing_and_passes_on(
    serve: Serve, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = await serve(SqliteLog(path), lease=NEVER)
    session = await shaken(old)
    await hold_up(session)
    assert (await session.post(6, request(4))).status == 202  # waits
    with caplog.at_level(logging.CRITICAL, "gapless"):
        new = await _taken_by(serve, path, session, old)
        backend = await recovered(new)
        assert (await backend.take())["id"] == 4
        before = await logged(new, session)
        assert before.count(b'"outcome-unknown"') == 3
        old.backends.gate.set()
        await session.backend.emit(note("of the old one"))
        await soon(session.backend.closed.wait())
        session.server = old
        assert (await session.post(7, request(5))).json() == {"received": 7}
    assert (await backend.take())["id"] == 5
    ids = [json.loads(data).get("id") for data in session.backend.sent]
    assert ids == [0, None, 1, 2], "the last of them it was handing over when it stood still"
    assert await logged(new, session) == before


@pytest.mark.rule("N1", "C5")
async def test_a_process_that_stood_still_does_not_call_a_cursor_ahead_that_is_ahead_of_itself_alone(
    serve: Serve, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = await serve(SqliteLog(path), lease=NEVER)
    session = await shaken(old)
    with caplog.at_level(logging.CRITICAL, "gapless"):
        new = await _taken_by(serve, path, session, old)
        backend = await recovered(new)
        await backend.say(note("news"))
        cursor = (await session.ids())[-1]
        session.server = old
        stream = await session.events(cursor)
        await backend.say(note("more"))
        assert (await stream.message())["method"] == "more"


@pytest.mark.rule("N1")
async def test_a_session_that_comes_back_to_a_process_is_served_by_what_the_log_has_by_then(
    serve: Serve, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = await serve(SqliteLog(path), lease=NEVER)
    session = await shaken(old)
    with caplog.at_level(logging.CRITICAL, "gapless"):
        new = await _taken_by(serve, path, session, old)
        backend = await recovered(new)
        await backend.say(note("news"))
        await session.post(3, request(1))
        await serve.stop(new)
        session.server = old
        stream = await session.events(session.start)
        events = await stream.events(5)
    assert [seq_of(event.id) for event in events] == [1, 2, 3, 4, 5]
    assert json.loads(events[4].data or b"")["id"] == 1
    await soon(session.backend.closed.wait())
    backend = await recovered(old)
    assert (await session.post(4, request(2))).json() == {"received": 4}
    assert (await backend.take())["id"] == 2
    assert key_of(session.token) in await old.log.owned(owner_of(old))
