"""C1–C6, L2–L4: event IDs, what is accepted as a cursor, where a stream starts, what retention costs."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from gapless.log.sqlite import SqliteLog
from gapless.protocol.block import Block
from tests.server.harness import (
    Answer,
    Fragile,
    Serve,
    Server,
    Session,
    note,
    on_both_servers,
    seq_of,
)

LINK = "0123456789abcdef"

MALFORMED = [
    pytest.param("", id="empty"),
    pytest.param(" ", id="blank"),
    pytest.param("\t1.0." + LINK, id="tab"),
    pytest.param("-1.0." + LINK, id="negative"),
    pytest.param("+1.0." + LINK, id="signed"),
    pytest.param("1.-0." + LINK, id="negative stream"),
    pytest.param("01.0." + LINK, id="leading zero"),
    pytest.param("00.0." + LINK, id="two zeros"),
    pytest.param("1.00." + LINK, id="leading zero in the stream"),
    pytest.param(f"{2**63}.0.{LINK}", id="2^63"),
    pytest.param(f"1.{2**63}.{LINK}", id="stream 2^63"),
    pytest.param(f"{2**64}.0.{LINK}", id="2^64"),
    pytest.param("9" * 7000, id="many digits"),
    pytest.param("1.0." + LINK + "0" * 7000, id="a long link"),
    pytest.param("1.0." + LINK[:-1], id="a short link"),
    pytest.param("1.0." + LINK + ".", id="a trailing separator"),
    pytest.param(".1.0." + LINK, id="a leading separator"),
    pytest.param("1..0." + LINK, id="a double separator"),
    pytest.param("1.0.0." + LINK, id="four parts"),
    pytest.param("1." + LINK, id="two parts"),
    pytest.param("1.0." + LINK + ",2.0." + LINK, id="two cursors"),
    pytest.param("1.0." + LINK.upper(), id="upper-case hex"),
    pytest.param("1.0.0123456789abcdeg", id="no hex"),
    pytest.param("1 .0." + LINK, id="an inner blank"),
    pytest.param("\u0664\u0667.0." + LINK, id="Arabic digits"),
    pytest.param("\uff11.0." + LINK, id="full-width digits"),
    pytest.param("²." + LINK, id="a superscript"),
    pytest.param("47", id="a bare integer"),
    pytest.param("1", id="another bare integer"),
    pytest.param("00", id="not the bare 0"),
    pytest.param("-0", id="minus zero"),
    pytest.param("0.0", id="half an ID"),
    pytest.param("0x1.0." + LINK, id="hex"),
    pytest.param("1e1.0." + LINK, id="an exponent"),
    pytest.param("1_0.0." + LINK, id="an underscore"),
    pytest.param("null", id="null"),
]


@pytest.fixture
async def session(server: Server) -> Session:
    """A session with three events."""
    session = await server.started()
    await session.backend.say(note("one"), note("two"), note("three"))
    return session


# C1: one form --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cursor", MALFORMED)
@pytest.mark.rule("C1", "C2", "U8")
async def test_a_malformed_cursor_is_400_everywhere_and_opens_no_door(session: Session, cursor: str) -> None:
    answers = [
        await session.upgrade(cursor),
        await session.ack(cursor),
        await session.server.knock(f"{session.base}/events?cursor={quote(cursor)}"),
    ]
    if cursor == cursor.strip():  # white space around a header's value is not part of it
        answers.append(await session.get(cursor))
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.reason == (400, "malformed")
        assert answer.data["resume-cursor"] == 3


@pytest.mark.parametrize("field", ["upgrade", "ack"])
@pytest.mark.rule("C1")
async def test_a_cursor_of_10_kb_is_400(session: Session, field: str) -> None:
    cursor = "1" * 10_000
    answer = await (session.upgrade(cursor) if field == "upgrade" else session.ack(cursor))
    assert answer.reason == (400, "malformed")
    assert len(answer.body) < 1000, "and is not sent back"


@pytest.mark.parametrize("cursor", [0, 3, 47, 3.0, True, None, ["1"], {"seq": 1}])
@pytest.mark.rule("C1", "C2")
async def test_a_cursor_that_is_no_string_is_400(session: Session, cursor: Any) -> None:
    assert (await session.upgrade(cursor)).reason == (400, "malformed")
    assert (await session.ack(cursor)).reason == (400, "malformed")


@on_both_servers
@pytest.mark.rule("U3", "C1")
async def test_a_handshake_without_a_cursor_is_malformed(serve: Serve) -> None:
    session = await (await serve()).open()
    answer = await session.denied(None)
    assert answer.reason == (400, "malformed")
    assert answer.data["resume-cursor"] == 0, "no door was opened"


@pytest.mark.rule("C2")
async def test_no_position_that_the_server_tells_is_accepted_as_a_cursor(session: Session) -> None:
    """Its bare integers are not, wherever they are told (the third variant of the first report)."""
    told: list[int] = []
    told.append((await session.get("junk")).data["resume-cursor"])
    told.append((await session.ack(session.start)).json()["ack"])
    offer = await session.pend(session.start)
    told.append(offer["event"])
    socket = await session.bind(session.start, offer["ticket"])
    told += [int(socket.headers["X-MCP-Resume-Cursor"]), (await socket.control("resume-cursor"))["cursor"]]
    socket.drop()
    assert told == [3, 0, 4, 4, 4]
    for position in (3, 4):
        assert (await session.get(str(position))).reason == (400, "malformed")
        assert (await session.upgrade(str(position), "n2")).reason == (400, "malformed")
        assert (await session.ack(str(position))).reason == (400, "malformed")


@on_both_servers
@pytest.mark.rule("C1")
async def test_an_event_has_the_same_id_on_every_connection(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    streams = [await session.events(cursor) for cursor in (session.start, "0", None)]
    ids = [[event.id for event in await stream.events(2)] for stream in streams]
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    assert [event.id for event in await socket.events(2)] == ids[0] == ids[1] == ids[2]


# C3, C5: proof -------------------------------------------------------------------------------------


@pytest.mark.rule("C3")
async def test_a_proven_cursor_is_resumed_after(session: Session) -> None:
    ids = await session.ids()
    for seq, id in enumerate(ids, 1):
        stream = await session.events(id)
        rest = await stream.events(3 - seq)
        assert [event.id for event in rest] == ids[seq:]
        stream.drop()


@pytest.mark.rule("C3")
async def test_the_stream_in_a_cursor_takes_no_part_in_its_proof(session: Session) -> None:
    ids = await session.ids()
    stream = await session.events(ids[0].replace(".0.", ".5."))
    assert (await stream.event()).id == ids[1]


@pytest.mark.parametrize("seq", [0, 1, 2, 3])
@pytest.mark.rule("C3", "C5")
async def test_a_cursor_with_another_link_is_foreign(session: Session, seq: int) -> None:
    cursor = f"{seq}.0.{LINK}"
    for answer in (
        await session.get(cursor),
        await session.upgrade(cursor),
        await session.ack(cursor),
        await session.denied(cursor),
        await session.denied(cursor, "any-ticket"),
    ):
        assert answer.reason == (409, "cursor-foreign")
        assert answer.data["resume-cursor"] == 3


@pytest.mark.rule("C3", "C5", "L5")
async def test_a_cursor_of_another_session_is_foreign(session: Session) -> None:
    other = await session.server.started()
    await other.backend.say(note("one"), note("two"), note("three"))
    for cursor in [other.start, *await other.ids()]:
        assert (await session.get(cursor)).reason == (409, "cursor-foreign")


@pytest.mark.parametrize("seq", [4, 47, 2**63 - 1])
@pytest.mark.rule("C5")
async def test_a_cursor_above_committed_is_ahead(session: Session, seq: int) -> None:
    cursor = f"{seq}.0.{LINK}"
    for answer in (
        await session.get(cursor),
        await session.upgrade(cursor),
        await session.ack(cursor),
        await session.denied(cursor),
    ):
        assert answer.reason == (409, "cursor-ahead")
        assert (answer.data["resume-cursor"], answer.data["floor"]) == (3, 0)


@pytest.mark.rule("C5", "L3")
async def test_a_cursor_below_the_floor_is_evicted_and_told_so(serve: Serve) -> None:
    server = await serve(retain_events=2)
    session = await server.started()
    stream = await session.events(session.start)
    for n in range(6):
        await session.backend.say(note(str(n)))
        await stream.event()
    named = [line.split()[1] for line in stream.raw.decode().split("\n") if line.startswith("id:")]
    ids = [session.start, *named[1:]]
    for cursor in (ids[0], ids[1], ids[3], "0"):
        for answer in (
            await session.get(cursor),
            await session.upgrade(cursor),
            await session.denied(cursor),
            await session.ack(cursor),
        ):
            assert answer.reason == (409, "cursor-evicted"), cursor
            assert answer.data["floor"] == 4
            assert answer.data["resume-cursor"] == 6
    resumed = await session.events(ids[4])
    assert [event.id for event in await resumed.events(2)] == ids[5:]


@pytest.mark.rule("C3", "L3")
async def test_the_floors_own_link_is_kept_and_proves_a_cursor(serve: Serve, tmp_path: Any) -> None:
    """A cursor at the floor misses nothing: it is served, if it is ours."""
    server = await serve(SqliteLog(tmp_path / "log.db", cache_bytes=0), retain_events=2)
    session = await server.started()
    stream = await session.events(session.start)
    ids: list[str] = []
    for n in range(6):
        await session.backend.say(note(str(n)))
        ids.append(str((await stream.event()).id))
    stream = await session.events(ids[3])
    assert [event.id for event in await stream.events(2)] == ids[4:]
    assert (await session.get(f"4.0.{LINK}")).reason == (409, "cursor-foreign")
    assert (await session.get(ids[2])).reason == (409, "cursor-evicted")


@pytest.mark.rule("C5", "S2")
async def test_no_cursor_is_the_start_and_evicted_as_the_start_is(serve: Serve) -> None:
    """§5: none means `0`. Never 200 and silence."""
    server = await serve(retain_events=2)
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(6)))
    assert (await session.get("0")).reason == (409, "cursor-evicted")
    assert (await session.get()).reason == (409, "cursor-evicted")


@pytest.mark.rule("L3", "L4")
async def test_retention_counts_events_and_keeps_the_newest(serve: Serve) -> None:
    server = await serve(retain_events=8)
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(20)))
    data = (await session.get("junk")).data
    assert data["resume-cursor"] == 20
    assert 8 <= 20 - data["floor"] <= 9


@pytest.mark.rule("L4")
async def test_retention_counts_bytes_too(serve: Serve) -> None:
    server = await serve(retain_bytes=20_000)
    session = await server.started()
    await session.backend.say(*(note("x" * 1000) for _ in range(40)))
    data = (await session.get("junk")).data
    kept = data["resume-cursor"] - data["floor"]
    assert 15 <= kept <= 20


@pytest.mark.rule("L4", "L3")
async def test_retention_has_an_age_too(serve: Serve, tmp_path: Any) -> None:
    """Where nothing else happens the janitor sees to it, and the log is told."""
    log = SqliteLog(tmp_path / "log.db")
    server = await serve(log, retain_seconds=1000.0, session_expiry=1e9)
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    now = asyncio.get_running_loop().time()
    await server.app.sessions.clean(now + 990)
    assert (await session.get("junk")).data["floor"] == 0
    await server.app.sessions.clean(now + 1010)
    data = (await session.get(session.start)).data
    assert (data["reason"], data["floor"], data["resume-cursor"]) == ("cursor-evicted", 2, 2)
    await session.backend.say(note("three"))
    (stored,) = await log.sessions()
    assert (stored.floor, stored.committed) == (2, 3)


@pytest.mark.rule("L4")
async def test_acked_events_go_first(serve: Serve) -> None:
    server = await serve(retain_events=64)
    acked, unacked = await server.started(), await server.started()
    for session in (acked, unacked):
        await session.backend.say(*(note(str(n)) for n in range(40)))
    (*_, last) = await acked.ids()
    assert (await acked.ack(last)).json() == {"ack": 40}
    for session in (acked, unacked):
        await session.backend.say(note("a"), note("b"))
    assert (await acked.get("junk")).data["floor"] >= 8
    assert (await unacked.get("junk")).data["floor"] == 0


# L2: commit before deliver -------------------------------------------------------------------------


@pytest.mark.rule("L2", "S4")
async def test_no_byte_of_an_event_reaches_a_wire_before_it_is_committed(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, keepalive=0.02)
    session = await server.started()
    stream = await session.events(session.start)
    socket_session = await server.started()
    socket = await socket_session.bind(socket_session.start)
    await socket.cross()
    await stream.beat()
    log.gate.clear()
    await session.backend.emit(note("x"))
    await socket_session.backend.emit(note("x"))
    await asyncio.wait_for(log.held.wait(), 5)
    for _ in range(3):
        await stream.beat()
        await socket.beat()
    assert (await session.get("junk")).data["resume-cursor"] == 0, "nor is its number told"
    log.gate.set()
    assert (await stream.message())["method"] == "x"
    while (block := await socket.block()).event == "keepalive":
        pass
    assert block.id is not None


@pytest.mark.rule("L2")
async def test_an_event_that_cannot_be_stored_is_delivered_once_it_can(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, keepalive=0.02)
    session = await server.started()
    stream = await session.events(session.start)
    log.full = True
    await session.backend.emit(note("x"))
    await stream.beat()
    log.full = False
    assert (await stream.message())["method"] == "x"
    assert len(await session.ids()) == 1


# C4: the ack cursor --------------------------------------------------------------------------------


@pytest.mark.rule("C4")
async def test_a_resume_states_the_ack_cursor(session: Session) -> None:
    ids = await session.ids()
    (await session.events(ids[1])).drop()
    assert (await session.ack(session.start)).json() == {"ack": 2}


@pytest.mark.rule("C4")
async def test_an_upgrade_states_the_ack_cursor_before_anything_else(session: Session) -> None:
    ids = await session.ids()
    offer = await session.pend(ids[0])
    assert (await session.ack(session.start)).json() == {"ack": 1}
    await (await session.bind(ids[1], offer["ticket"])).control("resume-cursor")
    assert (await session.ack(session.start)).json() == {"ack": 2}


@pytest.mark.rule("C4")
async def test_a_refused_cursor_states_nothing(session: Session) -> None:
    await session.get(f"2.0.{LINK}")
    await session.ack(f"2.0.{LINK}")
    await session.upgrade(f"2.0.{LINK}")
    assert (await session.ack(session.start)).json() == {"ack": 0}


# C6: priming ---------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("C6")
async def test_a_stream_opens_with_a_block_of_the_cursor_it_starts_from(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    ids = await session.ids()
    for cursor in (session.start, ids[0], ids[1]):
        stream = await session.events(cursor)
        block = await stream.block()
        assert (block.id, block.data) == (cursor, b"")
        assert block.retry is not None
        assert stream.raw.startswith(f"id: {cursor}\n".encode())


@pytest.mark.parametrize("cursor", ["0", None])
@pytest.mark.rule("C1", "C6")
async def test_the_bare_0_and_no_cursor_start_from_the_first_event_id(
    session: Session, cursor: str | None
) -> None:
    stream = await session.events(cursor)
    assert (await stream.block()).id == session.start
    assert seq_of((await stream.event()).id) == 1


@pytest.mark.rule("C1")
async def test_the_bare_0_is_accepted_wherever_a_cursor_is(session: Session) -> None:
    assert (await session.ack("0")).json() == {"ack": 0}
    offer = await session.pend("0")
    socket = await session.bind("0", offer["ticket"])
    assert (await socket.control("resume-cursor"))["from"] == session.start


@pytest.mark.rule("C6")
async def test_a_primed_cursor_never_passes_what_is_undelivered(session: Session) -> None:
    """A client that stores the priming's ID and loses the connection misses nothing."""
    ids = await session.ids()
    stream = await session.events(ids[1])
    primed = (await stream.block()).id
    stream.drop()
    again = await session.events(primed)
    assert (await again.event()).id == ids[2]


