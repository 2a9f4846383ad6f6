"""An application that comes for its messages: to take one is to accept it, and to wait for one loses none."""

from __future__ import annotations

import asyncio

import anyio
import msgspec
import pytest

from gapless.client.streams import Messages, Sink
from gapless.errors import UsageError
from gapless.protocol.block import Block
from gapless.protocol.client import Phase
from gapless.protocol.jsonrpc import peek
from gapless.protocol.moves import (
    Arrived,
    Effect,
    Input,
    Leave,
    Post,
    StreamEnded,
    Tick,
)
from tests.client.machine import Hand, event_data
from tests.client.offline import Offline, offline

pytestmark = pytest.mark.timeout(30)


def say(driver: Offline, log: Hand, *numbers: int) -> None:
    """Events arrive."""
    for n in numbers:
        driver.put(Arrived(2, log.emit(event_data(n))))


@pytest.mark.rule("C4")
async def test_the_cursor_moves_when_a_message_is_accepted_and_not_before() -> None:
    driver, log = offline()
    say(driver, log, 1, 2)
    assert await driver.next() == event_data(1)
    assert driver.machine.cursor == log.id(0)
    driver.accepted()
    assert driver.machine.cursor == log.id(1)
    driver.accepted()  # of nothing
    assert driver.machine.cursor == log.id(1)
    assert await driver.next() == event_data(2)


async def test_who_is_cancelled_while_waiting_for_a_message_takes_none() -> None:
    driver, log = offline()
    waiting = asyncio.create_task(driver.next())
    await asyncio.sleep(0)
    say(driver, log, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await driver.next() == event_data(1)


async def test_what_is_no_event_goes_ahead_and_moves_no_cursor() -> None:
    driver, log = offline()
    say(driver, log, 1)
    driver.tell(b"own")
    assert await driver.next() == b"own"
    driver.accepted()
    assert driver.machine.cursor == log.id(0)
    assert await driver.next() == event_data(1)


async def test_who_waits_for_a_message_is_told_of_the_end() -> None:
    driver, _ = offline()
    waiting = asyncio.create_task(driver.next())
    await asyncio.sleep(0)
    driver.put(Leave())
    assert await waiting is None
    assert driver.over


@pytest.mark.rule("L7")
async def test_what_had_arrived_before_the_end_comes_first_then_what_has_no_answer_then_nothing() -> None:
    driver, log = offline()
    for id in (1, 2):
        data = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call"}' % id
        await driver.submit(data, peek(data))
    say(driver, log, 1)
    answer = b'{"jsonrpc":"2.0","id":2,"result":{}}'
    driver.put(Arrived(2, log.emit(answer)))
    driver.put(Arrived(2, log.emit(b'{"reason":"session-expired"}', "session-superseded")))
    driver.put(StreamEnded(2))
    assert driver.over
    told: list[bytes] = []
    while (data := await driver.next()) is not None:
        told.append(data)
        driver.accepted()
    assert told[:2] == [event_data(1), answer]
    (last,) = map(msgspec.json.decode, told[2:])
    assert (last["id"], last["error"]["data"]["reason"]) == (1, "outcome-unknown")


@pytest.mark.rule("L7")
async def test_who_leaves_is_given_nothing_more() -> None:
    driver, log = offline()
    say(driver, log, 1)
    driver.put(Leave())
    assert await driver.next() is None


@pytest.mark.rule("C4")
async def test_a_file_that_cannot_be_written_ends_the_session_and_says_so() -> None:
    def saving(stating: bool) -> None:
        raise UsageError("the disk is full")

    driver, log = offline(saving)
    say(driver, log, 1)
    assert await driver.next() == event_data(1)
    driver.accepted()
    assert driver.over
    assert [str(error) for error in driver.ends] == ["the disk is full"]


@pytest.mark.rule("L7")
async def test_a_failure_of_our_own_leaves_what_had_arrived() -> None:
    def saving(stating: bool) -> None:
        raise UsageError("the disk is full")

    driver, log = offline(saving)
    say(driver, log, 1, 2)
    await driver.next()
    driver.accepted()
    assert driver.over
    assert await driver.next() == event_data(2)


@pytest.mark.rule("C4")
async def test_a_file_that_cannot_be_written_before_a_cursor_is_stated_ends_the_session_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, _ = offline()
    perform = driver._perform

    def unwritable(effect: Effect) -> None:
        if isinstance(effect, Post):
            raise UsageError("the disk is full")
        perform(effect)

    monkeypatch.setattr(driver, "_perform", unwritable)
    data = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
    await driver.submit(data, peek(data))
    assert [str(error) for error in driver.ends] == ["the disk is full"]


@pytest.mark.rule("C8")
async def test_the_clock_ticks_once_the_machine_is_due_and_not_for_what_was_put_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, _ = offline()
    late: list[float] = []
    rings: list[float] = []
    ticked = asyncio.Event()
    handle, ring, clock = driver.machine.handle, driver._ring, asyncio.get_running_loop().time

    def watched(input: Input, now: float) -> list[Effect]:
        if isinstance(input, Tick):
            assert driver.machine.deadline is not None
            late.append(now - driver.machine.deadline)
            ticked.set()
        return handle(input, now)

    def rung() -> None:
        rings.append(clock())
        ring()

    monkeypatch.setattr(driver.machine, "handle", watched)
    monkeypatch.setattr(driver, "_ring", rung)
    driver.put(Tick())
    late.clear()
    ticked.clear()
    asyncio.get_running_loop().call_later(0.02, driver.put, Arrived(2, None))  # it is heard
    await ticked.wait()
    assert len(rings) == 2
    assert late[0] >= 0


async def test_a_stream_that_is_closed_takes_and_gives_nothing() -> None:
    given: list[int] = []

    async def one() -> int:
        return 1

    async def give(item: int) -> None:
        given.append(item)

    messages, sink = Messages(one), Sink(give)
    async with messages, sink:
        assert await messages.receive() == 1
        await sink.send(2)
    with pytest.raises(anyio.ClosedResourceError):
        await messages.receive()
    with pytest.raises(anyio.ClosedResourceError):
        await sink.send(3)
    assert given == [2]


@pytest.mark.rule("U10", "C7")
async def test_no_more_is_read_than_may_wait_and_nothing_while_at_the_door() -> None:
    driver, log = offline(ahead=2)
    blocks = [log.emit(event_data(n)) for n in (1, 2, 3)]
    reading = asyncio.create_task(driver._read(2, [*blocks, None, Block("keepalive")]))
    await asyncio.sleep(0)
    assert driver.machine.incoming.last is not None
    assert driver.machine.incoming.last.id == log.id(2)
    driver.machine.phase = Phase.KNOCKING
    await driver.next()
    driver.accepted()
    await asyncio.sleep(0)
    assert driver.machine.incoming.last.id == log.id(2)
    driver.machine.phase = Phase.STREAMING
    driver.put(Tick())
    await reading
    assert driver.machine.full  # which holds up events, and no sign of life
    assert driver.machine.incoming.last.id == log.id(3)
