"""What users of other servers and clients suffered, one test a row, seen from outside.

Each speaks through a real socket to `gapless.asgi`, or to `gapless serve`. The first line of each says
which row of the list it is, and names the guard in `src/gapless` that makes it hold: with that taken
out, it fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from starlette.middleware.gzip import GZipMiddleware

import gapless
from examples.ladder_server import server as ladder
from gapless.cli.target import serving
from gapless.client.driver import Observation
from gapless.log.sqlite import SqliteLog
from gapless.protocol.client import Retry
from gapless.torture.faults import Direction, FaultProxy, Link
from tests.interop.field_world import (
    CHILD,
    Holding,
    Idle,
    Paced,
    Reframed,
    Stated,
    Unscripted,
    behind,
    port_of,
    running,
)
from tests.server import conftest
from tests.server.harness import (
    BLOCKS,
    BOTH,
    JSON,
    Answer,
    EventStream,
    Scripted,
    ScriptedBackends,
    Serve,
    Server,
    Session,
    Socket,
    Streams,
    block_of,
    encode,
    note,
    request,
    result,
    seq_of,
    soon,
)
from tests.server.restarts import HELLO, called, key_of, recovered, restarted

serve, server = conftest.serve, conftest.server

LINK = "0123456789abcdef"
QUICK = Retry(first=0.02, most=0.1, attempts=6)


async def cut_after_one(streams: Streams, id: int | str = 1) -> tuple[EventStream, str, str]:
    """A call whose stream is dropped after its first event: its priming's ID, and that event's."""
    stream = await streams.call(id)
    primed = await stream.block()
    await streams.backend.take()
    await streams.backend.say(note(step=1), related=id)
    event = await stream.event()
    stream.drop()
    assert primed.id is not None
    assert event.id is not None
    return stream, primed.id, event.id


async def steps(stream: EventStream, count: int) -> list[int]:
    """The steps that the next events tell."""
    return [(await stream.message())["params"]["step"] for _ in range(count)]


# Streams that break ----------------------------------------------------------------------------------


Resume = Callable[[str | None], Awaitable[EventStream]]


@dataclass
class Replay:
    """A stream that is resumed from its start; while its events 1 to 3 were read, 4 to 6 were committed."""

    stream: EventStream
    backend: Scripted
    resume: Resume


async def calling(server: Server, view: str) -> tuple[EventStream, Scripted, Resume]:
    """A stream with a call on it, the MCP server behind it, and what resumes the stream."""
    if view == "stream":
        streams = await server.initialized()
        return await streams.call(1), streams.backend, streams.listen
    session = await server.started()
    return await session.events(session.start), session.backend, session.events


async def replayed_slowly(serve: Serve, view: str) -> Replay:
    log = Paced()
    server = await serve(log)
    stream, backend, resume = await calling(server, view)
    start = (await stream.block()).id
    stream.drop()
    await backend.say(*(note(step=n) for n in (1, 2, 3)), related=1)
    log.gate.clear()
    resumed = await resume(start)
    await soon(log.reading.wait())
    await backend.say(*(note(step=n) for n in (4, 5, 6)), related=1)
    log.gate.set()
    return Replay(resumed, backend, resume)


both_views = pytest.mark.parametrize("view", ["stream", "session"])


@both_views
@pytest.mark.rule("M2", "L2", "S1")
async def test_events_committed_while_a_replay_is_read_arrive_exactly_once(serve: Serve, view: str) -> None:
    # Row 1. Guard: feed.feed, `advance(delivery, last)`, not to what was committed meanwhile.
    replay = await replayed_slowly(serve, view)
    assert await steps(replay.stream, 6) == [1, 2, 3, 4, 5, 6]
    await replay.backend.say(note(step=7), related=1)
    assert await steps(replay.stream, 1) == [7]


@both_views
@pytest.mark.rule("M2", "C4", "S1")
async def test_after_such_a_replay_a_resume_from_the_last_id_received_has_all_the_rest(
    serve: Serve, view: str
) -> None:
    # Row 2. Guard: feed.feed, `advance(delivery, last)`.
    replay = await replayed_slowly(serve, view)
    second = (await replay.stream.events(2))[-1].id
    replay.stream.drop()
    for _ in range(2):
        again = await replay.resume(second)
        assert await steps(again, 4) == [3, 4, 5, 6]
        again.drop()


def cut_streams(proxy: FaultProxy, how: Callable[[Link], None]) -> int:
    """Do something to every event stream that is open; how many there were."""
    links = [link for link in proxy.links if link.open and link.request.startswith(("GET", "POST"))]
    for link in links:
        how(link)
    return len(links)


class Waiting:
    """An MCP server whose tool reports a step, then waits until it is let go."""

    def __init__(self) -> None:
        self.server = MCPServer("waiting")
        self.begun, self.go, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @self.server.tool()
        async def wait(ctx: Context) -> str:
            """Wait."""
            await ctx.report_progress(1, 2, "begun")
            self.begun.set()
            await self.go.wait()
            await ctx.report_progress(2, 2, "gone")
            self.done.set()
            return "waited"


def told(answer: Any) -> str:
    """The text of a tool's result."""
    return answer.content[0].text


def client_of(kind: str, url: str) -> Any:
    """The official SDK's transport, or ours, which stays on SSE or goes through the door."""
    if kind == "standard":
        return streamable_http_client(url)
    return gapless.connect(url, upgrade="auto" if kind == "ours, on a socket" else "never", retry=QUICK)


@pytest.mark.parametrize("kind", ["standard", "ours", "ours, on a socket"])
@pytest.mark.parametrize("how", [Link.close, Link.reset], ids=["ended", "reset"])
@pytest.mark.rule("M2", "L7", "S5")
async def test_a_stream_that_ends_without_its_response_is_resumed_and_the_call_returns(
    kind: str, how: Callable[[Link], None]
) -> None:
    # Row 3. Guard: client.Client._stream_ended and _socket_closed, which rest and resume.
    waiting = Waiting()
    async with running(waiting.server, retry=0.05) as server, behind(server.port) as proxy:
        async with Client(client_of(kind, url_of(proxy)), mode="legacy") as client:
            call = asyncio.create_task(client.call_tool("wait", {}))
            await soon(waiting.begun.wait())
            assert cut_streams(proxy, how) > 0
            waiting.go.set()
            assert told(await soon(call)) == "waited"


@pytest.mark.rule("L7", "S5")
async def test_a_stream_that_ends_for_good_fails_its_call_within_bounds() -> None:
    # Row 3. Guard: client.Client._rest, which gives up; client.Client._end, which settles what waits.
    waiting = Waiting()
    async with running(waiting.server) as server, behind(server.port) as proxy:
        connection = gapless.connect(url_of(proxy), retry=QUICK)
        async with Client(connection, mode="legacy") as client:
            call = asyncio.create_task(client.call_tool("wait", {}))
            await soon(waiting.begun.wait())
            proxy.refusing = True
            cut_streams(proxy, Link.close)
            with pytest.raises(MCPError) as raised:
                await soon(call)
            assert raised.value.error.data["reason"] == "outcome-unknown"
            assert connection.error is not None
            assert connection.error.code == "gave-up"


def url_of(at: Server | FaultProxy) -> str:
    return f"http://127.0.0.1:{at.port}/mcp"


@pytest.mark.rule("M2", "M8")
async def test_a_call_that_completes_while_its_client_is_away_has_its_result_at_the_resume(
    server: Server,
) -> None:
    # Row 4. Guard: delivery._over: a finished stream ends only when everything of it is written.
    streams = await server.initialized()
    stream, _, first = await cut_after_one(streams)
    await streams.backend.say(note(step=2), related=1)
    await streams.backend.say(result(1, done=True))
    stream = await streams.listen(first)
    assert await steps(stream, 1) == [2]
    assert await stream.message() == result(1, done=True)
    assert await stream.end() == []


@pytest.mark.rule("M1", "M2")
async def test_of_two_calls_a_resumed_one_gets_its_own_events_only(server: Server) -> None:
    # Row 5. Guard: feed._filtered.
    streams = await server.initialized()
    _, _, first = await cut_after_one(streams, 1)
    other = await streams.call(2)
    await streams.backend.take()
    ids = {first}
    for n in (2, 3):
        await streams.backend.say(note(step=n), related=1)
        await streams.backend.say(note(step=-n), related=2)
    await streams.backend.say(result(2), result(1))
    resumed = await streams.listen(first)
    own, others = await resumed.events(3), await other.events(3)
    assert [json.loads(e.data or b"") for e in own] == [note(step=2), note(step=3), result(1)]
    assert [json.loads(e.data or b"") for e in others] == [note(step=-2), note(step=-3), result(2)]
    ids |= {str(event.id) for event in own + others}
    assert len(ids) == 7, "IDs are unique across streams"
    assert await resumed.end() == await other.end() == []