@pytest.mark.rule("C6", "L6")
async def test_received_is_the_block_after_priming_and_no_event_comes_before(session: Session) -> None:
    stream = await session.events(session.start)
    opening = [await stream.block(), await stream.block()]
    assert opening[1] == Block("received", None, b'{"received":1,"process":"p"}')
    assert seq_of((await stream.block()).id) == 1


@pytest.mark.rule("C4")
async def test_a_stream_states_nothing_by_what_it_delivered(session: Session) -> None:
    """Only the client says what it has processed; the server infers nothing from what it wrote."""
    stream = await session.events(session.start)
    await stream.events(3)
    stream.drop()
    assert (await session.ack(session.start)).json() == {"ack": 0}


# Replay and live are the same loop -----------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("L1", "C3", "S1")
async def test_events_emitted_while_a_stream_is_resumed_are_neither_lost_nor_repeated(serve: Serve) -> None:
    server = await serve()
    session = await server.started()

    async def talk() -> None:
        for n in range(300):
            await session.backend.emit(note(str(n)))
            await asyncio.sleep(0)

    talking = asyncio.create_task(talk())
    cursor, seen = session.start, []
    while len(seen) < 300:
        stream = await session.events(cursor)
        for event in await stream.events(min(37, 300 - len(seen))):
            assert event.id is not None
            cursor = event.id
            seen.append(seq_of(cursor))
        stream.drop()
    await talking
    assert seen == list(range(1, 301))


