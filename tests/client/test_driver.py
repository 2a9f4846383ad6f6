"""The driver by itself: what it makes an application wait for, while it sends and when it leaves."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gapless.client import driver as driver_module
from gapless.client.driver import Driver
from gapless.client.http import Endpoints, Http
from gapless.client.network import Network
from gapless.protocol.client import Client
from gapless.protocol.cursor import EventId
from gapless.protocol.jsonrpc import peek
from gapless.protocol.moves import Failed, Leave, Opened, Tick
from gapless.protocol.outgoing import Outgoing
from tests.client.machine import LINK0


def driver() -> Driver:
    """One that has not begun, and so sends nothing."""
    nobody: Any = cast("Any", None)
    network = Network(nobody, {}, nobody, None, None, 1.0)
    return Driver(
        Client(), "http://x", "p", network, deliver=nobody, over=lambda _: None, saving=lambda _: None
    )


def note(size: int) -> bytes:
    """A notification of so many bytes."""
    head, tail = b'{"jsonrpc":"2.0","method":"', b'"}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


@pytest.mark.parametrize(("size", "fit"), [(60, 1024), (4 * 2**20, 4), (4 * 2**20 - 1, 5), (20 * 2**20, 1)])
@pytest.mark.rule("L6")
async def test_messages_that_the_server_has_not_received_are_bounded_in_number_and_bytes(
    size: int, fit: int
) -> None:
    waiting, data = driver(), note(size)
    for _ in range(fit):
        await waiting.submit(data, peek(data))
    one_more = asyncio.create_task(waiting.submit(data, peek(data)))
    await asyncio.sleep(0)
    waiting.put(Tick())  # it looks again whenever something has happened
    await asyncio.sleep(0)
    assert not one_more.done()
    assert waiting.machine.outgoing.kept == fit

    waiting.machine.outgoing.note_received(1)
    waiting.put(Tick())
    await one_more
    assert waiting.machine.outgoing.kept == fit
    assert waiting.machine.outgoing.size == fit * size


async def test_an_application_that_waits_to_send_is_let_go_at_the_end() -> None:
    waiting, data = driver(), note(20 * 2**20)
    await waiting.submit(data, peek(data))
    one_more = asyncio.create_task(waiting.submit(data, peek(data)))
    await asyncio.sleep(0)
    waiting.put(Leave())
    await one_more
    assert waiting.machine.outgoing.kept == 1


def test_what_is_kept_is_counted_until_it_is_received_or_refused() -> None:
    outgoing, data = Outgoing(), note(100)
    for _ in range(3):
        outgoing.add(data, peek(data))
    outgoing.hollow(2)
    assert outgoing.size == outgoing.copy().size == 200
    outgoing.note_received(2)
    assert outgoing.size == 100
    outgoing.note_received(3)
    assert outgoing.size == 0


class Slow:
    """Requests that are answered when the test says so."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
        self.deleting, self.deleted = asyncio.Event(), asyncio.Event()

    async def open(self, attempt: int) -> Opened:
        """`POST /mcp/session`."""
        return await self.opened

    async def delete(self, token: str) -> None:
        """`DELETE` the session."""
        assert token == "token"
        self.deleting.set()
        await self.deleted.wait()


@pytest.mark.rule("L7")
async def test_who_leaves_while_a_session_is_being_opened_waits_until_it_is_deleted() -> None:
    leaving, http = driver(), Slow()
    leaving._http = cast("Any", http)
    running = asyncio.create_task(leaving.run())
    await asyncio.sleep(0)
    left = asyncio.create_task(leaving.leave())
    await running
    http.opened.set_result(Opened(1, "token", EventId(0, 0, LINK0)))
    async with asyncio.timeout(10):
        await http.deleting.wait()
    assert not left.done()
    http.deleted.set()
    async with asyncio.timeout(10):
        await left


async def test_who_leaves_while_a_session_is_being_opened_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "_LAST_WORDS", 0.0)
    leaving, http = driver(), Slow()
    leaving._http = cast("Any", http)
    running = asyncio.create_task(leaving.run())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await leaving.leave()
    await running
    assert http.opened.cancelled()


async def test_a_connection_that_is_gone_before_it_is_looked_at_is_a_failure_like_any_other() -> None:
    class Gone:
        async def request(self, *_: Any, **__: Any) -> Any:
            raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    http = Http(cast("Any", Gone()), Endpoints("http://x"), "p")
    assert isinstance(await http.open(3), Failed)


async def test_a_client_task_that_fails_ends_the_client_and_says_why() -> None:
    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    over: list[Any] = []
    nobody: Any = cast("Any", None)
    failing = Driver(
        Client(),
        "http://x",
        "p",
        Network(nobody, {}, nobody, None, None, 1.0),
        deliver=nobody,
        over=over.append,
        saving=lambda _: None,
    )
    await failing.submit(note(60), peek(note(60)))

    async def fails() -> None:
        raise ZeroDivisionError("nobody thought of it")

    await asyncio.wait({failing._spawn(fails())})
    await asyncio.sleep(0)
    assert [context["message"] for context in seen] == ["a client task failed"]
    assert str(over[0]) == "the client failed: ZeroDivisionError: nobody thought of it"