@pytest.mark.rule("C4", "C6")
async def test_a_second_drop_before_any_new_event_resumes_from_the_old_cursor() -> None:
    # Row 6. Guard: incoming.Incoming.delivered: nothing but a processed event moves the cursor.
    waiting = Waiting()

    def drop(link: Link, count: int) -> None:
        if count in (2, 3):
            link.arm(Direction.TO_CLIENT, b"retry: ", Link.reset)  # it was primed, and got no event

    stated = Stated(drop)
    async with running(waiting.server) as server, behind(server.port, stated) as proxy:
        connection = gapless.connect(url_of(proxy), upgrade="never", retry=QUICK)
        async with Client(connection, mode="legacy") as client:
            moved = asyncio.Event()

            async def progressed(progress: float, total: float | None, message: str | None) -> None:
                moved.set()

            call = asyncio.create_task(client.call_tool("wait", {}, progress_callback=progressed))
            await soon(moved.wait())
            cut_streams(proxy, Link.reset)
            await stated.times(4)
            waiting.go.set()
            assert told(await soon(call)) == "waited"
    first, second, third, fourth = stated.cursors
    assert seq_of(first) < seq_of(second)
    assert second == third == fourth


@both_views
@pytest.mark.rule("C6")
async def test_a_call_cut_before_it_said_anything_has_a_cursor_to_resume_from(
    serve: Serve, view: str
) -> None:
    # Row 7. Guard: delivery._opening, `encode_prime`.
    server = await serve()
    if view == "stream":
        streams = await server.initialized()
        stream, backend, resume = await streams.call(1), streams.backend, streams.listen
    else:
        session = await server.started()
        assert (await session.post(2, request(1))).status == 202
        stream, backend, resume = await session.events(session.start), session.backend, session.events
    await backend.take()
    cursor = (await stream.block()).id
    stream.drop()
    assert cursor is not None
    resumed = await resume(cursor)
    await backend.say(result(1, late=True))
    assert await resumed.message() == result(1, late=True)


# Questions, order, identity ----------------------------------------------------------------------------


@pytest.mark.rule("M1")
async def test_a_question_asked_before_any_get_rides_on_its_calls_stream() -> None:
    # Row 8. Guard: streams.Streams.route.
    async with running(ladder) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        stream = await client.call(1, name="ask", arguments={})
        question = await stream.message()
        assert question["method"] == "elicitation/create"
        answer = result(question["id"], action="accept", content={"metres": 3})
        assert (await client.post(answer)).status == 202
        found = await stream.message()
        assert found["result"]["content"][0]["text"] == "a ladder of 3 m"
        assert await stream.end() == []


@pytest.mark.rule("M1", "L1")
async def test_progress_and_a_question_of_a_process_behind_are_relayed_in_order_to_their_call() -> None:
    # Row 9. Guard: streams.Streams.route; live.Live's one order of commits.
    async with running([*CHILD, "plain"]) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        for id in (1, 2):
            stream = await client.call(id, name="ask", _meta={"progressToken": f"token {id}"})
            progress, question = await stream.message(), await stream.message()
            assert progress["params"] == {"progressToken": f"token {id}", "progress": 1}
            assert (question["id"], question["params"]["message"]) == (f"question {id}", f"for {id}")
            assert (await client.post(result(question["id"], said=f"to {id}"))).status == 202
            progress, answer = await stream.message(), await stream.message()
            assert progress["params"] == {"progressToken": f"token {id}", "progress": 2}
            assert answer == result(id, answer={"said": f"to {id}"})
            assert await stream.end() == []


@both_views
@pytest.mark.rule("L1")
async def test_notifications_of_the_same_instant_keep_their_order(serve: Serve, view: str) -> None:
    # Row 10. Guard: outbox.Outbox.append: an ID is a count, and events are delivered by it.
    server = await serve()
    stream, backend, resume = await calling(server, view)
    start = (await stream.block()).id
    for n in range(100):
        await backend.emit(note(step=n), 1)
    assert await steps(stream, 100) == list(range(100))
    stream.drop()
    assert await steps(await resume(start), 100) == list(range(100))


@both_views
@pytest.mark.rule("C3", "C5")
async def test_an_event_id_of_another_session_is_refused_and_leaks_nothing(serve: Serve, view: str) -> None:
    # Row 11. Guard: session.Session._match_link.
    server = await serve()
    if view == "stream":
        one, other = await server.initialized(), await server.initialized()
        mine, theirs = await one.call(1), await other.call(1)
        await one.backend.say(note(secret="mine"), related=1)
        await other.backend.say(note(secret="theirs"), related=1)
        answers = [await other.get((await mine.event()).id)]
        assert b"theirs" in ((await theirs.event()).data or b"")
    else:
        one, other = await server.started(), await server.started()
        await one.backend.say(note(secret="mine"))
        await other.backend.say(note(secret="theirs"))
        cursor = str((await (await one.events(one.start)).event()).id)
        answers = [
            await other.get(cursor),
            await other.upgrade(cursor),
            await other.ack(cursor),
            await other.denied(cursor),
        ]
    for answer in answers:
        assert answer.reason == (409, "cursor-foreign")
        assert b"mine" not in answer.body
        assert b"theirs" not in answer.body


@pytest.mark.rule("M6", "M8")
async def test_a_json_rpc_id_in_flight_is_refused_and_1_is_not_the_string_1(server: Server) -> None:
    # Row 12. Guard: session.Session._take_message, `envelope.id in self.inbox.open`.
    streams = await server.initialized()
    number, text = await streams.call(1), await streams.call("1")
    for id in (1, "1"):
        again = await streams.post(request(id))
        assert again.reason == (409, "duplicate-id")
        assert again.json()["id"] == id
        assert type(again.json()["id"]) is type(id)
    cancel = note("notifications/cancelled", requestId=1)
    assert (await streams.post(cancel)).status == 202
    assert await number.end() == [] or number.finished
    await streams.backend.say(result("1", of="the string"))
    assert await text.message() == result("1", of="the string")
    assert await text.end() == []


ODD_IDS = [
    "",
    "0",
    "-1",
    "gapless-1",
    "gapless/1/0",
    "g1.1",
    "null",
    "1.0." + LINK,
    "__proto__",
    "é\u2028",
    0,
    -1,
]


@pytest.mark.rule("M6", "N3")
async def test_an_id_that_looks_like_an_internal_name_is_an_id_like_any_other(server: Server) -> None:
    # Row 12. Guard: inbox.Inbox.open, keyed by the ID itself and nothing made of it.
    streams = await server.initialized()
    calls = [(id, await streams.call(id)) for id in ODD_IDS]
    taken = [(await streams.backend.take())["id"] for _ in ODD_IDS]
    assert taken == ODD_IDS
    for id in reversed(ODD_IDS):
        await streams.backend.say(result(id, of=str(id)))
    for id, stream in calls:
        assert await stream.message() == result(id, of=str(id))


# Cursors -----------------------------------------------------------------------------------------------

MALFORMED = {
    "empty": "",
    "blanks": "   ",
    "negative": "-1",
    "a negative ID": "-1.0." + LINK,
    "leading zeros": "007.0." + LINK,
    "bare 2^63": str(2**63),
    "2^63": f"{2**63}.0.{LINK}",
    "2^64": f"{2**64}.0.{LINK}",
    "10 kB": "1.0." + LINK + "0" * 10_000,
    "10 kB of digits": "9" * 10_000,
    "embedded separators": f"1.0.{LINK}.2.0.{LINK}",
    "a comma": f"1.0.{LINK},2.0.{LINK}",
    "non-ASCII digits": "\u0661.0." + LINK,
    "full-width digits": "\uff11.0." + LINK,
    "a bare integer": "1",
}


async def handshake(session: Session, cursor: str) -> Answer:
    """A one-step handshake's denial; written by hand, for no library states a cursor like these."""
    wire = await session.server.wire()
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "mcp.v1"}
    await wire.send("GET", f"{session.base}/events", upgrade | key | {"Last-Event-ID": cursor})
    answer = await wire.answer()
    wire.drop()
    return answer


