"""A member of a crowd notices what it must: an event that does not follow, and a refusal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from gapless.protocol.block import Block
from gapless.protocol.cursor import EventId, Link, link_after
from tests.soak.raw import Member, Requests
from tests.soak.sampling import busy, descendants, resident

DATA = b'{"jsonrpc":"2.0","method":"notifications/message","params":{}}'


def following(before: EventId, skip: int = 0, data: bytes = DATA) -> tuple[EventId, Block]:
    """An event that comes after another one, or after so many that are left out."""
    link = link_after(before.link, 0, "message", DATA)
    for _ in range(skip):
        link = link_after(link, 0, "message", DATA)
    id = EventId(before.seq + 1 + skip, 0, link)
    return id, Block(event="message", data=data, id=str(id))


@pytest.fixture
def member() -> Member:
    return Member(Requests("http://127.0.0.1:1/mcp", 1), 1)


START = EventId(0, 0, Link(b""))


def test_events_that_follow_are_fine(member: Member) -> None:
    first, block = following(START)
    assert member.take(block)
    assert member.take(following(first)[1])
    assert member.wrong == []


@pytest.mark.parametrize("skip", [1, 5])
def test_a_hole_is_noted(member: Member, skip: int) -> None:
    member.take(following(START, skip)[1])
    assert len(member.wrong) == 1


def test_an_event_that_comes_again_is_noted(member: Member) -> None:
    _, block = following(START)
    member.take(block)
    member.take(block)
    assert len(member.wrong) == 1


def test_an_event_that_is_not_the_one_that_was_linked_is_noted(member: Member) -> None:
    member.take(following(START, data=DATA.replace(b"{}", b"[]"))[1])
    assert len(member.wrong) == 1


@pytest.mark.parametrize("socket", [False, True])
@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", b""])
async def test_a_refusal_is_noted(socket: bool, answer: bytes) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        member = Member(Requests(f"http://127.0.0.1:{port}/mcp", 1), 1)
        member.listen(socket)
        async with asyncio.timeout(10):
            await member.back.wait()
    (told,) = member.wrong
    assert ("503" in told) == bool(answer)


def test_work_is_seen() -> None:
    before = busy(os.getpid())
    while busy(os.getpid()) < before + 0.02:
        sum(range(10_000))


def test_a_child_and_its_memory_are_seen() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(os.getpid())
        assert resident(child.pid) > 0
        assert child.stdin is not None
        child.stdin.write(b"\n")