@pytest.mark.rule("L1")
async def test_any_number_of_streams_see_every_event(session: Session) -> None:
    streams = [await session.events(session.start) for _ in range(5)]
    await session.backend.say(note("four"))
    for stream in streams:
        assert [seq_of(event.id) for event in await stream.events(4)] == [1, 2, 3, 4]


@pytest.mark.rule("L1", "W1")
async def test_a_replay_larger_than_one_write_is_complete_and_in_order(serve: Serve, tmp_path: Any) -> None:
    server = await serve(SqliteLog(tmp_path / "log.db", cache_bytes=0, synchronous="off"))
    session = await server.started()
    for n in range(60):
        await session.backend.emit(note(str(n), x="x" * 5000))
    await session.backend.say(note("last"))
    stream = await session.events(session.start)
    assert [seq_of(event.id) for event in await stream.events(61)] == list(range(1, 62))
    socket = await session.bind(session.start)
    gap = await socket.cross()
    assert [seq_of(event.id) for event in gap] == list(range(1, 63))


@pytest.mark.rule("L3")
async def test_a_reader_that_falls_below_the_floor_is_closed_not_moved(serve: Serve) -> None:
    """The peer stops reading; what it has not been written is evicted meanwhile."""
    server = await serve(retain_bytes=3_000_000, max_message_bytes=300_000)
    session = await server.started()
    stalled = await session.events(session.start)
    await stalled.block()
    stalled.stall()
    for n in range(80):
        await session.backend.say(note(str(n), x="x" * 200_000))
    assert (await session.get("junk")).data["floor"] > 0
    stalled.resume()
    seen = [seq_of(b.id) for b in await stalled.end() if b.id is not None and b.data]
    assert seen == list(range(1, len(seen) + 1)), "what came is without a hole"
    assert len(seen) < 80
