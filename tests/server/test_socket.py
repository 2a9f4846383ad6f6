"""W1–W5, U2–U5 and L6 on a WebSocket: its first frame, the gap, acks, messages, and what closes it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gapless.protocol.block import BlockDecoder
from tests.server.harness import (
    Fragile,
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


async def _bound(server: Server) -> tuple[Session, Socket]:
    """A socket that has crossed: its gap is acknowledged."""
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    return session, socket


# W1: one format ------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("W1", "C1")
async def test_events_are_the_same_bytes_on_an_event_stream_and_a_socket(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.backend.say(note("one", text="ü \u2028 \\ \U0001f600"), result(99), note("two"))
    stream = await session.events(session.start)
    await stream.events(2)
    socket = await session.bind(session.start)
    await socket.cross()
    await stream.end()
    await session.backend.say(note("live"))
    await socket.event()
    on_socket = "".join(frame for frame in socket.frames[1:] if not frame.startswith("event: received"))
    primed, _, rest = stream.raw.decode().partition("\n\n")
    received, _, rest = rest.partition("\n\n")
    retry, _, upgrade = rest.partition("retry:")
    assert primed.startswith("id: 0.0.")
    assert received.startswith("event: received")
    accepted = upgrade.partition("\n\n")[2]
    assert on_socket.startswith(retry + accepted)
    assert "id: 3.0." in accepted


@pytest.mark.rule("W1", "W3")
async def test_an_event_block_is_its_id_its_type_unless_message_and_one_line_of_data(server: Server) -> None:
    session = await server.started()
    await session.backend.say(note("one"))
    await session.pend(session.start)
    stream = await session.events(session.start)
    one, accepted = await stream.events(2)
    text = stream.raw.decode()
    assert f"id: {one.id}\ndata: {(one.data or b'').decode()}\n\n" in text
    assert f"id: {accepted.id}\nevent: upgrade-accepted\ndata: {(accepted.data or b'').decode()}\n\n" in text


@pytest.mark.rule("W1", "W5")
async def test_a_frame_holds_whole_blocks_of_text(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    for n in range(200):
        await session.backend.emit(note(str(n), x="é" * 500))
    socket = await session.bind(session.start)
    gap = await socket.cross()
    assert len(gap) == 201
    assert len(socket.frames) < 50, "many events to a frame"
    for frame in socket.frames:
        decoder = BlockDecoder(2**20)
        assert decoder.feed(frame.encode())
        assert not decoder.pending


@on_both_servers
@pytest.mark.rule("W5")
async def test_the_subprotocol_is_mcp_v1(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    found = await server.knock(
        f"{session.base}/events", {"Last-Event-ID": session.start}, subprotocols=("other", "mcp.v1")
    )
    assert isinstance(found, Socket)
    assert found.headers["Sec-WebSocket-Protocol"] == "mcp.v1"


# U2: the echo --------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("U2", "C2")
async def test_the_101_and_the_first_frame_tell_what_was_committed_at_the_commit_point(
    serve: Serve,
) -> None:
    server = await serve(max_message_bytes=5000)
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    ids = await session.ids()
    socket = await session.bind(ids[0])
    assert socket.headers["X-MCP-Resume-Cursor"] == "3"
    frame = await socket.frame()
    assert frame.startswith("event: resume-cursor\ndata: ")
    assert frame.count("\n\n") == 1, "a frame of its own"
    body = json.loads(frame.removeprefix("event: resume-cursor\ndata: "))
    assert body == {
        "cursor": 3,
        "from": ids[0],
        "received": 1,
        "process": "p",
        "generation": 1,
        "durability": "memory",
        "limits": body["limits"],
    }
    assert body["limits"]["message"] == 5000


@pytest.mark.rule("U2", "B8")
async def test_the_generation_grows_with_every_binding(server: Server) -> None:
    session = await server.started()
    seen: list[int] = []
    for _ in range(3):
        socket = await session.bind(session.start)
        seen.append((await socket.control("resume-cursor"))["generation"])
        await socket.close()
    assert seen == sorted(set(seen))


@pytest.mark.rule("U2", "B6")
async def test_nothing_precedes_the_echo_a_probe_included(serve: Serve) -> None:
    """Somebody else asks for the session while the 101 is being written."""
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    log.gate.clear()
    binding = asyncio.create_task(session.bind(session.start))
    await soon(log.held.wait())
    newcomer = asyncio.create_task(session.get(session.start))
    await session.backend.emit(note("x"))
    assert (await session.get("junk")).status == 400
    log.gate.set()
    socket = await soon(binding)
    assert (await socket.frame()).startswith("event: resume-cursor\n")
    assert (await socket.frame()).startswith("event: probe\n")
    await socket.send(block_of({}, event="probe-ack"))
    assert (await newcomer).reason == (409, "websocket-bound")


# U3, U4: the gap -----------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("U3", "U4", "S4")
async def test_the_gap_comes_in_order_and_nothing_above_it_before_its_ack(serve: Serve) -> None:
    server = await serve(keepalive=0.03)
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(5)))
    ids = await session.ids()
    socket = await session.bind(ids[1])
    assert (await socket.control("resume-cursor"))["cursor"] == 6
    gap = await socket.events(4)
    assert [seq_of(event.id) for event in gap] == [3, 4, 5, 6]
    assert gap[-1].event == "upgrade-accepted"
    await session.backend.say(note("above"), note("above"))
    for _ in range(3):
        await socket.beat()
    await socket.ack(str(gap[-2].id))
    await socket.beat()
    await socket.ack(str(gap[-1].id))
    assert [seq_of((await socket.event()).id) for _ in range(2)] == [7, 8]


@pytest.mark.rule("U3", "U4")
async def test_with_an_empty_gap_nothing_flows_before_the_ack_either(serve: Serve) -> None:
    server = await serve(keepalive=0.03)
    session = await server.started()
    offer = await session.pend(session.start)
    (accepted,) = await (await session.events(session.start)).events(1)
    socket = await session.bind(str(accepted.id), offer["ticket"])
    assert await socket.control("resume-cursor") | {"limits": 0} == {
        "cursor": 1,
        "from": accepted.id,
        "received": 1,
        "process": "p",
        "generation": 1,
        "durability": "memory",
        "limits": 0,
    }
    await session.backend.say(note("above"))
    await socket.beat()
    await socket.beat()
    await socket.ack(str(accepted.id))
    assert (await socket.message())["method"] == "above"


@on_both_servers
@pytest.mark.rule("U4")
async def test_past_the_ack_window_the_socket_is_closed_4408_and_nothing_is_lost(serve: Serve) -> None:
    server = await serve(ack_window=0.05)
    session = await server.started()
    await session.backend.say(note("one"))
    socket = await session.bind(session.start)
    assert await socket.closed() == 4408
    stream = await session.events(session.start)
    assert [seq_of(event.id) for event in await stream.events(2)] == [1, 2]


@pytest.mark.rule("U4")
async def test_each_ack_of_progress_inside_the_gap_restarts_the_window(serve: Serve) -> None:
    window = 1.0
    server = await serve(ack_window=window, keepalive=window / 5)
    session = await server.started()
    await session.backend.say(*(note(str(n)) for n in range(5)))
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    gap = await socket.events(6)
    clock = asyncio.get_running_loop().time
    began = clock()
    for event in gap[:3]:
        await socket.beat()
        await socket.beat()
        await socket.ack(str(event.id))
    assert clock() - began > window, "longer in all than one window"
    await socket.ack(str(gap[-1].id))
    await session.backend.say(note("live"))
    assert (await socket.message())["method"] == "live"


@pytest.mark.rule("U4")
async def test_acks_without_progress_do_not_restart_the_window(serve: Serve) -> None:
    server = await serve(ack_window=0.2, keepalive=0.02)
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    gap = await socket.events(3)

    async def insist() -> None:
        while True:
            await socket.ack(str(gap[0].id))
            await socket.beat()

    insisting = asyncio.create_task(insist())
    with pytest.raises(Exception, match="4408"):
        await soon(insisting)


@pytest.mark.rule("U4", "C4")
async def test_an_ack_above_the_gap_opens_the_gate_as_one_of_c_does(server: Server) -> None:
    """It is proven, so it was seen (on a stream that was open before, say)."""
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    await session.backend.say(note("above"))
    answer = await session.get("junk")
    assert answer.data["resume-cursor"] == 2
    gap = await socket.events(1)
    await socket.ack(str(gap[0].id))
    assert (await socket.message())["method"] == "above"


@pytest.mark.rule("U5", "C4")
async def test_acks_on_the_socket_move_the_ack_cursor(server: Server) -> None:
    session, socket = await _bound(server)
    await session.backend.say(note("one"), note("two"))
    events = await socket.events(2)
    await socket.ack(str(events[-1].id))
    await socket.say(2, note("x"))
    assert await socket.control("received") == {"received": 2, "process": "p"}, "the ack came before it"
    assert (await session.ack(session.start)).json() == {"ack": 3}


@pytest.mark.parametrize(
    ("ack", "code"),
    [
        (b"event: cursor-ack\ndata: {}\n\n", 4400),
        (b"event: cursor-ack\ndata: no json\n\n", 4400),
        (b"event: cursor-ack\n\n", 4400),
        (b'event: cursor-ack\ndata: {"cursor":1}\n\n', 4400),
        (b'event: cursor-ack\ndata: {"cursor":"1"}\n\n', 4400),
        (b'event: cursor-ack\ndata: {"cursor":"1.0.0123456789abcdef"}\n\n', 4409),
        (b'event: cursor-ack\ndata: {"cursor":"99.0.0123456789abcdef"}\n\n', 4409),
    ],
)
@pytest.mark.rule("C1", "C3", "C5", "W2")
async def test_an_ack_of_no_cursor_of_ours_closes_the_socket(server: Server, ack: bytes, code: int) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    await socket.send(ack)
    assert await socket.closed() == code
    assert (await session.ack(session.start)).json() == {"ack": 0}


# L6 on a socket ------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("L6", "W2")
async def test_messages_on_a_socket_are_run_and_answered_received(serve: Serve) -> None:
    server = await serve()
    session, socket = await _bound(server)
    await socket.say(2, request(1))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    assert (await session.backend.take())["id"] == 1
    await session.backend.say(result(1))
    assert await socket.message() == result(1)


@pytest.mark.rule("L6")
async def test_one_statement_of_received_may_cover_several(server: Server) -> None:
    session, socket = await _bound(server)
    await socket.send(b"".join(block_of(request(n), n) for n in range(2, 50)))
    told: list[int] = []
    while not told or told[-1] < 49:
        told.append((await socket.control("received"))["received"])
    assert told == sorted(set(told))
    assert [(await session.backend.take())["id"] for _ in range(2, 50)] == list(range(2, 50))


@pytest.mark.rule("L6")
async def test_numbers_go_on_across_the_door(server: Server) -> None:
    session = await server.started()
    await session.post(2, note("on sse"))
    socket = await session.bind(session.start)
    assert (await socket.control("resume-cursor"))["received"] == 2
    await socket.say(3, note("on the socket"))
    await socket.events(1)
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert (await session.post(4, note("on sse again"))).json() == {"received": 4}
    methods = [(await session.backend.take())["method"] for _ in range(3)]
    assert methods == ["on sse", "on the socket", "on sse again"]


@pytest.mark.rule("L6")
async def test_messages_are_taken_before_the_gap_is_acknowledged(server: Server) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.say(2, request(2))
    assert (await session.backend.take())["id"] == 2
    await socket.control("resume-cursor")
    await socket.events(1)
    assert await socket.control("received") == {"received": 2, "process": "p"}


@pytest.mark.rule("L6")
async def test_a_repeat_on_a_socket_is_answered_again_and_not_run(server: Server) -> None:
    session, socket = await _bound(server)
    await socket.say(2, request(2))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    await socket.say(2, request(2))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    await socket.say(3, note("last"))
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert (await session.backend.take())["id"] == 2
    assert (await session.backend.take())["method"] == "last"


@on_both_servers
@pytest.mark.rule("L6")
async def test_a_hole_on_a_socket_is_answered_resend_once_and_never_closes(serve: Serve) -> None:
    server = await serve()
    session, socket = await _bound(server)
    for number in range(3, 20):
        await socket.say(number, request(number))
    assert await socket.control("received") == {"received": 1, "process": "p", "resend": True}
    await socket.say(2, request(2))
    assert await socket.control("received") == {"received": 2, "process": "p"}, (
        "one resend for the whole hole"
    )
    await socket.say(9, request(9))
    assert await socket.control("received") == {"received": 2, "process": "p", "resend": True}, (
        "received has moved: another"
    )
    for number in range(3, 10):
        await socket.say(number, request(number))
    while (await socket.control("received"))["received"] < 9:
        pass
    assert [(await session.backend.take())["id"] for _ in range(8)] == list(range(2, 10))


@pytest.mark.rule("L6")
async def test_a_resend_is_said_again_after_a_second_if_received_has_not_moved(server: Server) -> None:
    session, socket = await _bound(server)
    clock = asyncio.get_running_loop().time
    told: list[float] = []

    async def listen() -> None:
        for _ in range(2):
            assert await socket.control("received") == {"received": 1, "process": "p", "resend": True}
            told.append(clock())

    listening = asyncio.create_task(listen())
    while not listening.done():
        await socket.say(3, request(3))
        await session.get("junk")
    await listening
    assert told[1] - told[0] >= 0.95


@pytest.mark.rule("L6")
async def test_a_conflict_on_a_socket_is_answered_refused_and_uses_no_number(server: Server) -> None:
    session, socket = await _bound(server)
    await socket.say(2, request(2))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    await socket.say(2, request(22))
    refused = await socket.control("refused")
    assert (refused["n"], refused["reason"]) == (2, "message-conflict")
    assert refused["error"]["code"] == -32000
    assert refused["error"]["data"]["reason"] == "message-conflict"
    await socket.say(3, request(3))
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert [(await session.backend.take())["id"] for _ in range(2)] == [2, 3]


@on_both_servers
@pytest.mark.rule("L6", "W4", "W5")
async def test_a_malformed_message_on_a_socket_uses_its_number_and_is_refused_and_an_event(
    serve: Serve,
) -> None:
    server = await serve()
    session, socket = await _bound(server)
    await socket.say(2, b'{"jsonrpc":"2.0","id":7,"method":"x","params":{"x":NaN}}')
    seen: dict[str, Any] = {}
    while len(seen) < 3:
        block = await socket.block()
        kind = "event" if block.id is not None else block.event
        seen[kind] = json.loads(block.data or b"")
    assert (seen["refused"]["n"], seen["refused"]["reason"]) == (2, "malformed")
    assert seen["received"] == {"received": 2, "process": "p"}
    assert seen["event"]["id"] == 7
    assert seen["event"]["error"]["data"]["reason"] == "malformed"
    await socket.say(2, b"")
    assert await socket.control("received") == {"received": 2, "process": "p"}, (
        "a placeholder at a refused number is a repeat"
    )
    await socket.say(3, note("next"))
    assert await socket.control("received") == {"received": 3, "process": "p"}
    assert (await session.backend.take())["method"] == "next"


@pytest.mark.rule("W5", "L6")
async def test_a_batch_on_a_socket_is_refused_whole(server: Server) -> None:
    session, socket = await _bound(server)
    await socket.say(2, [request(1), request(2)])
    refused = await socket.control("refused")
    assert (refused["n"], refused["reason"]) == (2, "malformed")
    await socket.say(3, note("next"))
    while (await socket.control("received"))["received"] < 3:
        pass
    assert (await session.backend.take())["method"] == "next"
    assert (await session.get("junk")).data["resume-cursor"] == 1, "nobody's error was made an event"


@pytest.mark.rule("W5", "L6")
async def test_a_message_above_the_limit_in_a_frame_that_is_not_is_refused_and_an_event(
    serve: Serve,
) -> None:
    server = await serve(max_message_bytes=1000)
    session, socket = await _bound(server)
    await socket.say(2, request(7, x="x" * 1000))
    refused = await socket.control("refused")
    assert (refused["n"], refused["reason"]) == (2, "too-large")
    event = await socket.message()
    assert (event["id"], event["error"]["data"]["reason"]) == (7, "too-large")
    await socket.say(3, note("next"))
    assert (await session.backend.take())["method"] == "next"


@on_both_servers
@pytest.mark.rule("W5")
async def test_a_frame_above_the_limit_closes_1009_and_costs_only_that_connection(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000)
    session, socket = await _bound(server)
    await socket.say(2, request(7, x="x" * 3000))
    assert await socket.closed() == 1009
    stream = await session.events(session.start)
    await stream.block()
    assert json.loads((await stream.block()).data or b"") == {"received": 1, "process": "p"}, (
        "its number is not used"
    )
    assert (await session.post_blocks(block_of(b"", 2) + block_of(note("next"), 3))).json() == {"received": 3}
    assert (await session.backend.take())["method"] == "next"


@on_both_servers
@pytest.mark.rule("W5")
async def test_a_binary_frame_closes_1003(serve: Serve) -> None:
    server = await serve()
    session, socket = await _bound(server)
    await socket.send_binary(block_of(note("x"), 2))
    assert await socket.closed() == 1003
    stream = await session.events(session.start)
    await stream.block()
    assert json.loads((await stream.block()).data or b"") == {"received": 1, "process": "p"}


@pytest.mark.rule("W4", "W5")
async def test_a_frame_that_ends_inside_a_block_closes_4400(server: Server) -> None:
    session, socket = await _bound(server)
    await socket.send(block_of(note("x"), 2)[:-1])
    assert await socket.closed() == 4400
    assert len(session.backend.sent) == 1


@pytest.mark.rule("W4")
async def test_a_clients_frames_may_use_any_line_end_and_a_byte_order_mark(server: Server) -> None:
    session, socket = await _bound(server)
    text = json.dumps(request(2)).encode()
    await socket.send(b"\xef\xbb\xbf: comment\r\nid: 2\r\ndata: " + text + b"\r\n\r\n")
    await socket.send(b"id: 3\rdata: " + text.replace(b"2,", b"3,") + b"\r\r")
    assert [(await session.backend.take())["id"] for _ in range(2)] == [2, 3]


@pytest.mark.parametrize("number", [None, "0", "02", "x", str(2**63)])
@pytest.mark.rule("L6", "W2")
async def test_a_message_without_a_number_is_refused_and_never_closes(
    server: Server, number: str | None
) -> None:
    session, socket = await _bound(server)
    await socket.say(number, note("x"))
    refused = await socket.control("refused")
    assert (refused["n"], refused["reason"]) == (None, "malformed")
    await socket.say(2, note("next"))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    assert (await session.backend.take())["method"] == "next"


@pytest.mark.rule("L6")
async def test_a_socket_that_names_no_process_may_listen_but_not_send(server: Server) -> None:
    session = await server.started()
    socket = await session.bind(session.start, process=None)
    await socket.cross()
    await session.backend.say(note("news"))
    assert (await socket.message())["method"] == "news"
    await socket.say(2, note("x"))
    refused = await socket.control("refused")
    assert (refused["n"], refused["reason"]) == (2, "malformed")
    assert (await session.post(2, note("x"))).json() == {"received": 2}


@pytest.mark.rule("L6")
async def test_a_socket_of_a_process_that_was_replaced_is_told_message_conflict(server: Server) -> None:
    session, socket = await _bound(server)
    assert (await session.post(2, note("new"), process="q")).status == 202
    await socket.say(3, note("old"))
    assert await socket.control("received") == {"received": 2, "process": "q"}
    refused = await socket.control("refused")
    assert (refused["n"], refused["reason"]) == (3, "message-conflict")
    assert (await session.post(3, note("new"), process="q")).status == 202


@pytest.mark.rule("L6")
async def test_a_browsers_socket_names_its_process_in_the_query(server: Server) -> None:
    session = await server.started()
    found = await server.knock(f"{session.base}/events?cursor={session.start}&client=p")
    assert isinstance(found, Socket)
    await found.cross()
    await found.say(2, note("x"))
    assert await found.control("received") == {"received": 2, "process": "p"}


@pytest.mark.rule("W3")
async def test_blocks_of_kinds_a_server_does_not_know_are_ignored(server: Server) -> None:
    _, socket = await _bound(server)
    await socket.send(b"event: novelty\nid: 1\ndata: {}\n\nevent: probe-ack\ndata: {}\n\n: comment\n\n")
    await socket.say(2, note("x"))
    assert await socket.control("received") == {"received": 2, "process": "p"}


@pytest.mark.rule("L6", "L2")
async def test_received_is_not_said_before_the_inbox_has_committed(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, keepalive=0.02)
    session, socket = await _bound(server)
    log.gate.clear()
    await socket.say(2, request(2))
    await soon(log.held.wait())
    await socket.beat()
    await socket.beat()
    assert len(session.backend.sent) == 1
    log.gate.set()
    assert await socket.control("received") == {"received": 2, "process": "p"}
    assert (await session.backend.take())["id"] == 2


@pytest.mark.rule("L6")
async def test_a_backend_that_falls_behind_makes_a_socket_wait_and_loses_nothing(serve: Serve) -> None:
    server = await serve(max_inbox=4)
    session, socket = await _bound(server)
    server.backends.gate.clear()
    for number in range(2, 40):
        await socket.say(number, request(number))
    while (await socket.control("received"))["received"] < 6:  # one is being handed over, four wait
        pass
    refused = await session.post(7, request(7))
    assert (refused.reason, refused.data["received"]) == ((503, "limit"), 6)
    server.backends.gate.set()
    assert [(await session.backend.take())["id"] for _ in range(2, 40)] == list(range(2, 40))


@pytest.mark.rule("L6")
async def test_a_log_that_cannot_be_read_closes_the_socket_and_calls_nothing_a_conflict(
    serve: Serve,
) -> None:
    log = Fragile()
    server = await serve(log)
    session, socket = await _bound(server)
    await socket.say(2, request(2))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    log.unreadable = True
    await socket.say(2, request(2))
    assert await socket.closed() == 1013
    assert "refused" not in "".join(socket.frames)
    log.unreadable = False
    assert (await session.post(2, request(2))).json() == {"received": 2}


async def test_a_log_that_cannot_be_read_closes_the_socket_that_acks(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    accepted = await socket.event()
    log.unreadable = True
    await socket.ack(str(accepted.id))
    assert await socket.closed() == 1013


async def test_a_log_that_cannot_be_read_closes_the_socket_that_delivers(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session, socket = await _bound(server)
    log.unreadable = True
    await session.backend.emit(note("x"))
    assert await socket.closed() == 1013
    log.unreadable = False
    stream = await session.events(session.start)
    assert [seq_of(event.id) for event in await stream.events(2)] == [1, 2]


@pytest.mark.rule("L6")
async def test_a_repeat_that_arrives_while_the_log_is_full_is_no_conflict(serve: Serve) -> None:
    """What the repeat repeats is not known yet: the client is sent away, and resumes."""
    log = Fragile()
    server = await serve(log)
    session, socket = await _bound(server)
    log.full = True
    await socket.say(2, request(2))
    await socket.say(2, request(2))
    assert await socket.closed() == 1013
    assert "refused" not in "".join(socket.frames)
    log.full = False
    assert (await session.backend.take())["id"] == 2
    assert (await session.post(2, request(2))).json() == {"received": 2}
    assert len(session.backend.sent) == 2


# C8: keep-alive ------------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.rule("C8", "W3")
async def test_a_silent_connection_carries_a_keep_alive_without_an_id(serve: Serve) -> None:
    server = await serve(keepalive=0.03)
    session = await server.started()
    stream = await session.events(session.start)
    await stream.beat()
    await stream.beat()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.beat()
    await socket.beat()
    assert socket.frames[-1] == "event: keepalive\ndata: {}\n\n"


@pytest.mark.rule("C8")
async def test_the_interval_of_keep_alives_is_advertised(serve: Serve) -> None:
    server = await serve(keepalive=0.5)
    session = await server.open()
    assert session.opened.json()["timers"]["keepalive"] == 0.5
