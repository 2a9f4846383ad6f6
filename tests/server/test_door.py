"""U1, U6–U10, B1–B5, B9: the door, from the request for an upgrade to the 101, the boundary, the end."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from gapless.protocol.block import Block, BlockDecoder
from gapless.protocol.cursor import link_after, parse_event_id
from gapless.server import sessions as sessions_module
from tests.server.harness import (
    JSON,
    Answer,
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

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": KEY,
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "mcp.v1",
}
SUPERSEDED = {"reason": "non-resumable-boundary", "retryable": False, "action": "open-new-session"}


async def _committed(session: Session) -> int:
    """What the log has committed, asked so that nothing changes."""
    return (await session.get("junk")).data["resume-cursor"]


async def _kinds(session: Session) -> list[str]:
    """The types of all events."""
    stream = await session.events(session.start)
    kinds = [(await stream.event()).event for _ in range(await _committed(session))]
    stream.drop()
    return kinds


def _data(block: Block) -> dict[str, object]:
    return json.loads(block.data or b"")


# U1: cover or refuse -------------------------------------------------------------------------------


@on_both_servers
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("U1", "C5")
async def test_an_upgrade_that_cannot_be_covered_is_refused_and_an_open_stream_drains(
    serve: Serve, steps: int
) -> None:
    server = await serve(retain_events=4)
    session = await server.started()
    stream = await session.events(session.start)
    await session.backend.say(*(note(str(n)) for n in range(9)))
    answer = await (session.denied(session.start) if steps == 1 else session.upgrade(session.start))
    assert answer.reason == (409, "cursor-evicted")
    assert (answer.data["floor"], answer.data["resume-cursor"]) == (5, 9)
    events = await stream.events(9)
    await session.backend.say(note("and on"))
    assert (await stream.message())["method"] == "and on", "the stream goes on"
    assert await _committed(session) == 10, "nothing was appended"
    drained = str(events[-1].id)
    if steps == 1:
        await (await session.bind(drained)).cross()
    else:
        await (await session.bind(drained, (await session.pend(drained))["ticket"])).cross()


@pytest.mark.rule("U1")
async def test_a_stream_below_u_still_drains_to_it_when_the_socket_goes(server: Server) -> None:
    """It was open when the door was passed, and has not been read since."""
    session = await server.started()
    await session.backend.say(note("one"))
    stream = await session.events(session.start)
    stream.stall()
    socket = await session.bind(session.start)
    await socket.cross()
    socket.drop()
    stream.resume()
    assert [(await stream.event()).event for _ in range(2)] == ["message", "upgrade-accepted"]
    assert [b for b in await stream.end() if b.id] == []


@pytest.mark.rule("L4")
async def test_the_gap_of_an_upgrade_is_pinned_until_its_ack(serve: Serve) -> None:
    server = await serve(retain_events=64)
    session = await server.started()
    await session.backend.say(note("one"), note("two"))
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    gap = await socket.events(3)
    await session.backend.say(*(note(str(n)) for n in range(100)))
    assert (await session.get("junk")).data["floor"] == 0, "pinned, though far more than 64 are kept"
    await socket.ack(str(gap[-1].id))
    await socket.events(100)
    await session.backend.say(note("another"))
    assert (await session.get("junk")).data["floor"] >= 39


@pytest.mark.rule("L4")
async def test_a_pin_yields_to_the_limit_of_bytes(serve: Serve) -> None:
    server = await serve(retain_bytes=64_000)
    session = await server.started()
    await session.backend.say(note("one"))
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    await socket.events(2)
    await session.backend.say(*(note("x" * 2000) for _ in range(60)))
    assert (await session.get("junk")).data["floor"] >= 2
    assert await socket.closed() == 4409, "a position below the floor is closed, not moved (L3)"


@pytest.mark.rule("L4")
async def test_a_pin_ends_with_the_upgrade_window(serve: Serve) -> None:
    server = await serve(retain_events=8, upgrade_window=100.0, session_expiry=1e9)
    session = await server.started()
    await session.backend.say(note("one"))
    await session.pend(session.start)
    await session.backend.say(*(note(str(n)) for n in range(20)))
    now = asyncio.get_running_loop().time()
    for later, floor in ((0, 0), (90, 0), (110, 14)):
        await server.app.sessions.clean(now + later)
        assert (await session.get("junk")).data["floor"] == floor


# U6: 426 -------------------------------------------------------------------------------------------


async def _unavailable(session: Session, how: str) -> Answer:
    server, events = session.server, f"{session.base}/events"
    match how:
        case "no subprotocol":
            answer = await server.knock(events, {"Last-Event-ID": session.start}, subprotocols=())
        case "another subprotocol":
            answer = await server.knock(events, {"Last-Event-ID": session.start}, subprotocols=("mcp",))
        case "a ticket but no WebSocket":
            answer = await server.ask("GET", f"{events}?ticket=t&cursor={session.start}")
        case "a WebSocket key but no WebSocket":
            answer = await session.get(session.start, **{"Sec-WebSocket-Key": KEY})
        case _:
            answer = await session.upgrade(session.start, protocol="mcp.v2")
    assert isinstance(answer, Answer)
    return answer


UNAVAILABLE = [
    "no subprotocol",
    "another subprotocol",
    "a ticket but no WebSocket",
    "a WebSocket key but no WebSocket",
    "another protocol in the body",
]


@on_both_servers
@pytest.mark.parametrize("how", UNAVAILABLE)
@pytest.mark.rule("U6", "U8")
async def test_a_door_that_is_not_there_is_426_with_what_would_be_and_nothing_changed(
    serve: Serve, how: str
) -> None:
    server = await serve()
    session = await server.started()
    stream = await session.events(session.start)
    answer = await _unavailable(session, how)
    assert answer.reason == (426, "upgrade-unavailable")
    assert answer.header("upgrade").lower() == "websocket"
    assert "upgrade" in answer.header("connection").lower()
    assert answer.header("sec-websocket-protocol") == "mcp.v1"
    assert await _committed(session) == 0
    await session.backend.say(note("on"))
    assert (await stream.message())["method"] == "on", "the stream goes on"


@pytest.mark.parametrize("how", UNAVAILABLE)
@pytest.mark.rule("U6", "B3")
async def test_a_426_while_pending_leaves_the_negotiation_as_it_is(server: Server, how: str) -> None:
    session = await server.open()
    offer = await session.pend(session.start)
    (accepted,) = await (await session.events(session.start)).events(1)
    assert (await _unavailable(session, how)).reason == (426, "upgrade-unavailable")
    answer = await server.ask(
        "GET", f"{session.base}/events?ticket={offer['ticket']}&cursor={accepted.id}", {"Accept": "*/*"}
    )
    assert answer.reason == (426, "upgrade-unavailable"), "not the boundary: no token is burned"
    assert await session.pend(session.start) == offer
    await (await session.bind(str(accepted.id), offer["ticket"])).control("resume-cursor")


@on_both_servers
@pytest.mark.parametrize(
    "broken", [{"Sec-WebSocket-Version": "8"}, {"Sec-WebSocket-Key": "short"}, {"Sec-WebSocket-Version": "x"}]
)
@pytest.mark.rule("U6", "U8")
async def test_a_handshake_that_is_none_gets_the_http_servers_own_refusal(
    serve: Serve, broken: dict[str, str]
) -> None:
    server = await serve()
    session = await server.open()
    wire = await server.wire()
    headers = HANDSHAKE | {"Last-Event-ID": session.start} | broken
    await wire.send("GET", f"{session.base}/events", headers)
    status = (await wire.head()).status
    if broken == {"Sec-WebSocket-Key": "short"} and serve.kind == "hypercorn":
        return  # hypercorn takes any key
    assert 400 <= status < 500
    assert await _committed(session) == 0


# U7, U9: one door at a time ------------------------------------------------------------------------


@pytest.mark.rule("U7")
async def test_the_same_nonce_while_pending_gets_the_same_acceptance_again(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    for _ in range(3):
        assert await session.pend(session.start, "mine") == offer
    assert await _committed(session) == 1


@pytest.mark.rule("U7")
async def test_the_same_nonce_at_u_gets_the_same_acceptance_too(server: Server) -> None:
    """A client that has read `U` and repeats its POST, whose answer was lost."""
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    (accepted,) = await (await session.events(session.start)).events(1)
    assert await session.pend(str(accepted.id), "mine") == offer


@pytest.mark.rule("U7")
async def test_another_nonce_below_u_is_shown_the_same_acceptance(server: Server) -> None:
    session = await server.started()
    await session.backend.say(note("one"))
    (one,) = await session.ids()
    offer = await session.pend(one, "mine")
    for cursor in (session.start, one):
        assert await session.pend(cursor, f"other {cursor}") == offer
    assert offer["negotiation"] == "mine"
    assert await _committed(session) == 2


@on_both_servers
@pytest.mark.rule("U7", "B1", "B4")
async def test_another_nonce_at_u_burns_the_session_and_is_404(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.post(2, request(7))
    stream = await session.events(session.start)
    await session.pend(session.start, "mine")
    accepted = await stream.event()
    answer = await session.upgrade(str(accepted.id), "other")
    assert answer.reason == (404, "session-superseded")
    assert answer.data["action"] == "open-new-session"
    assert (await session.upgrade(session.start, "mine")).reason == (404, "session-superseded")


@pytest.mark.rule("U7")
async def test_upgrades_asked_for_at_once_share_one_acceptance(server: Server) -> None:
    session = await server.open()
    offers = await asyncio.gather(*(session.pend(session.start, f"n{n}") for n in range(6)))
    assert len({json.dumps(offer) for offer in offers}) == 1
    assert await _kinds(session) == ["upgrade-accepted"]


@on_both_servers
@pytest.mark.rule("U7")
async def test_every_nonce_that_was_shown_an_acceptance_is_concluded_with_it(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    await session.pend(session.start, "other")
    socket = await session.bind(session.start, offer["ticket"])
    await socket.control("resume-cursor")
    for nonce in ("mine", "other"):
        answer = await session.upgrade(session.start, nonce)
        assert answer.reason == (409, "ticket-spent")
        assert answer.data["action"] == "resume"
    socket.drop()
    for nonce in ("mine", "other"):
        assert (await session.upgrade(session.start, nonce)).reason == (409, "ticket-spent"), "for its life"


@on_both_servers
@pytest.mark.rule("U7")
async def test_a_ticket_is_spent_by_the_handshake_that_binds(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    offer = await session.pend(session.start)
    socket = await session.bind(session.start, offer["ticket"])
    assert (await session.denied(session.start, offer["ticket"])).reason == (409, "ticket-spent")
    await socket.cross()
    socket.drop()
    assert (await session.denied(session.start, offer["ticket"])).reason == (409, "ticket-spent")


@pytest.mark.parametrize("ticket", ["never-issued", "x" * 500, "%C3%A9", "%00", "%FF"])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.rule("U7", "U8")
async def test_a_ticket_that_was_never_issued_is_as_a_spent_one(
    server: Server, ticket: str, pending: bool
) -> None:
    session = await server.open()
    if pending:
        await session.pend(session.start)
    assert (await session.denied(session.start, ticket)).reason == (409, "ticket-spent")
    assert await _committed(session) == int(pending)


@pytest.mark.rule("U7")
async def test_a_ticket_opens_no_other_session(server: Server) -> None:
    session, other = await server.open(), await server.open()
    offer = await session.pend(session.start)
    await other.pend(other.start)
    assert (await other.denied(other.start, offer["ticket"])).reason == (409, "ticket-spent")
    await (await session.bind(session.start, offer["ticket"])).cross()


@on_both_servers
@pytest.mark.rule("U7", "U9", "B3")
async def test_a_one_step_handshake_while_pending_completes_that_negotiation(serve: Serve) -> None:
    server = await serve()
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    socket = await session.bind(session.start)
    (accepted,) = await socket.cross()
    assert _data(accepted)["ticket"] == offer["ticket"], "its U is the one that was there"
    assert (await session.upgrade(session.start, "mine")).reason == (409, "ticket-spent")
    assert (await session.denied(session.start, offer["ticket"])).reason == (409, "ticket-spent")
    assert await _committed(session) == 1


@pytest.mark.rule("U7", "U9")
async def test_a_handshake_at_u_completes_the_negotiation_with_an_empty_gap(server: Server) -> None:
    """A client whose stream ended at `upgrade-accepted` goes to the door with the cursor it has by then."""
    session = await server.open()
    offer = await session.pend(session.start)
    (accepted,) = await (await session.events(session.start)).events(1)
    socket = await session.bind(str(accepted.id), offer["ticket"])
    echo = await socket.control("resume-cursor")
    assert (echo["cursor"], echo["from"]) == (1, accepted.id)


@pytest.mark.rule("U7", "B7")
async def test_after_a_socket_another_upgrade_has_a_u_and_a_ticket_of_its_own(server: Server) -> None:
    session = await server.open()
    offers = []
    for n in range(3):
        offer = await session.pend(session.start, f"n{n}")
        offers.append(offer)
        socket = await session.bind(session.start, offer["ticket"])
        await socket.cross()
        await socket.close()
    assert [offer["event"] for offer in offers] == [1, 2, 3]
    assert len({offer["ticket"] for offer in offers}) == 3


@on_both_servers
@pytest.mark.rule("U2", "U3", "U8")
async def test_one_step_appends_u_and_binds_in_one(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.backend.say(note("one"))
    socket = await session.bind(session.start)
    assert socket.headers["X-MCP-Resume-Cursor"] == "2"
    one, accepted = await socket.cross()
    assert _data(one)["method"] == "one"
    data = _data(accepted)
    assert accepted.event == "upgrade-accepted"
    assert (data["ticket"], data["url"]) == (None, f"{session.base}/events")
    assert data["negotiation"]


@pytest.mark.rule("U7")
async def test_two_steps_append_u_with_the_ticket_and_where_to_go(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start, "mine")
    (accepted,) = await (await session.events(session.start)).events(1)
    assert accepted.event == "upgrade-accepted"
    assert seq_of(accepted.id) == offer["event"]
    assert _data(accepted) == {key: offer[key] for key in ("negotiation", "ticket", "url")}


@on_both_servers
@pytest.mark.rule("U7")
async def test_a_browsers_handshake_states_ticket_and_cursor_in_the_query(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.backend.say(note("one"))
    (one,) = await session.ids()
    offer = await session.pend(session.start)
    found = await server.knock(
        f"{offer['url']}?ticket={offer['ticket']}&cursor={one}", {"Origin": "http://localhost:3000"}
    )
    assert isinstance(found, Socket)
    (accepted,) = await found.cross()
    assert accepted.event == "upgrade-accepted"


# U8: before and after the commit point -------------------------------------------------------------


@pytest.mark.rule("U8")
async def test_a_handshake_that_breaks_off_changes_nothing(server: Server) -> None:
    session = await server.open()
    wire = await server.wire()
    head = f"GET {session.base}/events HTTP/1.1\r\nHost: {server.host}\r\nUpgrade: websocket\r\n"
    await wire.write(head.encode())
    wire.drop()
    assert await _committed(session) == 0


@pytest.mark.rule("U8", "B7", "L2")
async def test_a_handshake_whose_commit_is_not_durable_gets_no_101(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, keepalive=0.02)
    session = await server.started()
    other = await server.open()
    clock = await other.events(other.start)
    log.gate.clear()
    wire = await server.wire()
    await wire.send("GET", f"{session.base}/events", HANDSHAKE | {"Last-Event-ID": session.start})
    heading = asyncio.create_task(wire.head())
    await soon(log.held.wait())
    await clock.beat()
    await clock.beat()
    assert not heading.done()
    log.gate.set()
    head = await heading
    assert (head.status, head.header("x-mcp-resume-cursor")) == (101, "1")


@on_both_servers
async def test_a_frame_that_is_not_masked_ends_the_connection_and_is_not_heard(serve: Serve) -> None:
    """RFC 6455 §10.3: whoever masks nothing could have a proxy in between take it for something else."""
    server = await serve()
    session = await server.started()
    wire = await server.wire()
    await wire.send("GET", f"{session.base}/events", HANDSHAKE | {"Last-Event-ID": session.start})
    assert (await wire.head()).status == 101
    block = block_of(note("unmasked"), 2)
    await wire.write(bytes([0x81, len(block)]) + block)
    await wire.rest()  # to its end
    assert (await session.post(2, note("masked"))).status == 202, "number 2 is free still"
    assert (await session.backend.take())["method"] == "masked"


@on_both_servers
@pytest.mark.rule("U8", "B7")
async def test_a_peer_that_goes_before_its_101_leaves_the_session_free(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    log.gate.clear()
    wire = await server.wire()
    await wire.send("GET", f"{session.base}/events", HANDSHAKE | {"Last-Event-ID": session.start})
    await soon(log.held.wait())
    wire.drop()
    assert (await session.get("junk")).status == 400
    log.gate.set()
    stream = await session.events(session.start)
    assert (await stream.event()).event == "upgrade-accepted", "history (U8)"
    await session.backend.say(note("on"))
    assert (await stream.message())["method"] == "on"


@pytest.mark.rule("U8", "B6", "B7")
async def test_a_handshake_that_could_not_be_stored_leaves_nobody_bound(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    log.full = True
    answer = await session.denied(session.start)
    assert answer.reason == (503, "storage")
    assert answer.header("retry-after")
    log.full = False
    stream = await session.events(session.start)
    assert (await stream.event()).event == "upgrade-accepted", "history, if it was stored after all"
    assert (await session.post(2, note("x"))).status == 202


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.rule("U8", "B3")
async def test_a_handshake_that_could_not_be_stored_leaves_the_negotiation_pending(
    serve: Serve, one_step: bool
) -> None:
    """The refusal says "retry": the same ticket lets the same client through, and U is a boundary still."""
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    offer = await session.pend(session.start)
    ticket = None if one_step else offer["ticket"]
    log.full = True
    answer = await session.denied(session.start, ticket=ticket)
    assert answer.reason == (503, "storage")
    log.full = False
    assert (await session.get(session.start)).body.count(b"upgrade-accepted") == 1, "drained to U (B2)"
    socket = await session.bind(session.start, ticket=ticket)
    assert json.loads((await socket.block()).data or b"")["cursor"] == 1
    assert (await session.upgrade(session.start, offer["negotiation"])).reason == (409, "ticket-spent")


# U10: streams end at U -----------------------------------------------------------------------------


@on_both_servers
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.rule("U10")
async def test_every_event_stream_delivers_up_to_u_and_ends_with_a_retry_before_it(
    serve: Serve, steps: int
) -> None:
    server = await serve(upgrade_window=17.0)
    session = await server.started()
    siblings = [await session.events(session.start) for _ in range(3)]
    await session.backend.say(note("one"))
    for sibling in siblings:
        await sibling.event()
    if steps == 1:
        await session.bind(session.start)
    else:
        await session.pend(session.start)
    await session.backend.say(note("after"))
    for sibling in siblings:
        retry, accepted = await sibling.block(), await sibling.block()
        assert (retry.id, retry.data, retry.retry) == (None, None, 17_000)
        assert accepted.event == "upgrade-accepted"
        assert seq_of(accepted.id) == 2
        assert await sibling.end() == [], "nothing above U"


@pytest.mark.rule("U10", "B2")
async def test_a_stream_resumed_below_u_delivers_up_to_u_and_ends(serve: Serve) -> None:
    server = await serve(upgrade_window=17.0)
    session = await server.started()
    await session.backend.say(note("one"))
    (one,) = await session.ids()
    await session.pend(one)
    await session.backend.say(note("after"))
    for cursor, expected in ((session.start, [1, 2]), ("0", [1, 2]), (one, [2])):
        answer = await session.get(cursor)
        assert answer.status == 200
        blocks = BlockDecoder(10_000).feed(answer.body)
        events = [block for block in blocks if block.id is not None and block.data]
        assert [seq_of(event.id) for event in events] == expected
        before_first = blocks[blocks.index(events[0]) - 1]
        assert before_first.retry == 17_000
    assert await session.pend(one) == await session.pend(one), "and nothing is burned"


@pytest.mark.rule("U10")
async def test_a_stream_that_is_opened_while_its_session_is_negotiated_ends_at_u_too(
    server: Server,
) -> None:
    session = await server.started()
    opening = asyncio.gather(*(session.events(session.start) for _ in range(4)))
    await session.pend(session.start)
    opened = await opening
    for stream in opened:
        assert (await stream.event()).event == "upgrade-accepted"
        assert await stream.end() == []


@pytest.mark.rule("U9", "U10", "B7")
async def test_once_the_socket_is_gone_u_is_history_and_streams_run_past_it(server: Server) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    (accepted,) = await socket.cross()
    await socket.close()
    await session.backend.say(note("after"))
    for cursor in (session.start, str(accepted.id), "0"):
        stream = await session.events(cursor)
        while (event := await stream.event()).event != "message":
            pass
        assert _data(event)["method"] == "after"
        await session.backend.emit(note("after"))
        await stream.event()
        stream.drop()


# B1: the boundary ----------------------------------------------------------------------------------


async def _pending(server: Server) -> tuple[Session, str]:
    """A session at the boundary, with two open requests and an event after `U`; and its `U`."""
    session = await server.started()
    await session.backend.say(note("one"))
    stream = await session.events(session.start)
    await session.post(2, request(7))
    await session.post(3, request("eight"))
    await session.pend(session.start)
    await session.backend.say(note("after"))
    accepted = (await stream.events(2))[-1]
    assert accepted.event == "upgrade-accepted"
    return session, str(accepted.id)


@on_both_servers
@pytest.mark.rule("B1", "L7")
async def test_a_resume_at_u_is_served_what_is_left_settled_and_superseded(serve: Serve) -> None:
    server = await serve()
    session, accepted = await _pending(server)
    stream = await session.events(accepted)
    primed = await stream.block()
    assert primed.id == accepted
    blocks = [b for b in await stream.end() if b.id]
    assert [seq_of(block.id) for block in blocks] == [3, 4, 5, 6]
    after, *settled, superseded = blocks
    assert _data(after)["method"] == "after"
    for block, id in zip(settled, (7, "eight"), strict=True):
        data = _data(block)
        assert data["id"] == id
        assert data["error"]["code"] == -32000  # type: ignore[index]
        assert data["error"]["data"] == {"reason": "outcome-unknown"}  # type: ignore[index]
    assert superseded.event == "session-superseded"
    assert _data(superseded) == SUPERSEDED


@on_both_servers
@pytest.mark.rule("B1", "W3")
async def test_a_stream_without_a_cursor_while_pending_gets_the_end_alone_as_a_control_block(
    serve: Serve,
) -> None:
    server = await serve()
    session, _ = await _pending(server)
    answer = await session.get()
    assert answer.status == 200
    assert answer.header("content-type") == "text/event-stream"
    head, _, tail = answer.body.partition(b"data: ")
    assert head == b"event: session-superseded\n", "no ID"
    assert tail.endswith(b"\n\n")
    assert json.loads(tail) == SUPERSEDED
    assert (await session.get(session.start)).reason == (404, "session-superseded")


@pytest.mark.rule("B1")
async def test_a_resume_above_u_burns_as_one_at_it(server: Server) -> None:
    session = await server.started()
    stream = await session.events(session.start)
    await session.pend(session.start)
    await session.backend.say(note("after"))
    accepted = await stream.event()
    # The client has its cursor above U from nowhere on SSE; it is proven all the same.
    data = b'{"jsonrpc":"2.0","method":"after","params":{}}'
    link = link_after(parse_event_id(str(accepted.id)).link, 0, "message", data)
    resumed = await session.events(f"2.0.{link.hex()}")
    (superseded,) = [b for b in await resumed.end() if b.id and b.data]
    assert superseded.event == "session-superseded"


@on_both_servers
@pytest.mark.rule("B4", "B1")
async def test_a_burned_token_is_404_with_its_reason_on_every_endpoint_before_any_101(
    serve: Serve,
) -> None:
    server = await serve()
    session, accepted = await _pending(server)
    await (await session.events(accepted)).end()
    answers = [
        await session.get(session.start),
        await session.get(accepted),
        await session.get(),
        await session.post(4, note("x")),
        await session.post_blocks(b""),
        await session.upgrade(session.start),
        await session.upgrade(session.start, "n2"),
        await session.ack(session.start),
        await session.denied(session.start),
        await session.denied(session.start, "any"),
        await session.denied(None),
        await session.delete(),
    ]
    for answer in answers:
        assert answer.reason == (404, "session-superseded")
        assert answer.data["action"] == "open-new-session"
        assert answer.data["retryable"] is False


@pytest.mark.rule("B1", "L7")
async def test_nothing_is_appended_or_dispatched_after_the_end(server: Server) -> None:
    session, accepted = await _pending(server)
    await (await session.events(accepted)).end()
    sent = len(session.backend.sent)
    await session.backend.say(result(7), note("too late"))
    await session.post(4, note("too late"))
    assert (await session.get("junk")).data["resume-cursor"] == 6
    assert len(session.backend.sent) == sent


@pytest.mark.rule("B1")
async def test_a_sibling_that_reconnects_at_u_burns_the_session_for_all(server: Server) -> None:
    """U10: an `EventSource` that does not call `close()` does this by itself."""
    session = await server.started()
    mine, sibling = await session.events(session.start), await session.events(session.start)
    offer = await session.pend(session.start)
    accepted = await sibling.event()
    await sibling.end()
    await (await session.events(str(accepted.id))).end()
    assert (await session.denied(session.start, offer["ticket"])).reason == (404, "session-superseded")
    assert (await mine.event()).event == "upgrade-accepted"
    await mine.end()


@pytest.mark.rule("B1")
async def test_two_resumes_at_the_boundary_at_once_burn_it_once(server: Server) -> None:
    session, accepted = await _pending(server)
    answers = await asyncio.gather(*(session.get(accepted) for _ in range(3)))
    assert sorted(answer.status for answer in answers) == [200, 404, 404]
    (served,) = [answer for answer in answers if answer.status == 200]
    assert served.body.count(b"session-superseded") == 1


@pytest.mark.rule("B3")
async def test_a_handshake_that_was_dropped_may_be_repeated_with_its_ticket(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start)
    for _ in range(2):
        wire = await server.wire()
        await wire.write(f"GET {session.base}/events?ticket={offer['ticket']} HTTP/1.1\r\n".encode())
        wire.drop()
        answer = await session.denied(None, offer["ticket"])
        assert answer.reason == (400, "malformed")
    await (await session.bind(session.start, offer["ticket"])).cross()


@pytest.mark.rule("B5")
async def test_while_pending_every_request_is_answered_within_a_round_trip(server: Server) -> None:
    session = await server.started()
    stream = await session.events(session.start)
    offer = await soon(session.pend(session.start), 1)
    await soon(stream.event(), 1)
    await soon(stream.end(), 1)
    assert (await soon(session.get(session.start), 1)).status == 200
    assert (await soon(session.post(2, note("x")), 1)).status == 202
    assert (await soon(session.ack(session.start), 1)).status == 200
    assert (await soon(session.upgrade(session.start, "n2"), 1)).json() == offer
    assert (await soon(session.denied("junk"), 1)).status == 400
    assert (await soon(session.get(), 1)).status == 200
    assert (await soon(session.denied(session.start), 1)).status == 404


# B9: DELETE ----------------------------------------------------------------------------------------


def _ended(block: Block, reason: str) -> None:
    assert block.event == "session-superseded"
    assert _data(block) == {"reason": reason, "retryable": False, "action": "open-new-session"}


@on_both_servers
@pytest.mark.rule("B9", "L7")
async def test_delete_settles_what_is_open_and_ends_every_stream_with_the_reason(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    await session.post(2, request(7))
    await session.post(3, request(8))
    await session.backend.take()
    await session.backend.say(result(7))
    streams = [await session.events(session.start) for _ in range(2)]
    assert (await session.delete()).status == 204
    for stream in streams:
        done, settled, superseded = [b for b in await stream.end() if b.id and b.data]
        assert _data(done) == result(7), "settled once, by its result"
        assert (_data(settled)["id"], _data(settled)["error"]["data"]) == (8, {"reason": "outcome-unknown"})  # type: ignore[index]
        _ended(superseded, "session-ended")
    await soon(session.backend.closed.wait())


@on_both_servers
@pytest.mark.rule("B9", "L7")
async def test_delete_reaches_a_bound_socket_as_an_event_and_closes_it_4404(serve: Serve) -> None:
    server = await serve()
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.cross()
    await socket.say(2, request(7))
    assert await socket.control("received") == {"received": 2, "process": "p"}
    assert (await session.delete()).status == 204
    settled, superseded = await socket.events(2)
    assert _data(settled)["error"]["data"] == {"reason": "outcome-unknown"}  # type: ignore[index]
    _ended(superseded, "session-ended")
    assert await socket.closed() == 4404


@pytest.mark.rule("B9", "U4")
async def test_a_gated_socket_is_closed_4404_without_seeing_the_end(server: Server) -> None:
    session = await server.started()
    socket = await session.bind(session.start)
    await socket.control("resume-cursor")
    await socket.events(1)
    assert (await session.delete()).status == 204
    assert await socket.closed() == 4404
    assert socket.why == "session-ended"
    assert "session-superseded" not in "".join(socket.frames)


@pytest.mark.rule("B9")
async def test_delete_while_pending_ends_the_negotiation(server: Server) -> None:
    session = await server.open()
    offer = await session.pend(session.start)
    assert (await session.delete()).status == 204
    assert (await session.denied(session.start, offer["ticket"])).reason == (404, "session-ended")
    assert (await session.get(session.start)).reason == (404, "session-ended")


@pytest.mark.rule("B9")
async def test_deletes_at_once_end_a_session_once(server: Server) -> None:
    session = await server.started()
    stream = await session.events(session.start)
    answers = await asyncio.gather(*(session.delete() for _ in range(4)))
    assert sorted(answer.status for answer in answers) == [204, 404, 404, 404]
    (superseded,) = [b for b in await stream.end() if b.id and b.data]
    _ended(superseded, "session-ended")


@pytest.mark.rule("B4")
async def test_a_tombstone_tells_the_reason_for_its_life_and_then_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(tombstone=100.0)
    sessions, session = server.app.sessions, await server.started()
    await session.delete()
    now = time.time()
    await sessions.clean(asyncio.get_running_loop().time())
    assert list(sessions.all()) == []
    for later in (0, 98):
        monkeypatch.setattr(sessions_module.time, "time", lambda later=later: now + later)
        await sessions._sweep()
        answer = await session.get(session.start)
        assert answer.reason == (404, "session-ended")
        assert answer.data["resume-cursor"] == 1
        assert (await session.denied(session.start)).reason == (404, "session-ended")
        assert (await server.ask("PUT", session.base, JSON)).reason == (404, "session-ended")
    monkeypatch.setattr(sessions_module.time, "time", lambda: now + 101)
    await sessions._sweep()
    assert (await session.get(session.start)).reason == (404, "session-unknown")
    assert await server.log.sessions() == (), "and the log has forgotten it"