async def everywhere(session: Session, streams: Streams, cursor: str) -> dict[str, Answer]:
    """What a cursor is answered wherever one is taken."""
    return {
        "GET, session view": await session.get(cursor),
        "GET, stream view": await streams.get(cursor),
        "upgrade": await session.upgrade(cursor),
        "ack": await session.ack(cursor),
        "handshake": await handshake(session, cursor),
    }


@pytest.mark.parametrize("cursor", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.rule("C1", "C5", "U8")
async def test_a_cursor_that_is_none_is_malformed_wherever_it_is_stated(server: Server, cursor: str) -> None:
    # Row 13. Guard: cursor.parse_cursor.
    session, streams = await server.started(), await server.initialized()
    await session.backend.say(note(step=1))
    for where, answer in (await everywhere(session, streams, cursor)).items():
        assert answer.reason == (400, "malformed"), where
    assert await steps(await session.events(session.start), 1) == [1]


@pytest.mark.rule("C3", "C5", "L5", "S2")
async def test_a_cursor_of_elsewhere_or_ahead_or_evicted_is_told_so_wherever_it_is_stated(
    serve: Serve, tmp_path: Path
) -> None:
    # Row 13. Guard: session.Session._prove and _prove_on_stream.
    server, old = await serve(retain_events=64), await serve()
    session, streams = await server.started(), await server.initialized()
    former, another = await old.started(), await server.started()
    for each in (former, another):
        await each.backend.say(note(step=1))
    of_old_log = str((await (await former.events(former.start)).event()).id)
    of_other = str((await (await another.events(another.start)).event()).id)
    for backend in (session.backend, streams.backend):
        await backend.say(*(note(step=n) for n in range(1, 202)))
    evicted, ahead = f"2.0.{LINK}", f"{2**63 - 1}.0.{LINK}"
    for cursor, reason in [
        (of_old_log, "cursor-evicted"),
        (of_other, "cursor-evicted"),
        (evicted, "cursor-evicted"),
        (session.start, "cursor-evicted"),
        (ahead, "cursor-ahead"),
        (f"201.0.{LINK}", "cursor-foreign"),
    ]:
        for where, answer in (await everywhere(session, streams, cursor)).items():
            assert answer.reason == (409, reason), (cursor, where)
    fresh = await server.started()
    await fresh.backend.say(note(step=1))
    for cursor in (of_old_log, of_other):
        assert (await fresh.get(cursor)).reason == (409, "cursor-foreign")


@pytest.mark.rule("M2")
async def test_a_resume_at_the_last_id_of_a_finished_stream_ends_at_once(serve: Serve) -> None:
    # Row 14. Guard: delivery._over.
    server = await serve(keepalive=0.2)
    streams = await server.initialized()
    stream = await streams.call(1)
    await streams.backend.say(result(1))
    last = (await stream.event()).id
    again = await streams.listen(last)
    (primed,) = await again.end()
    assert (primed.id, primed.data) == (last, b"")
    assert b":\n\n" not in again.raw, "before a keep-alive was due"


# Connections that come and go --------------------------------------------------------------------------

PROMPT = 2.0
"""Seconds within which somebody who comes back is served, whatever became of the old connection (B6)."""


@pytest.mark.parametrize("held", ["a socket", "an event stream"])
@pytest.mark.rule("B6", "M3")
async def test_who_comes_back_is_served_while_the_old_connection_is_black_holed(
    server: Server, held: str
) -> None:
    # Row 15. Guard: live.Live._probe's time limit, session.Session._ask; M3's superseding in `_serve_stream`.
    async with behind(server.port) as proxy:
        through = Server(server.app, server.log, server.backends, proxy.port)
        if held == "a socket":
            session = await server.started()
            session.server = through
            assert isinstance(await session.knock(session.start), Socket)
            session.server = server
            backend, resume, cursor = session.backend, session.events, session.start
            before = 1  # that the door was passed
        else:
            streams = await server.initialized()
            streams.server = through
            stream = await streams.listen()
            cursor = (await stream.block()).id
            streams.server = server
            backend, resume, before = streams.backend, streams.listen, 0
        cut_streams(proxy, Link.black_hole)
        async with asyncio.timeout(PROMPT):
            resumed = await resume(cursor)
        await backend.say(note(step=1))
        await resumed.events(before)
        assert await steps(resumed, 1) == [1]
        assert not backend.closed.is_set()


@pytest.mark.rule("B6", "B7", "M3")
async def test_who_reconnects_right_after_a_close_meets_no_conflict(server: Server) -> None:
    # Row 16. Guard: M3's superseding in session.Session._serve_stream; B6: session.Session._ask.
    streams, session = await server.initialized(), await server.started()
    for _ in range(10):
        (await streams.listen()).drop()
        (await session.events(session.start)).drop()
        socket = await session.knock(session.start)
        assert isinstance(socket, Socket)
        socket.drop()
        (await session.events(session.start)).drop()
        socket = await session.bind((await session.ids())[-1])
        await socket.close()


@pytest.mark.rule("N2", "L2")
async def test_a_server_restarted_between_two_calls_goes_on_with_the_session(
    serve: Serve, tmp_path: Path
) -> None:
    # Row 17. Guard: sessions.Sessions._own, which restores a session from the log.
    path = tmp_path / "log.db"
    streams = await called(await serve(SqliteLog(path)))
    stream = await streams.call(1)
    await streams.backend.take()
    await streams.backend.say(result(1))
    await stream.message()
    server = await restarted(serve, path, streams)
    stream = await streams.call(2)
    backend = await recovered(server)
    assert (await backend.take())["id"] == 2
    await backend.say(result(2, after="the restart"))
    found = [await stream.message()]
    assert found == [result(2, after="the restart")]


@pytest.mark.parametrize("kind", ["standard", "ours"])
@pytest.mark.rule("M5", "L7")
async def test_a_server_restarted_without_its_log_says_so_and_its_client_initializes_anew(kind: str) -> None:
    # Row 17. Guard: sessions._unknown, a 404.
    async with running(ladder) as server:
        port = server.port
        client = Client(client_of(kind, url_of(server)), mode="legacy")
        await client.__aenter__()
        assert told(await client.call_tool("climb", {"steps": 1, "delay": 0})) == "climbed 1 steps"
    async with running(ladder, port=port) as server:
        forgotten = {"Mcp-Session-Id": "x" * 43, "MCP-Protocol-Version": "2025-11-25"}
        answer = await server.ask("POST", "/mcp", JSON | BOTH | forgotten, request(1))
        assert answer.reason == (404, "session-unknown")
        with pytest.raises(MCPError):
            await soon(client.call_tool("climb", {"steps": 1, "delay": 0}))
        await client.__aexit__(None, None, None)
        async with Client(client_of(kind, f"http://127.0.0.1:{port}/mcp"), mode="legacy") as again:
            assert told(await again.call_tool("climb", {"steps": 1, "delay": 0})) == "climbed 1 steps"


async def until(seen: asyncio.Queue[str], words: str) -> str:
    """The next of what was seen that has these words in it."""
    while words not in (what := await seen.get()):
        pass
    return what


@pytest.mark.rule("L7")
async def test_a_client_ends_at_the_first_404_that_says_its_session_is_unknown() -> None:
    # Row 17. Guard: client.Client._refused, which ends at what leads to a new session.
    seen = asyncio.Queue[str]()
    async with AsyncExitStack() as stack:
        async with running(ladder) as server:
            connection = gapless.connect(
                url_of(server),
                upgrade="never",
                retry=Retry(first=0.02, most=0.1, attempts=1000),
                observe=lambda observation: seen.put_nowait(observation.what),
            )
            await stack.enter_async_context(connection)
            await soon(until(seen, "streaming"))
        async with running(ladder, port=server.port):
            assert await soon(until(seen, "404")) == "listening → over (404 session-unknown)"
            assert connection.error is not None
            assert connection.error.code == "session-unknown"


@pytest.mark.parametrize("status", [404, 502])
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.rule("L7", "S5")
async def test_a_proxys_own_404_or_502_twice_over_costs_no_session(status: int, method: str) -> None:
    # Row 18. Guard: client.Client._refused and sending.Sending.refused: an answer that is not of this
    # protocol ends nothing; outgoing.Outgoing, which keeps what is unreceived.
    waiting, answered = Waiting(), itertools.count(1)

    def answer(link: Link) -> None:
        if link.request.startswith(method) and armed.is_set() and next(answered) <= 2:
            link.answer(status, "text/plain", b"nothing to see here")

    armed = asyncio.Event()
    async with running(waiting.server) as server, behind(server.port, answer) as proxy:
        connection = gapless.connect(url_of(proxy), upgrade="never", retry=QUICK)
        async with Client(connection, mode="legacy") as client:
            session = connection.session
            await client.list_tools()  # nothing is under way
            armed.set()
            call = asyncio.create_task(client.call_tool("wait", {}))
            if method == "GET":
                await soon(waiting.begun.wait())
                cut_streams(proxy, Link.reset)
            waiting.go.set()
            assert told(await soon(call)) == "waited"
            assert connection.session == session
            assert next(answered) > 2


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25"])
@pytest.mark.rule("C8", "C6")
async def test_a_silent_call_outlives_a_proxy_that_cuts_what_is_idle(serve: Serve, revision: str) -> None:
    # Row 19. Guard: delivery.poll, the keep-alive; wire.serve_events, which sends its headers at once.
    server = await serve(keepalive=0.1)
    streams = await server.initialized(revision)
    async with behind(server.port) as proxy:
        idle = Idle(proxy, 0.5)
        streams.server = Server(server.app, server.log, server.backends, proxy.port)
        post, get = await streams.call(1), await streams.listen()
        replayed = await streams.call(2)
        await streams.backend.say(note(step=1), related=2)
        cursor = (await replayed.event()).id
        replayed.drop()
        replay = await streams.listen(cursor)
        for _ in range(10):  # twice what the proxy suffers
            for stream in (post, get, replay):
                await stream.beat()
        assert idle.cut == 0
        await streams.backend.say(result(2), result(1))
        assert await post.message() == result(1)
        assert await replay.message() == result(2)
        idle.stop()


@both_views
@pytest.mark.rule("L3", "S5")
async def test_a_client_that_stops_reading_costs_no_memory_and_no_other_client(
    serve: Serve, tmp_path: Path, view: str
) -> None:
    # Row 20. Guard: wire.serve_events, whose `write` awaits `send`: a slow reader costs a number, no queue.
    server = await serve(SqliteLog(tmp_path / "log.db", synchronous="off", cache_bytes=2**20))
    other = await server.started()
    if view == "stream":
        streams = await server.initialized()
        stalled, backend, resume = await streams.call(1), streams.backend, streams.listen
    else:
        session = await server.started()
        stalled, backend, resume = await session.events(session.start), session.backend, session.events
    start = (await stalled.block()).id
    reader = await other.events(other.start)
    stalled.stall()
    pad = "x" * 2**19
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(1, 73):
            await backend.say(note(step=n, pad=pad), related=1)
            if n % 6 == 0:
                await other.backend.say(note(step=n))
                assert await steps(reader, 1) == [n]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 36 MiB were said, of which the kernel holds some 4 at most; the log's cache holds another.
    assert after - before < 3 * 2**20, "of 30 MiB that are unread"
    stalled.drop()
    assert await steps(await resume(start), 72) == list(range(1, 73))


HOLDER = """
import socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.sendall(sys.argv[2].encode())
print(line.recv(1000).split()[1].decode(), flush=True)
while line.recv(1000):
    pass
"""


@asynccontextmanager
async def lifeline() -> AsyncGenerator[tuple[list[str], asyncio.Event]]:
    """The command of a child, and an event for when that is gone."""
    gone = asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    lines = await asyncio.start_server(watch, "127.0.0.1", 0)
    async with lines:
        yield [*CHILD, "plain", str(lines.sockets[0].getsockname()[1])], gone


@pytest.mark.rule("L7", "B9")
async def test_a_client_killed_while_it_holds_a_get_leaves_no_child_behind() -> None:
    # Row 21. Guard: sessions.Sessions._look_after, which expires. Then both live.Live.end and
    # sessions.Sessions._let_go close the backend; tests/server/test_lifecycle.py shows each alone.
    async with lifeline() as (command, gone), running(command, session_expiry=1.0) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        fields = {"Host": server.host, "Accept": "text/event-stream"} | client.headers
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", HOLDER, str(server.port), f"GET /mcp HTTP/1.1\r\n{head}\r\n"),
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert await soon(holder.stdout.readline()) == b"200\n"
        assert not gone.is_set()
        holder.kill()
        await soon(holder.wait())
        await soon(gone.wait())


@pytest.mark.parametrize("held", ["an event stream", "a socket"])
@pytest.mark.rule("C8", "B9")
async def test_a_client_that_is_gone_without_a_word_leaves_no_child_behind(held: str) -> None:
    # Row 21. Guard: delivery._forsaken: a connection that only seems to live keeps no session for good.
    async with (
        lifeline() as (command, gone),
        running(command, session_expiry=1.0, keepalive=0.05) as server,
        behind(server.port) as proxy,
    ):
        through = Server(server.app, server.log, server.backends, proxy.port)
        if held == "a socket":
            session = await server.open()
            assert (await session.post(1, HELLO)).status == 202
            await (await session.events(session.start)).message()
            session.server = through
            await (await session.bind((await session.ids())[-1])).cross()
        else:
            client = Unscripted(server, "2025-11-25")
            await client.initialize()
            client.server = through
            await (await client.listen()).beat()
        assert not gone.is_set()
        assert cut_streams(proxy, Link.black_hole) == 1  # neither bytes nor an end pass any more
        await soon(gone.wait())
        assert all(link.open for link in proxy.links)


@pytest.mark.rule("B9")
async def test_idleness_ends_a_thousand_abandoned_sessions_and_none_that_runs_a_call(serve: Serve) -> None:
    # Row 22. Guard: session.Session.expired, `inbox.working`; sessions.Sessions._look_after.
    server = await serve(session_expiry=0.4)
    streams = await server.initialized()
    _, _, cursor = await cut_after_one(streams)
    last = await server.open()
    for _ in range(999):
        last = await server.open()
    async with asyncio.timeout(10):
        # A request that opens no connection, and so does not keep the session.
        while (answer := await server.ask("PUT", last.base)).status != 404:
            pass
    assert answer.data["reason"] == "session-expired"
    assert len(server.app.sessions.all()) == 1, "the one that runs a call"  # type: ignore[arg-type]
    await streams.backend.say(result(1, late=True))
    assert await (await streams.listen(cursor)).message() == result(1, late=True)


@pytest.mark.rule("L4", "C5")
async def test_ten_thousand_calls_leave_a_bounded_log(serve: Serve) -> None:
    # Row 23. Guard: outbox.Outbox.evict.
    server = await serve(retain_events=500)
    session = await server.started()

    async def answer() -> None:
        while True:
            message = await session.backend.take()
            await session.backend.emit(result(message["id"], tools=[]))

    answering = asyncio.create_task(answer())
    stream = await session.events(session.start)
    number, first = 1, None
    for _ in range(20):
        blocks = [block_of(request(n, "tools/list"), n) for n in range(number + 1, number + 501)]
        assert (await session.post_blocks(b"".join(blocks))).status == 202
        for event in await stream.events(500):
            number += 1
            assert json.loads(event.data or b"")["id"] == number
            first = first or event.id
        stored = await server.log.load(key_of(session.token))
        assert stored is not None
        assert stored.committed - stored.floor <= 2 * 500
    answering.cancel()
    assert (await session.get(first)).reason == (409, "cursor-evicted")


@pytest.mark.parametrize(("retained", "covered"), [(1000, True), (64, False)])
@pytest.mark.rule("M2", "C5", "S2")
async def test_of_150_steps_a_resume_from_the_10th_has_all_or_is_refused(
    serve: Serve, retained: int, covered: bool
) -> None:
    # Row 23. Guard: session.Session._prove_on_stream.
    server = await serve(retain_events=retained)
    streams = await server.initialized()
    stream = await streams.call(1)
    await streams.backend.say(*(note(step=n) for n in range(1, 11)), related=1)
    tenth = (await stream.events(10))[-1].id
    stream.drop()
    await streams.backend.say(*(note(step=n) for n in range(11, 151)), related=1)
    if covered:
        assert await steps(await streams.listen(tenth), 140) == list(range(11, 151))
    else:
        assert (await streams.get(tenth)).reason == (409, "cursor-evicted")


@pytest.mark.parametrize("manner", ["hangs up", "ends its streams"])
@pytest.mark.rule("S5", "L7")
async def test_a_server_that_accepts_and_ends_at_once_is_backed_off_from_and_given_up_on(
    monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    # Row 24. Guard: client.Client._rest; driver.Driver._look, which jitters.
    monkeypatch.setattr(random.Random, "random", lambda _: 1.0)
    asked: list[float] = []
    loop = asyncio.get_running_loop()

    def end(link: Link) -> None:
        if link.request.startswith("GET") or manner == "hangs up":
            asked.append(loop.time())
            if manner == "hangs up":
                link.close()
            else:
                link.answer(200, "text/event-stream", b"")

    retry = Retry(first=0.05, most=0.2, attempts=5)
    async with running(ladder) as server, behind(server.port, end) as proxy:
        connection = gapless.connect(url_of(proxy), upgrade="never", retry=retry)
        with pytest.raises((MCPError, ExceptionGroup)):
            async with Client(connection, mode="legacy"):
                pass
    assert connection.error is not None
    assert connection.error.code == "gave-up"
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    for gap, least in zip(gaps[-4:], (0.05, 0.1, 0.2, 0.2), strict=True):
        assert gap >= 1.5 * least, (gaps, "each half as long again, as the jitter has it")


async def reconnects(retry: bytes) -> float:
    """How long our client stays away from a stream that said this before it ended."""
    asked: list[float] = []
    loop = asyncio.get_running_loop()

    def say(link: Link, count: int) -> None:
        asked.append(loop.time())
        if count == 2:
            cursor = link.headers["last-event-id"].encode()
            link.answer(200, "text/event-stream", b"id: %s\nretry: %s\ndata: \n\n" % (cursor, retry))

    stated = Stated(say)
    async with running(ladder) as server, behind(server.port, stated) as proxy:
        connection = gapless.connect(url_of(proxy), upgrade="never", retry=QUICK)
        async with Client(connection, mode="legacy"):
            cut_streams(proxy, Link.reset)
            await stated.times(3)
    return asked[2] - asked[1]


@pytest.mark.rule("C6")
async def test_a_client_waits_at_least_as_long_as_retry_says() -> None:
    # Row 25. Guard: client.Client._rest, `self._retry_floor`.
    assert await reconnects(b"2500") >= 2.5


@pytest.mark.parametrize("retry", [b"soon", b"-5", b"2.5e9", b"9999999999999999999999", b"", "٣".encode()])
@pytest.mark.rule("W4", "S5")
async def test_a_retry_that_is_no_number_of_milliseconds_is_ignored(retry: bytes) -> None:
    # Row 25. Guard: block.BlockDecoder._field, `isdigit`.
    await reconnects(retry)  # in time, and with no error


@pytest.mark.parametrize("kind", ["standard", "ours"])
@pytest.mark.rule("C6", "M5")
async def test_what_primes_a_stream_is_never_taken_for_a_message(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Row 26. Guard: client.Client._block takes a first block for priming; delivery._opening: empty `data:`.
    faults: list[Exception] = []

    async def handle(message: Any) -> None:
        if isinstance(message, Exception):
            faults.append(message)

    async with running(ladder) as server:
        async with Client(client_of(kind, url_of(server)), mode="legacy", message_handler=handle) as client:
            assert told(await client.call_tool("climb", {"steps": 3, "delay": 0})) == "climbed 3 steps"
    assert faults == []
    assert [r.message for r in caplog.records if "pars" in r.message.lower()] == []


@pytest.mark.parametrize(("revision", "primes"), [("2025-03-26", 0), ("2025-06-18", 0), ("2025-11-25", 1)])
@pytest.mark.rule("M5", "C6")
async def test_streams_of_clients_older_than_2025_11_25_hold_nothing_that_is_no_message(
    server: Server, revision: str, primes: int
) -> None:
    # Row 26. Guard: revisions.primes.
    streams = await server.initialized(revision)
    for stream in (await streams.call(1), await streams.listen()):
        await streams.backend.say(note(step=1), note(step=2), related=1)
        blocks = []
        while len(blocks) < primes or not blocks or not blocks[-1].data:
            blocks.append(await stream.block())
        assert [block.data for block in blocks[:-1]] == [b""] * primes
        assert stream.raw.count(b"retry:") == primes
        await streams.backend.say(note(step=3))
        stream.drop()


# Bytes -------------------------------------------------------------------------------------------------

BYTES = {
    "U+2028 and U+2029": "\u2028\u2029".encode(),
    "U+0085": "\u0085".encode(),
    "four bytes": "\U0001f9d7".encode(),
    "escapes": b"\\u2028\\ud83e\\uddd7\\u0000\\n\\r\\/",
}


def holding(id: int, raw: bytes, method: bytes = b"tools/call") -> bytes:
    """A request that holds these bytes in a string."""
    return b'{"jsonrpc":"2.0","id":%d,"method":"%s","params":{"text":"%s"}}' % (id, method, raw)


@pytest.mark.parametrize("raw", BYTES.values(), ids=BYTES)
@pytest.mark.rule("W1", "W4")
async def test_characters_that_break_lines_elsewhere_pass_byte_for_byte(server: Server, raw: bytes) -> None:
    # Row 27. Guard: block.BlockDecoder, which splits at nothing but CR and LF; nor does door, of bytes.
    answer = b'{"jsonrpc":"2.0","id":%d,"result":{"text":"%s"}}'
    streams, session = await server.initialized(), await server.started()
    stream = await server.stream("POST", "/mcp", JSON | BOTH | streams.headers, holding(1, raw))
    await session.post(2, holding(1, raw))
    events = await session.events(session.start)
    for backend, reader in ((streams.backend, stream), (session.backend, events)):
        await backend.take()
        assert backend.sent[-1] == holding(1, raw)
        await backend.say(answer % (1, raw))
        assert (await reader.event()).data == answer % (1, raw)
    events.drop()
    socket = await session.bind((await session.ids())[-1])
    await socket.cross()
    await socket.say(3, holding(2, raw))
    await session.backend.take()
    assert session.backend.sent[-1] == holding(2, raw)
    await session.backend.say(answer % (2, raw))
    assert (await socket.event()).data == answer % (2, raw)
    several = [holding(3, raw), holding(4, raw)]
    blocks = b"".join(block_of(message, number) for number, message in enumerate(several, 4))
    assert (await session.post_blocks(blocks)).status == 202
    for _ in several:
        await session.backend.take()
    assert session.backend.sent[-2:] == several


BAD = {
    "a lone surrogate": b'"\\ud800"',
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "invalid UTF-8": b'"\xff\xfe"',
    "deep nesting": b"[" * 100_000 + b"]" * 100_000,
    "a raw control character": b'"\x01"',
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.rule("W4", "L6", "S6")
async def test_what_is_no_json_of_one_line_is_an_error_on_that_request_alone(
    server: Server, value: bytes
) -> None:
    # Row 27. Guard: jsonrpc.one_line and peek; session.Session._take_problem.
    bad = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"value":%s}}' % value
    streams, session = await server.initialized(), await server.started()
    id = None if value in (BAD["deep nesting"], BAD["a raw control character"]) else 7
    answer = await server.ask("POST", "/mcp", JSON | BOTH | streams.headers, bad)
    assert answer.reason == (400, "malformed")
    assert answer.json()["id"] == id, "if it can be read"
    assert (await session.post(2, bad)).reason == (400, "malformed")
    if id is not None:
        events = await session.events(session.start)
        error = await events.message()
        assert (error["id"], error["error"]["data"]["reason"]) == (7, "malformed")
        events.drop()
    socket = await session.bind((await session.ids() or [session.start])[-1])
    await socket.cross()
    if value != BAD["invalid UTF-8"]:  # of which no text frame can be made
        await socket.send(b"id: 3\ndata: " + bad.replace(b"7", b"8", 1) + b"\n\n")
        while (await socket.block()).event != "refused":
            pass
        number = 4
    else:
        number = 3
    await socket.say(number, request(9))
    assert (await session.backend.take())["id"] == 9
    assert len(session.backend.sent) == 2, "nothing of what was refused"
    call = await streams.call(9)
    assert (await streams.backend.take())["id"] == 9
    call.drop()


@pytest.mark.parametrize("name", ["lone surrogate", "NaN", "invalid UTF-8", "deep nesting"])
@pytest.mark.rule("W4", "L7")
async def test_what_a_process_answers_that_is_no_json_is_an_error_on_that_request_alone(name: str) -> None:
    # Row 27. Guard: stdio.StdioBackend, which answers for a line that is none.
    async with running([*CHILD, "plain"]) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        stream = await client.call(1, name=name)
        assert "error" in await stream.message()
        assert await stream.end() == []
        assert await (await client.call(2, name="hello")).message() == result(2, echo="hello")


def lines(data: bytes) -> bytes:
    """JSON over several `data:` lines."""
    return b"\ndata: ".join(part + b"," for part in data.split(b",")).removesuffix(b",")


FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "LF": lambda block: block,
    "CR": lambda block: block.replace(b"\n", b"\r"),
    "CRLF": lambda block: block.replace(b"\n", b"\r\n"),
    "mixed": lambda block: block.replace(b"\n", b"\r\n", 1).replace(b"\n\n", b"\r\n\r"),
    "BOM": lambda block: b"\xef\xbb\xbf" + block,
    "NUL in an ID": lambda block: b"id: 9\x0099\n" + block,
    "a NUL ID after it": lambda block: block.replace(b"\ndata", b"\nid: 9\x00\ndata", 1),
    "comments": lambda block: b": hello\n:\n" + block,
    "an unknown field": lambda block: b"colour: blue\nempty\n" + block,
    "no space": lambda block: block.replace(b": {", b":{"),
    "an unterminated tail": lambda block: block + b"id: 99\ndata: {",
}


@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
@pytest.mark.rule("W4")
async def test_every_framing_of_an_event_stream_is_read_the_same_from_a_client(
    server: Server, framing: Callable[[bytes], bytes]
) -> None:
    # Row 28. Guard: block.BlockDecoder.
    session = await server.started()
    body = framing(block_of(request(1, text="\U0001f9d7"), 2))
    tail = framing is FRAMINGS["an unterminated tail"]
    answer = await session.post_blocks(body)
    assert answer.status == 202, answer
    assert (await session.backend.take())["params"] == {"text": "\U0001f9d7"}
    # Split at every byte, over a body that is written byte by byte.
    body = framing(block_of(request(2, text="\U0001f9d7"), 3))
    wire = await server.wire()
    fields = BLOCKS | {"Mcp-Client": "p", "Content-Length": str(len(body))}
    await wire.send("POST", f"{session.base}/messages", fields)
    for n in range(len(body)):
        await wire.write(body[n : n + 1])
        await asyncio.sleep(0)
    assert (await wire.answer()).status == 202
    assert (await session.backend.take())["params"] == {"text": "\U0001f9d7"}
    socket = await session.bind((await session.ids() or [session.start])[-1])
    await socket.cross()
    await socket.send(framing(block_of(request(3, text="\U0001f9d7"), 4)))
    if tail:
        assert await socket.closed() == 4400, "a frame holds whole blocks"
    else:
        assert (await session.backend.take())["params"] == {"text": "\U0001f9d7"}


@pytest.mark.rule("W4", "L6")
async def test_several_data_lines_are_one_message_and_an_empty_id_is_none(server: Server) -> None:
    # Row 28. Guard: block.BlockDecoder._field.
    session = await server.started()
    text = encode(request(1, text="ab", more=1))
    assert (await session.post_blocks(b"id: 2\ndata: " + lines(text) + b"\n\n")).status == 202
    assert (await session.backend.take())["id"] == 1
    for empty in (b"id\n", b"id:\n", b"id: \n"):
        body = empty + b"data: " + encode(request(2)) + b"\n\n"
        assert (await session.post_blocks(body)).reason == (400, "malformed")
    assert (await session.post(3, request(2))).status == 202
    assert (await session.backend.take())["id"] == 2


REFRAMED: dict[str, Callable[[bytes], list[bytes]]] = {
    "CR": lambda body: [body.replace(b"\n", b"\r")],
    "CRLF": lambda body: [body.replace(b"\n", b"\r\n")],
    "byte by byte, CRLF": lambda body: [bytes([b]) for b in body.replace(b"\n", b"\r\n")],
    "mixed": lambda body: [body.replace(b"\n\n", b"\r\n\r").replace(b"\ndata", b"\r\ndata")],
    "BOM": lambda body: [b"\xef\xbb\xbf" + body if b"retry: " in body else body],
    "a NUL ID": lambda body: [body.replace(b"\ndata", b"\nid: 9\x00\ndata")],
    "comments and unknown fields": lambda body: [b": x\nfoo: bar\n\n" + body],
}


@pytest.mark.parametrize("reframe", REFRAMED.values(), ids=REFRAMED)
@pytest.mark.rule("W4", "C7")
async def test_every_framing_of_an_event_stream_is_read_the_same_by_our_client(
    reframe: Callable[[bytes], list[bytes]],
) -> None:
    # Row 28. Guard: block.BlockDecoder.
    tail = b'id: 99.0.0123456789abcdef\ndata: {"jsonrpc"'  # never ended by a blank line
    seen: list[float] = []

    async def progressed(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async with running(ladder, wrap=partial(Reframed, reframe=reframe, tail=tail)) as server:
        connection = gapless.connect(url_of(server), upgrade="never", retry=QUICK)
        async with Client(connection, mode="legacy") as client:
            climb = client.call_tool("climb", {"steps": 5, "delay": 0}, progress_callback=progressed)
            assert told(await soon(climb)) == "climbed 5 steps"
        assert connection.error is None
    assert seen == [1, 2, 3, 4, 5]


LIMIT = 4096


def padded(make: Callable[[str], dict[str, Any]], size: int) -> bytes:
    """A message of so many bytes."""
    return encode(make("x" * (size - len(encode(make(""))))))


@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.rule("W5", "L6")
async def test_a_clients_message_passes_up_to_the_limit_and_above_it_is_refused_alone(
    serve: Serve, by: int
) -> None:
    # Row 29. Guard: intake.message_input, `len(data) > limit`.
    server = await serve(max_message_bytes=LIMIT)
    streams, session = await server.initialized(), await server.started()
    message = padded(lambda pad: request(1, pad=pad), LIMIT + by)
    socketed = padded(lambda pad: request(2, pad=pad), LIMIT + by)
    wire = await server.wire()
    await wire.send("POST", "/mcp", JSON | BOTH | streams.headers, message)
    head = await wire.head()
    posted = await session.post(2, message)
    socket = await session.bind((await session.ids() or [session.start])[-1])
    await socket.cross()
    await socket.send(b"id: 3\ndata: " + socketed + b"\n\n")
    if by <= 0:
        assert head.status == 200
        assert posted.status == 202
        for backend, expected in ((streams.backend, [message]), (session.backend, [message, socketed])):
            for each in expected:
                await backend.take()
                assert each in backend.sent
    else:
        assert head.status == 413
        assert posted.reason == (413, "too-large")
        blocks = [await socket.block(), await socket.block()]
        assert [block.event for block in blocks if block.id is None and block.event == "refused"] == [
            "refused"
        ]
    # One request was refused; the session goes on.
    await socket.say(4, request(3))
    assert (await session.backend.take())["id"] == 3
    stream = await streams.call(3)
    assert (await streams.backend.take())["id"] == 3
    stream.drop()


@both_views
@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.rule("W5", "L7")
async def test_a_servers_message_passes_up_to_the_limit_and_above_it_is_an_error_on_its_request(
    serve: Serve, view: str, by: int
) -> None:
    # Row 29. Guard: carrier.Carrier.emit, the limit on what a backend says.
    server = await serve(max_message_bytes=LIMIT)
    message = padded(lambda pad: result(1, pad=pad), LIMIT + by)
    if view == "stream":
        streams = await server.initialized()
        stream, backend = await streams.call(1), streams.backend
    else:
        session = await server.started()
        assert (await session.post(2, request(1))).status == 202
        stream, backend = await session.events(session.start), session.backend
    await backend.take()
    await backend.say(message)
    event = await stream.event()
    if by <= 0:
        assert event.data == message
    else:
        error = json.loads(event.data or b"")
        assert (error["id"], error["error"]["data"]["reason"]) == (1, "too-large")


@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.rule("W5", "L7")
async def test_a_line_of_a_process_passes_up_to_the_limit_and_above_it_is_an_error_on_its_request(
    by: int,
) -> None:
    # Row 29. Guard: stdio, `max_message_bytes`.
    async with running([*CHILD, "plain"], max_message_bytes=LIMIT) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        stream = await client.call(1, name="sized", size=LIMIT + by)
        event = await stream.event()
        if by <= 0:
            assert len(event.data or b"") == LIMIT + by
        else:
            assert "error" in json.loads(event.data or b"")
        assert await stream.end() == []
        assert await (await client.call(2, name="hello")).message() == result(2, echo="hello")


@pytest.mark.rule("W5", "L6", "S5")
async def test_a_call_above_the_limit_fails_and_is_not_sent_again_and_again(serve: Serve) -> None:
    # Row 29. Guard: sending.Sending, which drops what was refused as too large.
    posts: list[str] = []

    def count(link: Link) -> None:
        if link.request.startswith("POST") and link.request.endswith("/messages"):
            posts.append(link.request)

    async with running(ladder, max_message_bytes=LIMIT) as server, behind(server.port, count) as proxy:
        connection = gapless.connect(url_of(proxy), upgrade="never", retry=QUICK)
        async with Client(connection, mode="legacy") as client:
            await client.list_tools()
            before = len(posts)
            with pytest.raises(MCPError):
                await soon(client.call_tool("climb", {"steps": 1, "pad": "x" * 2 * LIMIT}))
            assert told(await soon(client.call_tool("climb", {"steps": 1, "delay": 0}))) == "climbed 1 steps"
            assert len(posts) - before <= 3


# Calls that end early, servers that do ------------------------------------------------------------------


@pytest.mark.rule("M8", "L7")
async def test_a_cancelled_call_ends_its_stream_frees_its_id_and_its_late_result_is_dropped(
    server: Server,
) -> None:
    # Row 30. Guard: inbox.Inbox.note_client and settle; session.Session._emitted, `request is None`.
    streams = await server.initialized()
    stream = await streams.call(1)
    await streams.backend.take()
    assert (await streams.post(note("notifications/cancelled", requestId=1))).status == 202
    assert [block.data for block in await stream.end()] in ([], [b""])
    assert (await streams.backend.take())["method"] == "notifications/cancelled"
    await streams.backend.say(result(1, late=True))
    again = await streams.call(1)
    await streams.backend.take()
    await streams.backend.say(result(1, late=False))
    assert await again.message() == result(1, late=False)
    listening = await streams.listen()
    await streams.backend.say(note(step=1))
    assert await steps(listening, 1) == [1], "and nothing of the late result"


@pytest.mark.rule("M8")
async def test_a_tool_whose_client_disconnects_runs_on_and_its_result_is_kept() -> None:
    # Row 31. Guard: wire.serve_events: a client that goes ends its delivery, nothing else.
    waiting = Waiting()
    async with running(waiting.server) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        stream = await client.call(1, name="wait", arguments={})
        cursor = (await stream.block()).id
        await soon(waiting.begun.wait())
        stream.drop()
        assert (await client.post(request(2, "ping"))).status == 200  # it has been noticed by then
        waiting.go.set()
        await soon(waiting.done.wait())
        answer = await (await client.listen(cursor)).message()
        assert answer["result"]["content"][0]["text"] == "waited"


@pytest.mark.rule("U8", "U6", "U1")
async def test_an_upgrade_that_fails_drains_no_event_and_changes_no_state(server: Server) -> None:
    # Row 32. Guard: door.SessionView._socket: every refusal comes before the commit point.
    session = await server.started()
    await session.backend.say(note(step=1), note(step=2), note(step=3))
    first, *_, last = await session.ids()
    target = f"{session.base}/events"
    failed = [
        await server.knock(target, {"Last-Event-ID": first}, subprotocols=("other",)),
        await server.knock(target, {"Last-Event-ID": first}, subprotocols=()),
        await server.knock(target, {"Last-Event-ID": f"2.0.{LINK}"}),
        await server.knock(target, {"Last-Event-ID": "junk"}),
        await server.knock(target),
        await server.knock(target, {"Last-Event-ID": first, "Origin": "http://evil.example"}),
        await server.knock(f"{target}?ticket=never-issued&cursor={first}"),
        await session.get(first, **{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}),
        await session.upgrade(first, protocol="other"),
        await session.upgrade(f"2.0.{LINK}"),
    ]
    for answer in failed:
        assert isinstance(answer, Answer)
        assert answer.status in (400, 403, 409, 426)
    assert await steps(await session.events(first), 2) == [2, 3]
    assert (await session.ids())[-1] == last, "nothing was appended"


@pytest.mark.parametrize("steps_", [1, 2])
@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost"])
@pytest.mark.rule("L6", "S6", "U8")
async def test_a_message_sent_during_the_handshake_is_delivered_once(lost: bool, steps_: Any) -> None:
    # Row 33. Guard: inbox.Inbox.judge: a repeat is not run again.
    runs: list[str] = []
    server_ = MCPServer("counting")

    @server_.tool()
    def run(name: str) -> str:
        """Note a run."""
        runs.append(name)
        return name

    knocking = asyncio.Event()
    held: list[Link] = []

    def hold(link: Link) -> None:
        if link.request.startswith("POST") and link.request.endswith("/messages"):
            link.repeat()  # as a proxy does that retries
        if link.upgraded and not held:
            held.append(link)
            if lost:
                link.arm(Direction.TO_CLIENT, b"HTTP/1.1 101", Link.black_hole, before=True)
            else:
                link.hold(Direction.TO_CLIENT)
            knocking.set()

    async with running(server_, probe_timeout=0.2) as server, behind(server.port, hold) as proxy:
        connection = gapless.connect(
            url_of(proxy), upgrade="never", retry=QUICK, answer_timeout=1.0, steps=steps_
        )
        async with Client(connection, mode="legacy") as client:
            await client.list_tools()
            connection.migrate()
            await soon(knocking.wait())
            calls = [asyncio.create_task(client.call_tool("run", {"name": str(n)})) for n in range(3)]
            if not lost:
                held[0].release(Direction.TO_CLIENT)
            assert [told(await soon(call)) for call in calls] == ["0", "1", "2"]
    assert sorted(runs) == ["0", "1", "2"]


@both_views
@pytest.mark.rule("C5", "C6", "L4", "S2")
async def test_a_cursor_from_before_any_event_is_good_and_past_retention_is_refused(
    serve: Serve, view: str
) -> None:
    # Row 34. Guard: outbox.Outbox.evict; session.Session._prove.
    server = await serve(retain_seconds=0.2, session_expiry=1.0)
    if view == "stream":
        streams = await server.initialized()
        stream, backend = await streams.call(1), streams.backend
        resume, ask, token = streams.listen, streams.get, streams.token
    else:
        session = await server.started()
        assert (await session.post(2, request(1))).status == 202
        stream, backend = await session.events(session.start), session.backend
        resume, ask, token = session.events, session.get, session.token
    start = (await stream.block()).id
    stream.drop()
    again = await resume(start)
    assert (await again.block()).id == start
    again.drop()
    await backend.say(note(step=1), related=1)
    async with asyncio.timeout(10):
        while True:
            stored = await server.log.load(key_of(token))
            assert stored is not None
            if stored.floor == stored.committed:
                break
            await asyncio.sleep(0)
    assert (await ask(start)).reason == (409, "cursor-evicted")


class Heard:
    """Counts the blocks that a client reads of each of its event streams."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self._changed = asyncio.Event()

    def __call__(self, seen: Observation) -> None:
        if seen.what.endswith("→ streaming"):
            self.streams.append(0)
        elif seen.what == "arrived":
            self.streams[-1] += 1
        self._changed.set()

    async def beyond(self, connection: gapless.Connection, streams: int) -> None:
        """Wait until this one of its streams has brought an event that the application has not taken."""
        async with asyncio.timeout(10):
            while (
                len(self.streams) < streams
                or self.streams[-1] < 3  # the first two are no events
                or connection.committed <= connection.cursor
            ):
                self._changed.clear()
                await self._changed.wait()


@pytest.mark.rule("C4", "S1")
async def test_a_client_with_a_slow_handler_that_reconnects_gets_nothing_twice_and_goes_not_back() -> None:
    # Row 35. Guard: incoming.Incoming.events, `handed`: what is in hand is not queued again.
    seen: list[float] = []
    stated, heard = Stated(), Heard()
    hello = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "slow", "version": "1"},
    }
    call = {"name": "climb", "arguments": {"steps": 30, "delay": 0.01}, "_meta": {"progressToken": 1}}
    said = [
        request(0, "initialize", **hello),
        note("notifications/initialized"),
        request(1, "tools/call", **call),
    ]
    async with running(ladder) as server, behind(server.port, stated) as proxy:
        connection = gapless.connect(url_of(proxy), upgrade="never", retry=QUICK, observe=heard)
        async with connection as (read, write):
            for message in said:
                await write.send(SessionMessage(jsonrpc_message_adapter.validate_python(message)))
            while not seen or seen[-1] != 30:
                taken: Any = await soon(read.receive())
                found = taken.message.model_dump()
                if found.get("method") == "notifications/progress":
                    seen.append(found["params"]["progress"])
                if seen == [1, 2, 3]:  # and takes nothing while the connection breaks
                    for streams in range(1, 5):
                        await heard.beyond(connection, streams)  # one is in hand, and comes again each time
                        cut_streams(proxy, Link.reset)
                    await heard.beyond(connection, 5)
    assert seen == list(range(1, 31))
    first, *positions = [seq_of(cursor) for cursor in stated.cursors]
    assert first < positions[0]
    assert positions == positions[:1] * 4, "nothing was taken meanwhile"


STOPS_WITHIN = 5.0


async def ended(pid: int) -> None:
    """Wait until a process is no more."""
    over, fd = asyncio.Event(), os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(fd, over.set)
    await over.wait()
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


def let_go(server: Server) -> None:
    """Close every connection to a server."""
    for drop in server.drops:
        with suppress(RuntimeError):
            drop()


@pytest.mark.rule("L2", "M2", "N2")
async def test_sigterm_with_every_kind_of_connection_open_ends_in_time_and_clients_resume(
    tmp_path: Path,
) -> None:
    # Row 36. Guard: cli.process, which drains; sessions.Sessions.drain.
    arguments = ("--log", f"sqlite:///{tmp_path}/log.db", "examples.ladder_server:server")
    async with serving(arguments) as (url, pid):
        server = Server(None, None, ScriptedBackends(), port_of(url))  # type: ignore[arg-type]
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        call = await client.call(
            1,
            name="climb",
            arguments={"steps": 10_000, "delay": 0.01},
            _meta={"progressToken": 1},
        )
        get = await client.listen()
        session = await server.open()
        socket = await session.bind(session.start)
        seen = [await call.event(), await call.event()]
        os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(STOPS_WITHIN):
            code = await socket.closed()
            await get.end()
            seen += [b for b in await call.end() if b.id is not None and b.data]
        assert code == 1012
        async with asyncio.timeout(STOPS_WITHIN):
            await ended(pid)
        let_go(server)
    async with serving(arguments) as (url, _):
        server = Server(None, None, ScriptedBackends(), port_of(url))  # type: ignore[arg-type]
        client.server = session.server = server
        rest = [block for block in await (await client.listen(seen[-1].id)).end() if block.data]
        said = [json.loads(block.data or b"") for block in [*seen, *rest]]
        assert [m["params"]["progress"] for m in said[:-1]] == list(range(1, len(said)))
        assert said[-1]["error"]["data"]["reason"] == "outcome-unknown"
        assert (await (await session.events(session.start)).event()).event == "upgrade-accepted"
        let_go(server)
        await asyncio.sleep(0)


@pytest.mark.rule("W4")
async def test_a_process_that_prints_a_banner_is_served_all_the_same() -> None:
    # Row 37. Guard: stdio, which skips what is no JSON-RPC.
    async with running([*CHILD, "banner"]) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        assert client.answer["result"]["serverInfo"]["name"] == "child"
        assert await (await client.call(1, name="hello")).message() == result(1, echo="hello")


@pytest.mark.rule("N2", "L7")
async def test_a_process_that_dies_in_initialize_is_an_error_on_it_at_once() -> None:
    # Row 37. Guard: recovery.lost.
    async with running([*CHILD, "dies in initialize"]) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        assert "error" in client.answer
        assert (await client.post(request(1))).reason == (404, "backend-lost")


@pytest.mark.parametrize("loss", ["restart", "supersede"])
@pytest.mark.rule("N2", "L7")
async def test_a_process_that_dies_in_a_call_is_an_error_on_that_call_at_once(loss: Any) -> None:
    # Row 37. Guard: recovery.lost; session.Session.settle_unknown.
    async with running([*CHILD, "plain"], on_backend_loss=loss) as server:
        client = Unscripted(server, "2025-11-25")
        await client.initialize()
        stream = await client.call(1, name="die")
        assert (await stream.message())["error"]["data"]["reason"] == "outcome-unknown"
        assert await stream.end() == []
        if loss == "restart":
            assert await (await client.call(2, name="hello")).message() == result(2, echo="hello")
        else:
            assert (await client.post(request(2))).reason == (404, "backend-lost")


MIDDLEWARE: dict[str, Callable[[Any], Any]] = {
    "gzip": partial(GZipMiddleware, minimum_size=0),
    "holds unless X-Accel-Buffering": partial(Holding, header=b"x-accel-buffering", value=b"no"),
    "holds unless no-transform": partial(Holding, header=b"cache-control", value=b"no-transform"),
}


@both_views
@pytest.mark.parametrize("wrap", MIDDLEWARE.values(), ids=MIDDLEWARE)
@pytest.mark.rule("C8")
async def test_middleware_that_compresses_or_holds_bodies_leaves_event_streams_alone(
    serve: Serve, wrap: Callable[[Any], Any], view: str
) -> None:
    # Row 38. Guard: wire._STREAMED.
    server = await serve(wrap=wrap)
    gzip = {"Accept-Encoding": "gzip"}
    streams, session = await server.initialized(), await server.started()
    opened = (
        [await streams.listen(**gzip), await streams.call(1)]
        if view == "stream"
        else [await session.events(session.start, **gzip)]
    )
    backend = streams.backend if view == "stream" else session.backend
    for related, stream in zip((None, 1), opened, strict=False):
        assert stream.head.all("content-encoding") == []
        await backend.say(note(step=1), related=related)
        assert await steps(stream, 1) == [1]


@pytest.mark.rule("M1", "M2")
async def test_nothing_follows_a_result_on_its_stream(server: Server) -> None:
    # Row 39. Guard: streams.Streams.route: what relates to a settled request goes to stream 0.
    streams = await server.initialized()
    listening = await streams.listen()
    stream = await streams.call(1, _meta={"progressToken": "t"})
    first = (await stream.block()).id
    await streams.backend.emit(result(1))
    await streams.backend.emit(note("notifications/progress", progressToken="t", step=1))
    await streams.backend.say(note(step=2), related=1)
    assert await stream.message() == result(1)
    assert await stream.end() == []
    assert await steps(listening, 2) == [1, 2]
    again = await streams.listen(first)
    assert [json.loads(block.data) for block in await again.end() if block.data] == [result(1)]


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("Origin", "https://evil.example", (403, "origin-forbidden")),
        ("Origin", "null", (403, "origin-forbidden")),
        ("Host", "evil.example", (421, "host-forbidden")),
        ("Host", "127.0.0.1.evil.example:80", (421, "host-forbidden")),
    ],
)
@pytest.mark.rule("U8")
async def test_a_bad_origin_or_a_foreign_host_is_refused_on_every_way_in(
    server: Server, field: str, value: str, refused: tuple[int, str]
) -> None:
    # Row 40. Guard: access.Access.check, asked by endpoint.Endpoint._admit.
    streams, session = await server.initialized(), await server.started()
    bad = {field: value}
    for method, target in [
        ("POST", "/mcp"),
        ("GET", "/mcp"),
        ("DELETE", "/mcp"),
        ("POST", "/mcp/session"),
        ("GET", f"{session.base}/events"),
        ("POST", f"{session.base}/messages"),
        ("POST", f"{session.base}/upgrade"),
        ("POST", f"{session.base}/ack"),
        ("DELETE", session.base),
    ]:
        answer = await server.ask(method, target, streams.headers | JSON | bad, b"{}")
        assert answer.reason == refused, (method, target)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "mcp.v1"}
    cursor = {"Last-Event-ID": session.start}
    answer = await server.ask("GET", f"{session.base}/events", upgrade | key | cursor | bad)
    assert answer.reason == refused
    assert isinstance(await session.knock(session.start), Socket), "and nothing has changed"
