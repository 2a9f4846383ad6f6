"""L6 over POST: numbers, digests, processes, and what a refused message costs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gapless.log.sqlite import SqliteLog
from tests.server.harness import (
    BLOCKS,
    JSON,
    Fragile,
    Serve,
    Server,
    Session,
    block_of,
    note,
    request,
    result,
)


async def _received(session: Session) -> int:
    """What a new connection is told (the block after priming)."""
    stream = await session.events(session.start)
    await stream.block()
    block = await stream.block()
    stream.drop()
    assert block.event == "received"
    return json.loads(block.data or b"")["received"]


# Numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        None,
        "",
        "0",
        "-1",
        "+1",
        "01",
        "1.0",
        "1e0",
        " 1 x",
        "one",
        "0x1",
        "\u0661",
        "9223372036854775808",
        "1" * 5000,
    ],
)
@pytest.mark.rule("L6")
async def test_a_number_that_is_no_plain_decimal_from_1_is_malformed(
    server: Server, number: str | None
) -> None:
    session = await server.open()
    answer = await session.post(number, note("x"))
    assert answer.reason == (400, "malformed")
    assert answer.data["received"] == 0
    assert (await session.post(1, note("x"))).status == 202, "it used no number"


@pytest.mark.rule("L6")
async def test_the_highest_number_is_a_hole_as_any_other(server: Server) -> None:
    session = await server.open()
    assert (await session.post(2**63 - 1, note("x"))).reason == (409, "message-gap")


@pytest.mark.rule("L6")
async def test_a_hole_is_refused_and_nothing_of_it_is_kept(server: Server) -> None:
    session = await server.started()
    answer = await session.post(3, note("third"))
    assert answer.reason == (409, "message-gap")
    assert (answer.data["received"], answer.data["action"]) == (1, "resend")
    assert (await session.post(2, note("second"))).json() == {"received": 2}
    assert (await session.post(3, note("another third"))).json() == {"received": 3}
    assert [(await session.backend.take())["method"] for _ in range(2)] == ["second", "another third"]


@pytest.mark.rule("L6")
async def test_a_repeat_with_the_same_bytes_is_answered_and_not_run_again(server: Server) -> None:
    session = await server.started()
    for number in (2, 3):
        await session.post(number, request(number))
    for number in (2, 3, 1):
        message = note("notifications/initialized") if number == 1 else request(number)
        answer = await session.post(number, message)
        assert (answer.status, answer.json()) == (202, {"received": 3})
    await session.post(4, note("last"))
    assert [(await session.backend.take()).get("id") for _ in range(3)] == [2, 3, None]
    assert len(session.backend.sent) == 4


@pytest.mark.rule("L6")
async def test_a_repeat_of_an_answered_request_is_not_run_again(server: Server) -> None:
    session = await server.started()
    await session.post(2, request(7))
    await session.backend.take()
    await session.backend.say(result(7))
    assert (await session.post(2, request(7))).json() == {"received": 2}
    await session.post(3, note("last"))
    assert (await session.backend.take())["method"] == "last"
    assert len(await session.ids()) == 1


@pytest.mark.parametrize("other", [b'{"jsonrpc":"2.0","method":"y"}', b'{"jsonrpc":"2.0", "method":"x"}'])
@pytest.mark.rule("L6")
async def test_the_same_number_with_other_bytes_is_a_conflict(server: Server, other: bytes) -> None:
    """The digest is of the JSON text: white space counts."""
    session = await server.started()
    await session.post(2, b'{"jsonrpc":"2.0","method":"x"}')
    answer = await session.post(2, other)
    assert answer.reason == (409, "message-conflict")
    assert answer.data["received"] == 2
    assert (await session.post(3, note("z"))).status == 202, "and uses no number"


@pytest.mark.rule("L6")
async def test_one_message_over_either_kind_of_body_has_one_digest(server: Server) -> None:
    session = await server.started()
    text = b'{"jsonrpc":"2.0","method":"x"}'
    assert (await session.post(2, text)).status == 202
    assert (await session.post_blocks(b"id: 2\ndata: " + text + b"\n\n")).json() == {"received": 2}
    lines = b'{"jsonrpc":"2.0",\n"method":"y"}'
    assert (await session.post(3, lines)).status == 202
    two = b'id: 3\ndata: {"jsonrpc":"2.0",\ndata: "method":"y"}\n\n'
    assert (await session.post_blocks(two)).json() == {"received": 3}
    await session.post(4, note("last"))
    assert [(await session.backend.take())["method"] for _ in range(3)] == ["x", "y", "last"]


@pytest.mark.rule("L6")
async def test_repeats_are_recognised_after_the_log_was_closed_and_opened(
    serve: Serve, tmp_path: Any
) -> None:
    """What was received is on disk: a conflict is a conflict, whatever the cache holds."""
    server = await serve(SqliteLog(tmp_path / "log.db", cache_bytes=0))
    session = await server.started()
    for number in range(2, 6):
        await session.post(number, request(number))
    assert (await session.post(3, request(3))).json() == {"received": 5}
    assert (await session.post(3, request(33))).reason == (409, "message-conflict")


@pytest.mark.rule("L6", "S6")
async def test_messages_of_two_connections_at_once_are_each_run_once(server: Server) -> None:
    session = await server.started()
    for number in range(2, 8):
        answers = await asyncio.gather(*(session.post(number, request(number)) for _ in range(4)))
        assert {answer.status for answer in answers} == {202}
    await session.post(8, note("last"))
    assert [(await session.backend.take()).get("id") for _ in range(7)] == [2, 3, 4, 5, 6, 7, None]


@pytest.mark.rule("L6", "L2", "N1")
async def test_nothing_is_acknowledged_or_run_before_the_inbox_has_committed_it(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log, keepalive=0.02)
    session = await server.started()
    stream = await session.events(session.start)
    log.gate.clear()
    posting = asyncio.create_task(session.post(2, request(2)))
    await asyncio.wait_for(log.held.wait(), 5)
    await stream.beat()
    await stream.beat()
    assert not posting.done()
    assert len(session.backend.sent) == 1
    log.gate.set()
    assert (await posting).json() == {"received": 2}
    assert (await session.backend.take())["id"] == 2


@pytest.mark.rule("L6")
async def test_a_repeat_is_acknowledged_no_sooner_than_the_first(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    log.gate.clear()
    posting = asyncio.create_task(session.post(2, request(2)))
    await asyncio.wait_for(log.held.wait(), 5)
    again = asyncio.create_task(session.post(2, request(2)))
    # A request that needs no commit is answered in the meantime.
    assert (await session.get("junk")).data["received"] == 1
    assert not again.done()
    log.gate.set()
    assert (await posting).json() == (await again).json() == {"received": 2}


@pytest.mark.rule("L6")
async def test_a_message_that_could_not_be_stored_is_received_once_it_can(serve: Serve) -> None:
    log = Fragile()
    server = await serve(log)
    session = await server.started()
    log.full = True
    assert (await session.post(2, request(2))).reason == (503, "storage")
    assert len(session.backend.sent) == 1, "not handed over"
    log.full = False
    assert (await session.post(2, request(2))).json() == {"received": 2}
    assert (await session.backend.take())["id"] == 2
    assert len(session.backend.sent) == 2


# Several blocks ------------------------------------------------------------------------------------


@pytest.mark.rule("L6", "W2")
async def test_several_blocks_in_one_body_are_taken_in_order(server: Server) -> None:
    session = await server.started()
    answer = await session.post_blocks(b"".join(block_of(request(n), n) for n in range(2, 6)))
    assert (answer.status, answer.json()) == (202, {"received": 5})
    assert [(await session.backend.take())["id"] for _ in range(4)] == [2, 3, 4, 5]


@pytest.mark.rule("L6", "W4")
async def test_a_body_of_blocks_may_arrive_in_any_pieces(server: Server) -> None:
    session = await server.started()
    body = b"\xef\xbb\xbf" + (block_of(request(2), 2) + block_of(request(3), 3)).replace(b"\n", b"\r\n")
    wire = await server.wire()
    head = f"POST {session.base}/messages HTTP/1.1\r\nHost: {server.host}\r\nMcp-Client: p\r\n"
    head += "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    await wire.write(head.encode())
    for at in range(len(body)):
        await wire.write(b"1\r\n" + body[at : at + 1] + b"\r\n")
    await wire.write(b"0\r\n\r\n")
    assert (await wire.answer()).json() == {"received": 3}
    assert [(await session.backend.take())["id"] for _ in range(2)] == [2, 3]


@pytest.mark.rule("L6")
async def test_blocks_are_taken_up_to_the_first_refusal(server: Server) -> None:
    session = await server.started()
    body = block_of(request(2), 2) + block_of(request(4), 4) + block_of(request(3), 3)
    answer = await session.post_blocks(body)
    assert answer.reason == (409, "message-gap")
    assert answer.data["received"] == 2
    assert (await session.post(3, request(33))).status == 202, "what followed was not taken"


@pytest.mark.rule("L6")
async def test_a_malformed_block_uses_its_number_and_ends_the_body(server: Server) -> None:
    session = await server.started()
    body = block_of(request(2), 2) + block_of(b"[]", 3) + block_of(request(4), 4)
    answer = await session.post_blocks(body)
    assert answer.reason == (400, "malformed")
    assert answer.data["received"] == 3
    assert (await session.post(4, request(44))).status == 202


@pytest.mark.rule("L6")
async def test_blocks_before_one_that_is_too_large_are_taken(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000)
    session = await server.started()
    body = block_of(request(2), 2) + block_of(request(3, x="x" * 5000), 3) + block_of(request(4), 4)
    answer = await session.post_blocks(body)
    assert answer.reason == (413, "too-large")
    assert answer.data["received"] == 2
    assert (await session.backend.take())["id"] == 2
    assert (await session.post_blocks(block_of(b"", 3) + block_of(request(4), 4))).json() == {"received": 4}


@pytest.mark.rule("L6", "W4")
async def test_blocks_that_are_no_messages_and_an_unterminated_one_are_ignored(server: Server) -> None:
    session = await server.started()
    body = (
        b": a comment\n\nevent: other\ndata: {}\n\n" + block_of(request(2), 2) + b'id: 3\ndata: {"jsonrpc":'
    )
    assert (await session.post_blocks(body)).json() == {"received": 2}


@pytest.mark.parametrize("body", [b"", b":\n\n", b"event: probe-ack\ndata: {}\n\n"])
@pytest.mark.rule("L6")
async def test_a_body_without_a_message_block_is_malformed(server: Server, body: bytes) -> None:
    session = await server.open()
    assert (await session.post_blocks(body)).reason == (400, "malformed")


@pytest.mark.parametrize("number", [b"", b"id: 02\n", b"id: x\n", b"id: \xff\n"])
@pytest.mark.rule("L6", "W2")
async def test_a_block_without_a_number_is_malformed(server: Server, number: bytes) -> None:
    session = await server.started()
    answer = await session.post_blocks(block_of(request(2), 2) + number + block_of(request(3)))
    assert answer.reason == (400, "malformed")
    assert answer.data["received"] == 2


@pytest.mark.rule("L6")
async def test_a_body_that_breaks_off_leaves_what_was_whole(server: Server) -> None:
    session = await server.started()
    wire = await server.wire()
    headers = BLOCKS | {"Mcp-Client": "p", "Content-Length": "100000"}
    await wire.send("POST", f"{session.base}/messages", headers, block_of(request(2), 2) + b"id: 3\nda")
    assert (await session.backend.take())["id"] == 2
    wire.drop()
    assert (await session.post(3, request(3))).json() == {"received": 3}


# What is refused, and what that costs --------------------------------------------------------------

BROKEN = [
    pytest.param(b"not json", id="no json"),
    pytest.param(b"{}", id="no json-rpc"),
    pytest.param(b'{"jsonrpc":"1.0","id":1,"method":"x"}', id="another version"),
    pytest.param(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":NaN}}', id="NaN"),
    pytest.param(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":"\\ud800"}}', id="lone surrogate"),
    pytest.param(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":"\x01"}}', id="raw control"),
    pytest.param(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":"\xff"}}', id="not UTF-8"),
    pytest.param(b'{"jsonrpc":"2.0","id":1,"method":"x"} {}', id="two objects"),
    pytest.param(b'[{"jsonrpc":"2.0","id":1,"method":"x"}]', id="a batch"),
    pytest.param(b"[]", id="an empty batch"),
    pytest.param(b"1", id="a number"),
    pytest.param(b'"text"', id="a string"),
    pytest.param(b"null", id="null"),
    pytest.param(
        b'{"jsonrpc":"2.0","id":1,"method":"x","params":' + b"[" * 5000 + b"]" * 5000 + b"}", id="deep"
    ),
    pytest.param(b'{"jsonrpc":"2.0","id":null,"method":"x"}', id="a null ID"),
    pytest.param(b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', id="a broken ID"),
    pytest.param(b'{"jsonrpc":"2.0","id":true,"method":"x"}', id="a boolean ID"),
]


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.rule("W4", "W5", "L6")
async def test_a_malformed_message_uses_its_number_and_reaches_no_backend(
    server: Server, body: bytes
) -> None:
    session = await server.started()
    answer = await session.post(2, body)
    assert answer.reason == (400, "malformed")
    assert answer.data["received"] == 2
    assert (await session.post(2, note("another"))).reason == (409, "message-conflict")
    assert (await session.post(3, note("next"))).json() == {"received": 3}
    assert (await session.backend.take())["method"] == "next"


@pytest.mark.parametrize(
    ("body", "id"),
    [
        (b'{"jsonrpc":"2.0","id":7,"method":"x","params":{"x":NaN}}', 7),
        (b'{"jsonrpc":"2.0","id":"seven","method":"x","params":{"x":"\\ud800"}}', "seven"),
        (b'{"jsonrpc":"1.0","id":7,"method":"x"}', 7),
    ],
)
@pytest.mark.rule("L6", "W4", "L7")
async def test_a_malformed_request_is_settled_by_an_error_event_too(
    server: Server, body: bytes, id: int | str
) -> None:
    session = await server.started()
    await session.post(2, body)
    stream = await session.events(session.start)
    event = await stream.message()
    assert event["id"] == id
    assert event["error"]["data"] == {"reason": "malformed"}


@pytest.mark.parametrize("body", [b"[]", b'{"jsonrpc":"2.0","method":"x","params":{"x":NaN}}', b"no json"])
@pytest.mark.rule("L6", "W5")
async def test_a_malformed_message_that_is_no_request_makes_no_event(server: Server, body: bytes) -> None:
    session = await server.started()
    answer = await session.post(2, body)
    assert answer.reason == (400, "malformed")
    assert (await session.get("junk")).data["resume-cursor"] == 0


@pytest.mark.rule("L6")
async def test_a_repeat_of_a_malformed_message_is_a_repeat(server: Server) -> None:
    session = await server.started()
    await session.post(2, b"[]")
    assert (await session.post(2, b"[]")).json() == {"received": 2}


@pytest.mark.rule("L6")
async def test_a_placeholder_at_a_refused_number_is_a_repeat(server: Server) -> None:
    session = await server.started()
    await session.post(2, b"[]")
    assert (await session.post_blocks(block_of(b"", 2))).json() == {"received": 2}


@pytest.mark.rule("L6")
async def test_a_placeholder_is_recorded_and_runs_nothing(server: Server) -> None:
    session = await server.started()
    assert (await session.post_blocks(block_of(b"", 2) + block_of(note("next"), 3))).json() == {"received": 3}
    assert (await session.backend.take())["method"] == "next"
    assert (await session.post_blocks(block_of(b"", 2))).json() == {"received": 3}, "a repeat"


@pytest.mark.rule("L6")
async def test_a_placeholder_at_a_number_that_ran_is_a_conflict(server: Server) -> None:
    session = await server.started()
    await session.post(2, request(2))
    assert (await session.post_blocks(block_of(b"", 2))).reason == (409, "message-conflict")


@pytest.mark.rule("L6")
async def test_an_empty_json_body_with_a_number_is_a_placeholder(server: Server) -> None:
    session = await server.started()
    headers = JSON | {"Mcp-Client": "p", "Mcp-Message-Number": "2", "Content-Length": "0"}
    answer = await server.ask("POST", f"{session.base}/messages", headers)
    assert answer.json() == {"received": 2}


@pytest.mark.rule("W5", "L6")
async def test_a_message_read_whole_and_above_the_limit_uses_its_number(serve: Serve) -> None:
    server = await serve(max_message_bytes=1000)
    session = await server.started()
    fits = request(2, x="x" * (1000 - len(json.dumps(request(2, x=""), separators=(",", ":")))))
    assert len(json.dumps(fits, separators=(",", ":"))) == 1000
    assert (await session.post(2, fits)).status == 202
    answer = await session.post(3, request(3, x="x" * 1000))
    assert answer.reason == (413, "too-large")
    assert answer.data["received"] == 3
    assert (await session.post(4, note("next"))).json() == {"received": 4}
    assert (await session.backend.take())["id"] == 2
    assert (await session.backend.take())["method"] == "next"
    stream = await session.events(session.start)
    event = await stream.message()
    assert (event["id"], event["error"]["data"]["reason"]) == (3, "too-large")


@pytest.mark.rule("W5", "L6")
async def test_413_before_the_whole_body_uses_nothing_and_a_placeholder_takes_its_place(
    serve: Serve,
) -> None:
    server = await serve(max_message_bytes=1000)
    session = await server.started()
    wire = await server.wire()
    headers = JSON | {"Mcp-Client": "p", "Mcp-Message-Number": "2", "Content-Length": "1000000"}
    await wire.send("POST", f"{session.base}/messages", headers, b" " * 3000)
    answer = await wire.answer()
    assert answer.reason == (413, "too-large"), "though 997 kB of it are still to come"
    assert answer.data["received"] == 1
    assert (await session.post_blocks(block_of(b"", 2) + block_of(note("next"), 3))).json() == {"received": 3}
    assert (await session.backend.take())["method"] == "next"
    assert (await session.get("junk")).data["resume-cursor"] == 0, "nobody's error was made an event"


@pytest.mark.rule("M6", "L6")
async def test_an_id_that_is_in_flight_is_refused_on_its_own_post_and_uses_its_number(
    server: Server,
) -> None:
    session = await server.started()
    await session.post(2, request(1))
    answer = await session.post(3, request(1))
    assert answer.reason == (409, "duplicate-id")
    assert answer.data["received"] == 3
    assert (await session.post(4, request("1"))).status == 202, '1 and "1" are different'
    assert [(await session.backend.take())["id"] for _ in range(2)] == [1, "1"]
    await session.backend.say(result(1, first=True))
    stream = await session.events(session.start)
    assert await stream.message() == result(1, first=True), "the first of the two is settled by its result"
    assert (await session.post(5, request(1))).status == 202, "the ID is free again"


# Processes -----------------------------------------------------------------------------------------


@pytest.mark.rule("L6")
async def test_who_names_no_process_may_listen_but_not_send(server: Server) -> None:
    session = await server.started()
    assert (await session.post(2, note("x"), process=None)).reason == (400, "malformed")
    assert (await session.post_blocks(block_of(note("x"), 2), process=None)).reason == (400, "malformed")
    await session.backend.say(note("news"))
    stream = await session.events(session.start)
    assert (await stream.message())["method"] == "news"


@pytest.mark.parametrize("process", ["", "p" * 129])
@pytest.mark.rule("L6")
async def test_a_process_name_has_1_to_128_characters(server: Server, process: str) -> None:
    session = await server.started()
    assert (await session.post(2, note("x"), process=process)).reason == (400, "malformed")
    assert (await session.post(2, note("x"), process="p" * 128)).status == 202


@pytest.mark.rule("L6")
async def test_a_newcomers_first_message_makes_those_of_the_old_process_conflict(server: Server) -> None:
    session = await server.started()
    await session.post(2, note("old"))
    assert (await session.post(3, note("new"), process="q")).json() == {"received": 3}
    for number in (2, 3, 4, 9):
        answer = await session.post(number, note("old"), process="p")
        assert answer.reason == (409, "message-conflict")
        assert (answer.data["retryable"], answer.data["action"]) == (False, "fail")
    assert (await session.post(4, note("new"), process="q")).status == 202


@pytest.mark.rule("L6")
async def test_a_newcomer_that_only_repeats_or_is_refused_takes_nothing_over(server: Server) -> None:
    session = await server.started()
    await session.post(2, note("old"))
    assert (await session.post(2, note("old"), process="q")).status == 202
    assert (await session.post(9, note("x"), process="q")).reason == (409, "message-gap")
    assert (await session.post(2, note("x"), process="q")).reason == (409, "message-conflict")
    assert (await session.post(3, note("old"), process="p")).status == 202


@pytest.mark.rule("L6")
async def test_a_process_that_was_replaced_does_not_come_back(server: Server) -> None:
    session = await server.started()
    for number, process in enumerate("qrs", 2):
        await session.post(number, note("x"), process=process)
    for process in "pqr":
        assert (await session.post(5, note("x"), process=process)).reason == (409, "message-conflict")


@pytest.mark.rule("L6")
async def test_a_process_may_be_named_in_the_query(server: Server) -> None:
    session = await server.started()
    answer = await server.ask(
        "POST", f"{session.base}/messages?client=p", JSON | {"Mcp-Message-Number": "2"}, note("x")
    )
    assert answer.json() == {"received": 2}


# What is told of received --------------------------------------------------------------------------


@pytest.mark.rule("L6")
async def test_the_block_after_priming_tells_what_is_received(server: Server) -> None:
    session = await server.open()
    assert await _received(session) == 0
    await session.post(1, note("x"))
    await session.post(2, b"[]")
    assert await _received(session) == 2


# The backend's pace --------------------------------------------------------------------------------


@pytest.mark.rule("L6")
async def test_a_backend_that_falls_behind_makes_posts_wait_outside(serve: Serve) -> None:
    server = await serve(max_inbox=2)
    session = await server.started()
    server.backends.gate.clear()
    number = 2
    while (answer := await session.post(number, note("x"))).status == 202:
        number += 1
        assert number < 8
    assert answer.reason == (503, "limit")
    assert answer.data["retryable"] is True
    assert answer.header("retry-after")
    server.backends.gate.set()
    for _ in range(2, number):
        await session.backend.take()
    assert (await session.post(number, note("x"))).status == 202, "it used no number"
