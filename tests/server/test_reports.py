"""What three reports of the field observed, against a real server: none of it happens here.

The reports: (000) an upgrade of a session that is not quiescent loses events; (001) an upgrade
whose 101 carries no cursor does; (004) a resume at a durable, unfinished upgrade deadlocks or
negotiates twice. The same failures, as decisions, are in `tests/protocol/test_seam.py`.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.harness import (
    Answer,
    EventStream,
    Fragile,
    Serve,
    Server,
    Session,
    Socket,
    note,
    on_both_servers,
    seq_of,
    soon,
)


async def _drained(session: Session, upto: int) -> tuple[EventStream, list[str]]:
    """A stream that has delivered events up to `upto`, and the IDs of what it delivered."""
    stream = await session.events(session.start)
    return stream, [str(event.id) for event in await stream.events(upto)]


# The first report: the replayable and the non-replayable -------------------------------------------


@on_both_servers
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("U1", "U3", "U4")
async def test_first_report_events_11_to_13_are_not_lost_by_an_unquiesced_upgrade(
    serve: Serve, steps: int
) -> None:
    """Emitted while the client is between its streams, and it asks for the door instead of the rest."""
    server = await serve()
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(1, 11)))
    stream, ids = await _drained(session, 10)
    stream.drop()
    resumed = await session.events(ids[9])
    resumed.drop()
    await session.backend.say(*(note(str(n)) for n in range(11, 14)))
    ticket = None if steps == 1 else (await session.pend(ids[9]))["ticket"]
    socket = await session.bind(ids[9], ticket)
    gap = await socket.cross()
    assert [seq_of(event.id) for event in gap] == [11, 12, 13, 14]
    assert [json.loads(event.data or b"").get("method") for event in gap[:3]] == ["11", "12", "13"]
    await session.backend.say(note("15"))
    assert seq_of((await socket.event()).id) == 15


@on_both_servers
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("U1", "L4", "C5")
async def test_first_report_an_evicted_gap_is_refused_and_never_a_success(serve: Serve, steps: int) -> None:
    server = await serve(retain_events=2)
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(1, 3)))
    _, ids = await _drained(session, 2)
    await session.backend.say(*(note(str(n)) for n in range(3, 9)))
    answer = await (session.denied(ids[0]) if steps == 1 else session.upgrade(ids[0]))
    assert answer.reason == (409, "cursor-evicted")
    assert answer.data["floor"] > 1
    assert answer.data["resume-cursor"] == 8, "no upgrade-accepted was appended"


@on_both_servers
@pytest.mark.rule("C1", "C2", "C3")
async def test_first_report_an_echoed_cursor_is_refused(serve: Serve) -> None:
    """A client that states a position it was told, not an event it has: no form of it is accepted."""
    server = await serve()
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(1, 14)))
    (_, *_), ids = await _echo_of(session)
    echoed = (await session.get("junk")).data["resume-cursor"]
    assert echoed == 13
    tenth = ids[9]
    for cursor in (str(echoed), f"{echoed}.0", f"{echoed}.0.{tenth.rpartition('.')[2]}"):
        for answer in (await session.upgrade(cursor), await session.denied(cursor)):
            assert answer.status in (400, 409)
            assert answer.data["reason"] in ("malformed", "cursor-foreign")
    socket = await session.bind(tenth)
    assert [seq_of(event.id) for event in await socket.cross()] == [11, 12, 13, 14]


async def _echo_of(session: Session) -> tuple[list[tuple[str, str]], list[str]]:
    """The headers of a resumed stream, and the IDs of the first ten events."""
    stream, ids = await _drained(session, 10)
    return stream.head.headers, ids


@on_both_servers
@pytest.mark.rule("C2")
async def test_first_report_no_header_of_an_event_stream_tells_an_event_id(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    for cursor in (None, session.start, (await session.ids())[0]):
        stream = await session.events(cursor)
        names = {name for name, _ in stream.head.headers}
        assert "last-event-id" not in names
        assert not [value for _, value in stream.head.headers if ".0." in value and "127.0.0" not in value]


# The second report: the cursor across the 101 ------------------------------------------------------


@on_both_servers
@pytest.mark.rule("U2", "U3")
async def test_second_report_a_101_carries_the_cursor_and_48_to_51_are_delivered(serve: Serve) -> None:
    """Emitted to a sibling stream while the handshake is on its way."""
    server = await serve()
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(1, 48)))
    stream, ids = await _drained(session, 47)
    sibling, _ = await _drained(session, 47)
    await session.backend.say(*(note(str(n)) for n in range(48, 52)))
    assert len(await sibling.events(4)) == 4
    socket = await session.bind(ids[46])
    assert socket.headers["X-MCP-Resume-Cursor"] == "52"
    assert (await socket.control("resume-cursor"))["cursor"] == 52
    gap = await socket.events(5)
    assert [seq_of(event.id) for event in gap] == [48, 49, 50, 51, 52]
    await socket.ack(str(gap[-1].id))
    socket.drop()
    resumed = await session.events(str(gap[0].id))
    assert [seq_of(event.id) for event in await resumed.events(4)] == [49, 50, 51, 52]
    stream.drop()


@on_both_servers
@pytest.mark.rule("U2", "U3", "U4")
async def test_second_report_the_cursor_is_what_is_committed_at_the_commit_point_not_before(
    serve: Serve,
) -> None:
    """Events keep coming throughout; the echo is exact, whatever came between request and answer."""
    server = await serve(keepalive=0.02)
    session = await server.started()
    stop = asyncio.Event()

    async def talk() -> None:
        while not stop.is_set():
            await session.backend.emit(note("more"))
            await asyncio.sleep(0)

    talking = asyncio.create_task(talk())
    cursor = session.start
    try:
        for _ in range(10):
            socket = await session.bind(cursor)
            committed = int(socket.headers["X-MCP-Resume-Cursor"])
            echo = await socket.control("resume-cursor")
            assert echo["cursor"] == committed
            gap = await socket.events(committed - seq_of(cursor))
            assert [seq_of(event.id) for event in gap] == list(range(seq_of(cursor) + 1, committed + 1))
            assert gap[-1].event == "upgrade-accepted", "the commit point itself: nothing lies between"
            await socket.beat()
            await socket.ack(str(gap[-1].id))
            assert seq_of((await socket.event()).id) == committed + 1
            cursor = str(gap[-1].id)
            socket.drop()
    finally:
        stop.set()
        await talking


@pytest.mark.rule("U2", "L2", "L8")
async def test_second_report_what_arrives_while_the_101_is_being_committed_is_above_its_cursor(
    serve: Serve,
) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    await session.backend.say(note("one"))
    log.gate.clear()
    binding = asyncio.create_task(session.bind(session.start))
    await soon(log.held.wait())
    await session.backend.emit(note("three"))
    log.gate.set()
    socket = await binding
    assert socket.headers["X-MCP-Resume-Cursor"] == "2"
    gap = await socket.cross()
    assert [seq_of(event.id) for event in gap] == [1, 2]
    assert (await socket.message())["method"] == "three"


@on_both_servers
@pytest.mark.rule("U6")
async def test_second_report_after_a_426_sse_resumes(serve: Serve) -> None:
    """The one that worked: the stream was closed in anticipation, and the upgrade refused."""
    server = await serve()
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(1, 48)))
    stream, ids = await _drained(session, 47)
    stream.drop()
    answer = await server.knock(
        f"{session.base}/events", {"Last-Event-ID": ids[46]}, subprotocols=("mcp.v0",)
    )
    assert isinstance(answer, Answer)
    assert answer.status == 426
    await session.backend.say(*(note(str(n)) for n in range(48, 52)))
    resumed = await session.events(ids[46])
    assert [seq_of(event.id) for event in await resumed.events(4)] == [48, 49, 50, 51]


@pytest.mark.rule("C1")
async def test_second_report_a_bare_47_is_refused(server: Server) -> None:
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(1, 53)))
    assert (await session.get("47")).reason == (400, "malformed")
    assert (await session.denied("47")).reason == (400, "malformed")


# The third report: the one-way door ----------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("B1", "B5")
async def test_third_report_there_is_no_idle_stream_at_the_boundary(serve: Serve) -> None:
    """A reset between `upgrade-accepted` and the handshake, and a resume with the ID of that event."""
    server = await serve()
    session = await server.started()
    stream = await session.events(session.start)
    await session.pend(session.start)
    accepted = await stream.event()
    stream.drop()
    answer = await soon(session.get(str(accepted.id)), 2)
    assert answer.status == 200
    assert answer.body.count(b"event: session-superseded\n") == 1
    assert b'"retryable":false' in answer.body
    assert (await session.get(session.start)).reason == (404, "session-superseded")


@on_both_servers
@pytest.mark.rule("B1", "U7", "U8", "S3")
async def test_third_report_no_second_upgrade_accepted_is_ever_minted(serve: Serve) -> None:
    """Not by a stream without a cursor, nor by another POST, nor by handshakes."""
    server = await serve()
    session = await server.started()
    offer = await session.pend(session.start, "one")
    await session.pend(session.start, "two")
    assert (await session.denied(session.start, "no-ticket")).status == 409
    await session.get(session.start)
    assert (await session.get("junk")).data["resume-cursor"] == offer["event"] == 1
    answer = await session.get()
    assert answer.status == 200
    assert b"upgrade-accepted" not in answer.body
    assert (await session.denied(session.start, offer["ticket"])).reason == (404, "session-superseded")
    stored = await server.log.sessions()
    data, _ = await server.log.read(stored[0].key, 0, stored[0].committed, 2**16)
    assert data.count(b"event: upgrade-accepted") == 1


@on_both_servers
@pytest.mark.rule("B3", "U7")
async def test_third_report_the_handshake_itself_still_completes_within_that_window(serve: Serve) -> None:
    """A reset before the handshake costs nothing if the client repeats that, and not the stream."""
    server = await serve()
    session = await server.started()
    stream = await session.events(session.start)
    offer = await session.pend(session.start)
    accepted = await stream.event()
    stream.drop()
    socket = await session.bind(str(accepted.id), offer["ticket"])
    assert await socket.cross() == []
    await session.backend.say(note("on"))
    assert (await socket.message())["method"] == "on"


@on_both_servers
@pytest.mark.rule("B6", "B7")
async def test_third_report_after_a_completed_handshake_resuming_is_safe(serve: Serve) -> None:
    """A live socket refuses a second reader; once it is gone SSE resumes, at U as anywhere."""
    server = await serve()
    session = await server.started()
    socket = await session.bind(session.start)
    gap = await socket.cross()
    resuming = asyncio.ensure_future(session.get(str(gap[-1].id)))
    await socket.control("probe")
    await socket.ack(str(gap[-1].id))
    assert (await resuming).reason == (409, "websocket-bound")
    socket.drop()
    stream = await session.events(str(gap[-1].id))
    await session.backend.say(note("on"))
    assert (await stream.message())["method"] == "on"


@pytest.mark.rule("B1", "B4", "B5", "S2", "S5")
async def test_third_report_injected_resets_end_in_a_socket_or_an_explicit_end_never_in_silence(
    server: Server,
) -> None:
    """Whatever a client does next after losing its connection at U, it is told something at once."""
    moves = [
        "stream at U",
        "stream without a cursor",
        "stream below U",
        "ticket",
        "one step",
        "another nonce",
    ]
    for move in moves:
        session = await server.started()
        stream = await session.events(session.start)
        offer = await session.pend(session.start)
        accepted = str((await stream.event()).id)
        stream.drop()
        match move:
            case "stream at U":
                found: Answer | Socket = await soon(session.get(accepted), 2)
            case "stream without a cursor":
                found = await soon(session.get(), 2)
            case "stream below U":
                found = await soon(session.get(session.start), 2)
            case "ticket":
                found = await soon(session.knock(accepted, offer["ticket"]), 2)
            case "one step":
                found = await soon(session.knock(accepted), 2)
            case _:
                found = await soon(session.upgrade(accepted, "another"), 2)
        if isinstance(found, Socket):
            await found.cross()
        else:
            told = b"session-superseded" in found.body or b"event: upgrade-accepted" in found.body
            assert told, f"{move}: {found}"
