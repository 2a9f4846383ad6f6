"""B6–B8: a bound session, its probe, its takeover, and what comes after its socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gapless.protocol.cursor import START
from gapless.protocol.inputs import Handshake, Listen, Refused, Serving
from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.session import View
from tests.server.harness import (
    Answer,
    EventStream,
    Serve,
    Server,
    Session,
    Socket,
    block_of,
    note,
    on_both_servers,
    request,
    result,
    seq_of,
    soon,
)

PROBE_ACK = block_of({}, event="probe-ack")

ASK: dict[str, Callable[[Session], Awaitable[Any]]] = {
    "an event stream": lambda session: session.get(session.start),
    "an event stream without a cursor": lambda session: session.get(),
    "an upgrade": lambda session: session.upgrade(session.start, "another"),
    "a handshake": lambda session: session.knock(session.start),
}


async def _bound(server: Server) -> tuple[Session, Socket]:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    return session, socket


@on_both_servers
@pytest.mark.parametrize("what", ASK)
@pytest.mark.rule("B6")
async def test_a_socket_that_answers_its_probe_keeps_the_session(serve: Serve, what: str) -> None:
    server = await serve()
    session, socket = await _bound(server)
    asking = asyncio.ensure_future(ASK[what](session))
    probe = await socket.control("probe")
    assert probe["nonce"]
    await socket.send(block_of(probe, event="probe-ack"))
    answer = await asking
    assert isinstance(answer, Answer)
    assert answer.reason == (409, "websocket-bound")
    assert (answer.data["retryable"], answer.data["action"]) == (True, "retry")
    await session.backend.say(note("on"))
    assert (await socket.message())["method"] == "on", "nothing changed for who is bound"


@pytest.mark.parametrize(
    "life",
    [
        block_of(request(2), 2),
        block_of(request(2), 9),
        b": a comment\n\n",
        b"\n",
        b'event: cursor-ack\ndata: {"cursor":"0"}\n\n',
    ],
)
@pytest.mark.rule("B6")
async def test_any_byte_from_the_socket_within_the_probe_time_is_life(server: Server, life: bytes) -> None:
    session, socket = await _bound(server)
    asking = asyncio.ensure_future(session.get(session.start))
    await socket.control("probe")
    await socket.send(life)
    assert (await asking).reason == (409, "websocket-bound")


@pytest.mark.rule("B6")
async def test_what_came_before_the_probe_is_no_life(serve: Serve) -> None:
    server = await serve(probe_timeout=0.05)
    session, socket = await _bound(server)
    await socket.say(2, note("x"))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    stream = await session.events(session.start)
    assert (await stream.event()).event == "upgrade-accepted"
    assert await socket.closed() == 4410


@on_both_servers
@pytest.mark.rule("B6", "B8")
async def test_a_silent_socket_is_fenced_4410_and_an_event_stream_is_served(serve: Serve) -> None:
    server = await serve(probe_timeout=0.05)
    session, socket = await _bound(server)
    stream = await session.events(session.start)
    assert await socket.closed() == 4410
    assert "event: probe\n" in "".join(socket.frames)
    assert (await stream.event()).event == "upgrade-accepted"
    await session.backend.say(note("on"))
    assert (await stream.message())["method"] == "on", "U is history: the stream goes on past it"


@on_both_servers
@pytest.mark.rule("B6", "B8", "U7")
async def test_a_silent_socket_is_fenced_4410_and_a_handshake_is_bound_under_a_new_generation(
    serve: Serve,
) -> None:
    server = await serve(probe_timeout=0.05)
    session = await server.started()
    old = await session.bind(session.start)
    first = await old.control("resume-cursor")
    new = await session.bind(session.start)
    second = await new.control("resume-cursor")
    assert second["generation"] > first["generation"]
    assert second["cursor"] == 2, "an upgrade of its own"
    await old.events(1)
    assert await old.closed() == 4410
    events = await new.events(2)
    await new.ack(str(events[-1].id))
    await session.backend.say(note("on"))
    assert (await new.message())["method"] == "on"


@pytest.mark.rule("B6", "U7")
async def test_a_silent_socket_is_fenced_4410_and_an_upgrade_is_accepted(serve: Serve) -> None:
    server = await serve(probe_timeout=0.05)
    session, socket = await _bound(server)
    offer = await session.pend(session.start, "another")
    assert offer["event"] == 2
    assert await socket.closed() == 4410
    await (await session.bind(session.start, offer["ticket"])).cross()


@pytest.mark.rule("B6")
async def test_a_silent_socket_and_no_cursor_is_no_boundary(serve: Serve) -> None:
    """The newcomer is served in SSE_ACTIVE: none means `0`, and burns nothing."""
    server = await serve(probe_timeout=0.05)
    session, _ = await _bound(server)
    stream = await session.events()
    assert (await stream.event()).event == "upgrade-accepted"
    assert (await session.post(2, note("x"))).status == 202


@pytest.mark.rule("B6", "B8")
async def test_a_probe_that_cannot_be_written_is_silence(serve: Serve) -> None:
    """The peer has stopped reading, and the way to it is full."""
    server = await serve(probe_timeout=0.05)
    session = await server.started()
    wire = await server.wire()
    await wire.send(
        "GET",
        f"{session.base}/events",
        {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": "mcp.v1",
            "Last-Event-ID": session.start,
        },
    )
    assert (await wire.head()).status == 101
    wire.stall()
    await _ack_by_hand(session, wire)
    for n in range(40):
        await session.backend.say(note(str(n), x="x" * 500_000))
    stream = await session.events(session.start)
    assert (await stream.event()).event == "upgrade-accepted"
    assert (await stream.message())["method"] == "0"


async def _ack_by_hand(session: Session, wire: Any) -> None:
    """A masked `cursor-ack` frame for `U`, written without reading anything."""
    accepted = (await _history(session))[-1]
    text = block_of({"cursor": accepted}, event="cursor-ack")
    await wire.write(bytes([0x81, 0x80 | len(text)]) + b"\0\0\0\0" + text)


async def _history(session: Session) -> list[str]:
    """IDs of all events, without asking the server anything that would probe."""
    log, sessions = session.server.log, session.server.app.sessions.all()
    (live,) = sessions
    data, _ = await log.read(live.key, 0, live.machine.outbox.committed, 2**20)
    return [line[4:].decode() for line in data.split(b"\n") if line.startswith(b"id: ")]


@pytest.mark.rule("B8")
async def test_what_a_fenced_socket_still_sends_is_void(serve: Serve) -> None:
    """Its peer has stopped reading: it is not closed yet, but its time is over."""
    server = await serve(probe_timeout=0.05)
    session = await server.started()
    wire = await server.wire()
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "mcp.v1",
        "Last-Event-ID": session.start,
        "Mcp-Client": "p",
    }
    await wire.send("GET", f"{session.base}/events", headers)
    assert (await wire.head()).status == 101
    wire.stall()
    await _ack_by_hand(session, wire)
    for n in range(40):
        await session.backend.say(note(str(n), x="x" * 500_000))
    stream = await session.events(session.start)
    await stream.event()
    late = block_of(note("late"), 2)
    await wire.write(bytes([0x81, 0x80 | len(late)]) + b"\0\0\0\0" + late)
    wire.resume()
    await wire.until(b"\x88\x02" + (4410).to_bytes(2))  # its close frame
    assert (await session.post(2, note("in time"))).status == 202, "the late one has no number"
    assert (await session.backend.take())["method"] == "in time"


@pytest.mark.rule("B6", "B8", "S3")
async def test_of_two_handshakes_at_once_one_is_bound_at_a_time(server: Server) -> None:
    session = await server.started()
    found = [asyncio.ensure_future(session.knock(session.start)) for _ in range(2)]
    done, (waiting,) = await asyncio.wait(found, return_when=asyncio.FIRST_COMPLETED)
    (first,) = (task.result() for task in done)
    assert isinstance(first, Socket)
    while (block := await first.block()).event != "probe":
        pass
    await first.send(block_of(json.loads(block.data or b""), event="probe-ack"))
    refused = await waiting
    assert isinstance(refused, Answer)
    assert refused.reason == (409, "websocket-bound")


@pytest.mark.rule("B6")
async def test_several_newcomers_at_once_are_each_told(server: Server) -> None:
    session, socket = await _bound(server)
    asking = [asyncio.ensure_future(session.get(session.start)) for _ in range(4)]
    while not all(task.done() for task in asking):
        await socket.send(PROBE_ACK)
        await session.get("junk")
    assert {task.result().reason for task in asking} == {(409, "websocket-bound")}


@pytest.mark.rule("B6")
async def test_several_newcomers_at_once_to_a_silent_socket_leave_one_state(serve: Serve) -> None:
    server = await serve(probe_timeout=0.05)
    session, socket = await _bound(server)
    streams = await asyncio.gather(*(session.events(session.start) for _ in range(3)))
    assert await socket.closed() == 4410
    await session.backend.say(note("on"))
    for stream in streams:
        assert (await stream.event()).event == "upgrade-accepted"
        assert (await stream.message())["method"] == "on"


@pytest.mark.rule("B6")
async def test_a_socket_that_goes_while_it_is_probed_leaves_the_newcomer_served(server: Server) -> None:
    session, socket = await _bound(server)
    asking = asyncio.ensure_future(session.events(session.start))
    await socket.control("probe")
    socket.drop()
    stream = await asking
    assert isinstance(stream, EventStream)
    assert (await stream.event()).event == "upgrade-accepted"


@pytest.mark.rule("B6")
async def test_posts_acks_and_deletes_need_no_probe(server: Server) -> None:
    session, socket = await _bound(server)
    assert (await soon(session.post(2, note("x")), 1)).status == 202
    assert (await soon(session.ack(session.start), 1)).status == 200
    assert await socket.control("received") == {"received": 2, "process": "p"}
    assert (await soon(session.delete(), 1)).status == 204
    await socket.event()
    assert await socket.closed() == 4404
    assert "probe" not in "".join(socket.frames)


@pytest.mark.rule("B6", "U4")
async def test_a_gated_socket_is_probed_too(server: Server) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    await socket.events(1)
    asking = asyncio.ensure_future(session.get(session.start))
    await socket.control("probe")
    await socket.send(PROBE_ACK)
    assert (await asking).reason == (409, "websocket-bound")


# B7: after the socket ------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.parametrize("how", ["close", "drop", "binary", "malformed ack", "ack window"])
@pytest.mark.rule("B7")
async def test_when_the_socket_goes_every_cursor_keeps_its_meaning(serve: Serve, how: str) -> None:
    server = await serve(ack_window=0.1 if how == "ack window" else 10.0)
    session = await server.started()
    await session.backend.say(note("one"))
    before = await session.ids()
    socket = await session.bind(session.start)
    if how == "ack window":
        assert await socket.closed() == 4408
    else:
        await socket.cross()
        await session.backend.say(note("two"))
        await socket.event()
    match how:
        case "close":
            await socket.close()
        case "drop":
            socket.drop()
        case "binary":
            await socket.send_binary(b"x")
            assert await socket.closed() == 1003
        case "malformed ack":
            await socket.send(b"event: cursor-ack\ndata: {}\n\n")
            assert await socket.closed() == 4400
        case _:
            pass
    ids = await session.ids()
    assert ids[:1] == before
    assert len(ids) == (2 if how == "ack window" else 3)
    await session.backend.say(note("after"))
    for position, cursor in enumerate([session.start, *ids]):
        stream = await session.events(cursor)
        expected = ids[position:]
        assert [str(event.id) for event in await stream.events(len(expected))] == expected
        assert (await stream.message())["method"] == "after"
        stream.drop()


@pytest.mark.rule("B7", "L6")
async def test_after_the_socket_messages_and_requests_go_on(server: Server) -> None:
    session, socket = await _bound(server)
    await socket.say(2, request(7))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    socket.drop()
    await session.backend.take()
    await session.backend.say(result(7))
    stream = await session.events(session.start)
    await stream.event()
    assert await stream.message() == result(7)
    assert (await session.post(2, request(7))).json() == {"received": 2}
    assert (await session.post(3, note("x"))).json() == {"received": 3}


@pytest.mark.rule("B7")
async def test_the_door_can_be_passed_again_and_again(server: Server) -> None:
    session = await server.started()
    cursor = session.start
    seen: list[int] = []
    for n in range(5):
        await session.backend.say(note(str(n)))
        socket = await session.bind(cursor)
        gap = await socket.cross()
        await session.backend.say(note("live"))
        last = await socket.event()
        seen += [seq_of(event.id) for event in [*gap, last]]
        cursor = str(last.id)
        socket.drop()
        stream = await session.events(cursor)
        await session.backend.say(note("sse"))
        event = await stream.event()
        seen.append(seq_of(event.id))
        cursor = str(event.id)
        stream.drop()
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.rule("B6")
async def test_a_socket_that_is_being_bound_this_very_moment_is_probed_and_not_robbed(server: Server) -> None:
    """Its handshake is committed, its loops do not run yet: whoever asks now has to wait for them."""
    opened = await server.app.sessions.open(View.SESSION, "anonymous")
    assert not isinstance(opened, Refusal)
    _, live = opened
    socket = live.connection()
    (bound,) = await live.put(Handshake(socket, await live.cursor(START), None, "nonce", "/url"))
    assert isinstance(bound, Serving)
    asked = Listen(live.connection(), await live.cursor(START))
    asking = asyncio.create_task(live.ask(asked))
    for _ in range(10):  # turns of the loop, so that the question is put and the probe is out
        await asyncio.sleep(0)
    assert bound.delivery.probe is not None
    live.attach(socket, lambda: None)
    live.heard(socket)
    (answer,) = await soon(asking)
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.WEBSOCKET_BOUND
    live.detach(socket)


@pytest.mark.rule("C8", "B6", "B9")
async def test_an_idle_socket_that_answers_when_it_is_asked_keeps_its_session(serve: Serve) -> None:
    server = await serve(session_expiry=0.3, keepalive=0.4)
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    for _ in range(3):  # one alone would not keep it for so long
        while (block := await socket.block()).event != "probe":
            pass
        await socket.send(b"event: probe-ack\ndata: " + (block.data or b"") + b"\n\n")
    assert (await session.post(2, request(1))).status == 202
    assert (await session.backend.take())["id"] == 1
