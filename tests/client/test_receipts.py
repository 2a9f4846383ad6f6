"""A receipts file: what is written to it, when, and what is made of it again."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest

from gapless.client.driver import Driver
from gapless.client.network import Network
from gapless.client.receipts import HEADER, Line, Receipts, Turn, read_receipts, turn
from gapless.errors import SessionEndedError, UsageError
from gapless.protocol.client import Client
from gapless.protocol.cursor import EventId, Link, parse_event_id
from gapless.protocol.moves import (
    Delivered,
    Failed,
    Input,
    Leave,
    Refused,
    SocketClosed,
    SocketOpened,
    Start,
    StreamOpened,
    Tick,
)
from gapless.protocol.phases import ALLOWED, Phase
from gapless.protocol.refusal import Reason, Refusal

TOKEN = "a-token-that-nobody-must-find-in-any-file-43"
HASH = sha256(TOKEN.encode()).hexdigest()[:16]


def id(seq: int) -> EventId:
    return EventId(seq, 0, Link(seq.to_bytes(8)))


def content(path: Path) -> bytes:
    return path.read_bytes()


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def read(path: Path) -> list[Line]:
    data = content(path)
    return list(read_receipts(io.BytesIO(data), len(data)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r"


@pytest.fixture
async def receipts(path: Path) -> AsyncIterator[Receipts]:
    receipts = Receipts(path)
    yield receipts
    receipts.close()


async def test_what_is_written_is_read_again(receipts: Receipts, path: Path) -> None:
    began = time.time()
    receipts.turned(TOKEN, Turn.OPENED, str(id(0)))
    receipts.processed(id(1))
    receipts.turned(TOKEN, Turn.SSE_DROPPED, "")
    receipts.processed(id(2))
    receipts.flush()
    lines = read(path)
    assert [(line.what, line.detail) for line in lines] == [
        (Turn.OPENED, str(id(0))),
        (id(1), ""),
        (Turn.SSE_DROPPED, ""),
        (id(2), ""),
    ]
    assert [line.number for line in lines] == [2, 3, 4, 5]
    assert {line.session for line in lines} == {HASH}
    for line in lines:
        moment = time.strptime(line.at[:19], "%Y-%m-%dT%H:%M:%S")
        assert began - 1.001 <= time.mktime(moment) - time.timezone <= time.time()


async def test_the_file_is_readable_by_its_owner_alone_and_holds_no_token(
    receipts: Receipts, path: Path
) -> None:
    receipts.turned(TOKEN, Turn.OPENED, "")
    receipts.flush()
    assert mode(path) == 0o600
    assert TOKEN.encode() not in content(path)


async def test_it_is_appended_to_and_begun_once(path: Path) -> None:
    for seq in (1, 2):
        receipts = Receipts(path)
        receipts.turned(TOKEN, Turn.OPENED, "")
        receipts.processed(id(seq))
        receipts.close()
    assert [line.what for line in read(path)] == [Turn.OPENED, id(1), Turn.OPENED, id(2)]
    assert content(path).count(HEADER) == 1


async def test_a_line_that_a_dead_process_left_unfinished_spoils_no_other(path: Path) -> None:
    put(path, HEADER + b"2026-01-02T10:00:00.000Z 0011")
    assert read(path) == []  # not written yet, for all one knows
    receipts = Receipts(path)
    receipts.turned(TOKEN, Turn.CONTINUED, str(id(7)))
    receipts.close()
    torn, line = read(path)
    assert (torn.what, torn.number) == (None, 2)
    assert (line.what, line.detail) == (Turn.CONTINUED, str(id(7)))


@pytest.mark.parametrize("other", [b'{"url": "a state file"}', b"\n", HEADER[:-1]])
async def test_another_kind_of_file_is_refused_and_left_alone(path: Path, other: bytes) -> None:
    put(path, other)
    with pytest.raises(UsageError, match="no receipts file"):
        Receipts(path)
    assert content(path) == other
    with pytest.raises(UsageError, match="no receipts file"):
        read(path)


async def test_what_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Receipts(tmp_path / "none" / "r")
    with pytest.raises(UsageError, match="Is a directory"):
        Receipts(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no file to keep receipts in"):
        Receipts(tmp_path / "pipe")


Later = list[asyncio.TimerHandle]


@pytest.fixture
async def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """What is to be called later, `when` being after how many seconds."""
    asked: Later = []

    def call_later(seconds: float, what: Callable[[], None], *_: Any) -> asyncio.TimerHandle:
        asked.append(asyncio.TimerHandle(seconds, what, (), asyncio.get_running_loop()))
        return asked[-1]

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    return asked


async def test_no_line_waits_for_more_than_a_second(later: Later, path: Path) -> None:
    receipts = Receipts(path)
    receipts.turned(TOKEN, Turn.OPENED, str(id(0)))
    for seq in range(1, 4):
        receipts.processed(id(seq))
        (due,) = later
        later.clear()
        assert content(path).count(b"\n") == (0 if seq == 1 else seq + 1), "it is not written yet"
        assert due.when() <= 1.0
        due._run()
        assert len(read(path)) == seq + 1
    receipts.close()


async def test_a_file_that_is_closed_is_written_to_no_more(
    later: Later, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = Receipts(path)
    receipts.turned(TOKEN, Turn.OPENED, str(id(0)))

    def full(file: int, data: bytearray) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UsageError, match="No space left"):
        receipts.close()
    assert [due.cancelled() for due in later] == [True]


async def test_many_lines_do_not_wait_at_all(later: Later, path: Path) -> None:
    receipts = Receipts(path)
    receipts.turned(TOKEN, Turn.OPENED, str(id(0)))
    for seq in range(1, 2000):
        receipts.processed(id(seq))
    assert len(read(path)) > 900
    receipts.close()
    assert len(read(path)) == 2000


async def test_a_full_disk_is_waited_out_for_a_while_and_loses_no_line(
    later: Later, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = Receipts(path)
    receipts.turned(TOKEN, Turn.OPENED, str(id(0)))
    write, room = os.write, 10

    def full(file: int, data: bytearray) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        room -= 10
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", full)
    later[0]._run()  # there is nobody to be told
    assert len(later) == 2, "it is tried again"
    with pytest.raises(UsageError, match="No space left"):
        receipts.flush()
    taken = 0
    with pytest.raises(UsageError, match="No space left"):  # noqa: PT012 - it raises once too much waits
        for seq in range(1, 2000):
            taken = seq
            receipts.processed(id(seq))
    monkeypatch.setattr(os, "write", write)
    receipts.close()
    assert [line.what for line in read(path)] == [Turn.OPENED, *map(id, range(1, taken + 1))]


def test_every_step_the_machine_may_make_is_a_turn_or_meant_to_be_none() -> None:
    silent = {(a, b) for a, ways in ALLOWED.items() for b in ways if turn(a, b) is None}
    assert silent == {
        (Phase.NEW, Phase.OPENING),
        (Phase.OPENING, Phase.RESTING),
        (Phase.BRIDGING, Phase.BOUND),
        (Phase.RESTING, Phase.OPENING),
        (Phase.RESTING, Phase.LISTENING),
    }
    assert {turn(a, b) for a, ways in ALLOWED.items() for b in ways} == {None, *Turn}


REFUSAL = Refusal(Reason.CURSOR_EVICTED, f"of session {TOKEN}", 9, 5, 0)


@pytest.mark.parametrize(
    ("before", "after", "input", "error", "told"),
    [
        (Phase.OPENING, Phase.LISTENING, Tick(), None, f"session opened {id(3)}"),
        (Phase.NEW, Phase.LISTENING, Start(), None, f"session continued {id(3)}"),
        (Phase.LISTENING, Phase.STREAMING, StreamOpened(1), None, f"sse opened {id(2)}"),
        (Phase.LISTENING, Phase.RESTING, Refused(1, 409, REFUSAL), None, "sse failed 409 cursor-evicted"),
        (Phase.LISTENING, Phase.RESTING, Refused(1, 502, None), None, "sse failed 502"),
        (Phase.LISTENING, Phase.RESTING, Failed(1, f"GET {TOKEN}"), None, "sse failed"),
        (Phase.KNOCKING, Phase.STREAMING, Failed(1, f"GET {TOKEN}"), None, "upgrade failed"),
        (Phase.STREAMING, Phase.KNOCKING, Delivered(), None, f"handshake sent {id(2)}"),
        (Phase.KNOCKING, Phase.BRIDGING, SocketOpened(1, 9), None, f"websocket opened {id(2)}"),
        (Phase.BOUND, Phase.RESTING, SocketClosed(1, 1006), None, "websocket dropped 1006"),
        (Phase.BOUND, Phase.RESTING, Tick(), None, "websocket dropped"),
        (Phase.BOUND, Phase.OVER, Leave(), None, "session over left"),
        (
            Phase.BOUND,
            Phase.OVER,
            Tick(),
            SessionEndedError("", code="backend-lost"),
            "session over backend-lost",
        ),
        (Phase.BOUND, Phase.OVER, Tick(), SessionEndedError("", code=TOKEN), "session over"),
        (Phase.BRIDGING, Phase.BOUND, Tick(), None, None),
    ],
)
async def test_a_turn_is_told_in_our_own_words_and_never_with_the_token(
    receipts: Receipts, path: Path, before: Phase, after: Phase, input: Input, error: Any, told: str | None
) -> None:
    machine = Client(session=TOKEN, cursor=id(2))
    machine.incoming.state()
    machine.incoming.cursor = id(3)
    machine.phase, machine.error = after, error
    nobody = cast("Any", None)
    network = Network(nobody, {}, nobody, None, None, 1.0)
    driver = Driver(machine, "http://x", "p", network, deliver=nobody, over=nobody, saving=nobody)
    driver._note(receipts, input, before)
    receipts.flush()
    written = [str(line.what) + f" {line.detail}".rstrip() for line in read(path)]
    assert written == ([] if told is None else [told])
    assert TOKEN.encode() not in content(path)


@pytest.mark.parametrize(
    "text",
    [
        "no time 0011223344556677 1.0.0000000000000001",
        "2026-01-02T10:00:00.000Z 00112233 1.0.0000000000000001",
        "2026-01-02T10:00:00.000Z 0011223344556677 1.0",
        "2026-01-02T10:00:00.000Z 0011223344556677 sse exploded",
        "2026-01-02T10:00:00.000Z 0011223344556677 ",
        "é",
        "x" * 2000,
        "",
    ],
)
def test_a_line_of_another_kind_is_unreadable_and_the_next_is_not(text: str) -> None:
    good = b"2026-01-02T10:00:00.000Z 0011223344556677 1.0.0000000000000001\n"
    data = HEADER + text.encode() + b"\n" + good
    lines = list(read_receipts(io.BytesIO(data), len(data)))
    assert {line.what for line in lines[:-1]} == {None}
    assert lines[-1].what == parse_event_id("1.0.0000000000000001")


def test_a_file_that_two_processes_began_at_once_is_read() -> None:
    good = b"2026-01-02T10:00:00.000Z 0011223344556677 1.0.0000000000000001\n"
    data = HEADER + HEADER + good
    assert [line.number for line in read_receipts(io.BytesIO(data), len(data))] == [3]


def test_no_more_is_read_than_was_asked_for() -> None:
    good = b"2026-01-02T10:00:00.000Z 0011223344556677 1.0.0000000000000001\n"
    data = HEADER + good * 3
    assert len(list(read_receipts(io.BytesIO(data), len(HEADER) + 2 * len(good)))) == 2
    assert len(list(read_receipts(io.BytesIO(data), len(HEADER) + 2 * len(good) + 5))) == 2
