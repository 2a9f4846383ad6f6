"""The clients by hand: patient to a point, never for ever, and surprised by nothing that a server says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import httpx2
import pytest
from websockets.asyncio.server import ServerConnection, serve

from gapless.errors import TargetError
from gapless.protocol.block import Block, encode_block
from gapless.torture import reading, standard
from gapless.torture.door import DoorSession, Frames, reason_of
from gapless.torture.ladder import INITIALIZED, Account, Climb, Kind, runs_request
from gapless.torture.reading import Answer, message_of, sequence_of
from gapless.torture.standard import StandardSession
from gapless.torture.trial import Trace
from tests.server.harness import soon
from tests.torture.naive import naive_server
from tests.torture.test_ladder import answer, rung

CLIMB = Climb("r", 4, 0.0, (Kind.LOG,))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between two attempts."""
    monkeypatch.setattr(standard, "_BACKOFF", 0.0)


# A server by hand -------------------------------------------------------------------------------------------


class Asked:
    """A request, and what is answered."""

    def __init__(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.split("\r\n")
        self.method, self.path, _ = first.split(" ")
        self.headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}
        self.message: dict[str, Any] = json.loads(body) if body else {}
        self._writer = writer

    @property
    def cursor(self) -> str | None:
        return self.headers.get("last-event-id")

    def answers(self, status: int, body: bytes = b"", kind: str = "application/json", more: str = "") -> None:
        """A whole response."""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        self._writer.write(head.encode() + body)

    def streams(self, *blocks: bytes) -> Self:
        """The head of an event stream, and blocks."""
        self._writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.sends(*blocks)
        return self

    def sends(self, *blocks: bytes) -> None:
        """More blocks of the event stream."""
        for block in blocks:
            self._writer.write(b"%x\r\n%s\r\n" % (len(block), block))

    def ends(self) -> None:
        """The end of the event stream, in good order."""
        self._writer.write(b"0\r\n\r\n")

    async def breaks(self) -> None:
        """Break the connection, behind what has been said."""
        with suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()


Script = Callable[[Asked], Awaitable[None]]


class Scripted:
    """A standard server that answers calls, GETs and POSTs of other things as the test has it."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.tasks: list[Any] = []
        self.call: Script = self.nothing
        self.get: Script = self.nothing
        self.told: Script = self.accepted
        self.url = ""

    @staticmethod
    async def nothing(asked: Asked) -> None:
        """No answer at all."""

    @staticmethod
    async def accepted(asked: Asked) -> None:
        asked.answers(202)

    @property
    def cursors(self) -> list[str | None]:
        """What each GET stated."""
        return [asked.cursor for asked in self.asked if asked.method == "GET"]

    async def answer(self, asked: Asked) -> None:
        self.asked.append(asked)
        match asked.method, asked.message.get("method"):
            case "POST", "initialize":
                body = json.dumps({"jsonrpc": "2.0", "id": 0, "result": {}}).encode()
                asked.answers(200, body, more="Mcp-Session-Id: token\r\n")
            case "POST", "tools/call" | "tools/list":
                await self.call(asked)
            case "POST", _:
                await self.told(asked)
            case "GET", _:
                await self.get(asked)
            case _:
                asked.answers(204)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1")
                length = next((part for part in head.lower().split("\r\n") if "content-length" in part), ":0")
                body = await reader.readexactly(int(length.partition(":")[2]))
                await self.answer(Asked(head, body, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test
        finally:
            writer.transport.abort()


@asynccontextmanager
async def scripted() -> AsyncGenerator[Scripted]:
    made = Scripted()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    try:
        yield made
    finally:
        server.close()
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks)


def event(id: str | None, message: Any) -> bytes:
    return encode_block("message", json.dumps(message).encode(), id)


def logged(number: int, id: str | None = None) -> bytes:
    return event(id, rung(number, CLIMB))


LAST = event("z", answer(CLIMB))


async def climbed(
    server: Scripted, most: float = 20.0, quiet: float = 0.02
) -> tuple[StandardSession, Account]:
    """A climb that is over, however it went."""
    async with StandardSession(server.url, Trace()) as session:
        await soon(session.open())
        account = session.start(CLIMB, 1)
        await soon(session.finish(quiet, most))
    return session, account


def one_by_one(*scripts: Script) -> Script:
    """Each request has the next script; the last one has all that follow."""
    left = list(scripts)

    async def run(asked: Asked) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(asked)

    return run


async def breaks(asked: Asked) -> None:
    await asked.breaks()


async def chatters(asked: Asked) -> None:
    """A stream of comments that never ends."""
    asked.streams()
    while True:
        asked.sends(b": still there\n\n")
        await asyncio.sleep(0.01)


async def ends(asked: Asked) -> None:
    asked.streams().ends()


def says(*blocks: bytes, then: Script | None = None) -> Script:
    """An event stream with these blocks that ends in good order, or breaks, or goes on."""

    async def script(asked: Asked) -> None:
        asked.streams(*blocks)
        if then is None:
            asked.ends()
        else:
            await then(asked)

    return script


# A standard client ------------------------------------------------------------------------------------------


async def test_a_session_is_opened_with_its_token_from_then_on_and_deleted_at_its_end() -> None:
    async with scripted() as server:
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
        assert [asked.message.get("method", asked.method) for asked in server.asked] == [
            "initialize",
            "notifications/initialized",
            "DELETE",
        ]
        assert [asked.headers.get("mcp-session-id") for asked in server.asked] == [None, "token", "token"]
        assert server.asked[1].headers["mcp-protocol-version"] == "2025-11-25"
        assert server.asked[0].headers["accept-encoding"] == "identity"


async def test_a_stream_that_breaks_is_resumed_after_the_last_id() -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), logged(2, "b"), then=breaks)
        server.get = one_by_one(says(logged(3, "c"), then=breaks), says(logged(4, "d"), LAST))
        session, account = await climbed(server)
        assert server.cursors == ["b", "c"]
        assert account.complete
        assert account.answered
        assert (account.rungs, account.streams) == ([1, 2, 3, 4], [1, 1, 1, 1])
        assert (session.resumes, session.unresumable) == (2, 0)
        assert (session.streams[1].first, session.streams[1].last) == ("a", "z")
        assert session.ids == {*"abcdz"}
        assert session.streams[1].given == [*"abcdz"]


async def test_an_id_without_a_message_is_one_to_resume_from() -> None:
    async with scripted() as server:
        server.call = says(b"id: p\ndata: \n\n", then=breaks)
        server.get = says(*map(logged, range(1, 5)), LAST)
        session, account = await climbed(server)
        assert server.cursors == ["p"]
        assert account.answered
        assert session.unresumable == 0


async def test_ids_are_stated_as_they_were_sent_whatever_they_are_made_of() -> None:
    async with scripted() as server:
        server.call = says(logged(1, "é–1"), then=breaks)
        server.get = says(*map(logged, range(2, 5)), LAST)
        _, account = await climbed(server)
        (cursor,) = server.cursors
        assert cursor is not None
        assert cursor.encode("latin-1").decode() == "é–1"
        assert account.answered


@pytest.mark.parametrize("script", [breaks, says(then=breaks)], ids=["head", "body"])
async def test_a_call_that_is_cut_before_anything_came_is_unresumable_and_nobody_s_fault(
    script: Script,
) -> None:
    async with scripted() as server:
        server.call = script
        session, account = await climbed(server)
        assert session.unresumable == 1
        assert account.result is not None
        assert "error" in account.result
        assert server.cursors == []


@pytest.mark.parametrize("script", [says(logged(1), logged(2), then=breaks), ends, says(logged(1))])
async def test_a_call_whose_stream_has_no_ids_or_ends_without_any_is_the_servers_fault(
    script: Script,
) -> None:
    async with scripted() as server:
        server.call = script
        session, account = await climbed(server)
        assert session.unresumable == 0
        assert account.result is not None
        assert "ID to resume from" in account.result["error"]["message"]
        assert server.cursors == []


async def test_an_answer_without_a_stream_is_taken_under_the_calls_id() -> None:
    async with scripted() as server:

        async def json_answer(asked: Asked) -> None:
            asked.answers(200, json.dumps(answer(CLIMB)).encode())

        async def refusal(asked: Asked) -> None:
            asked.answers(404, b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"no session"}}')

        async def page(asked: Asked) -> None:
            asked.answers(500, b"Internal Server Error", "text/plain")

        server.call = one_by_one(json_answer, refusal, page)
        assert (await climbed(server))[1].answered
        told = (await climbed(server))[1].result
        assert told is not None
        assert told["error"]["message"] == "no session"
        session, account = await climbed(server)
        assert account.result == {"id": 1, "error": {"message": "status 500, and no JSON object"}}
        assert session.unresumable == 0


class Unheard(StandardSession):
    """Nobody listens when it calls for the first time, nor for the second."""

    calls = 0

    @asynccontextmanager
    async def send(
        self, method: str, message: dict[str, Any] | None = None, cursor: str | None = None
    ) -> AsyncGenerator[Answer]:
        self.calls += method == "POST"
        if self.calls in (1, 2):
            raise httpx2.ConnectError("refused")
        async with super().send(method, message, cursor) as answer:
            yield answer


async def test_a_call_is_sent_again_where_nobody_listens_for_it_cannot_have_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standard, "_NOBODY", 0.0)
    async with scripted() as server:
        server.call = says(*(logged(number, f"{number}") for number in range(1, 5)), LAST)
        async with Unheard(server.url, Trace()) as session:
            account = session.start(CLIMB, 1)
            assert await soon(session.until(lambda: account.result is not None, 10))
        assert account.answered
        assert (session.calls, session.unresumable, len(server.asked)) == (3, 0, 1)


async def test_a_call_that_nobody_listens_to_for_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standard, "ASKED", -1.0)
    async with scripted() as server, Unheard(server.url, Trace()) as session:
        account = session.start(CLIMB, 1)
        assert await soon(session.until(lambda: account.result is not None, 10))
        assert (session.calls, session.unresumable) == (1, 1)


async def test_a_connection_that_is_reset_as_it_is_made_carried_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def trips(self: Any, request: httpx2.Request) -> httpx2.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", trips)
    async with reading.http_client() as client:
        with pytest.raises(httpx2.ConnectError, match="getpeername"):
            await client.get("http://127.0.0.1:9/")


# Patience ---------------------------------------------------------------------------------------------------


async def refused(asked: Asked) -> None:
    asked.answers(404, b"not found", "text/plain")


OVER = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -32000, "message": "over", "data": {"reason": "session-expired"}},
    }
).encode()


@pytest.mark.parametrize("method", ["call", "get"])
async def test_a_404_in_words_of_ours_says_that_the_session_is_over(method: str) -> None:
    async def over(asked: Asked) -> None:
        asked.answers(404, OVER)

    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        setattr(server, method, over)
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
            session.start(CLIMB, 1)
            assert not await soon(session.until(lambda: False, 3600))
            assert session.ended == "session-expired"


async def evicted(asked: Asked) -> None:
    asked.answers(409, OVER.replace(b"session-expired", b"cursor-evicted"))


@pytest.mark.parametrize("script", [refused, evicted])
async def test_a_404_of_somebody_else_or_a_409_does_not_end_the_session(script: Script) -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        server.get = script
        session, _ = await climbed(server)
        assert session.ended == ""


async def test_the_standalone_stream_is_kept_when_all_calls_are_complete_if_it_is_to_last() -> None:
    async with scripted() as server:
        again = asyncio.Event()

        async def once_more(asked: Asked) -> None:
            again.set()
            await chatters(asked)

        server.get = one_by_one(says(event("a", {}), then=breaks), once_more)
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
            assert await soon(session.listen(lasting=True))
            await soon(again.wait())
        assert server.cursors == [None, "a"]


@pytest.mark.parametrize(("script", "how"), [(ends, "ended"), (refused, "refused")])
async def test_resumes_that_bring_nothing_are_given_up_and_nothing_is_waited_for_after_that(
    script: Script, how: str
) -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        server.get = script
        session, account = await climbed(server, most=3600)
        assert account.result is None
        assert session.streams[1].end == how
        assert server.cursors == ["a"] * standard._PATIENCE


async def test_a_resumed_stream_that_is_silent_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer.blocks, "__defaults__", (0.25,))
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        server.get = says(then=Scripted.nothing)
        session, account = await climbed(server, most=3600)
        assert account.result is None
        assert session.streams[1].end == "silent"
        assert len(server.cursors) == standard._PATIENCE // 2


async def test_a_call_that_falls_silent_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer.blocks, "__defaults__", (0.25,))
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=Scripted.nothing)
        server.get = says(*map(logged, range(2, 5)), LAST)
        assert (await climbed(server))[1].answered


async def test_a_resume_that_brings_something_makes_patience_whole_again() -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        drops = [ends] * (standard._PATIENCE - 1)
        server.get = one_by_one(
            *drops, says(logged(2, "b")), *drops, says(logged(3, "c"), logged(4, "d"), LAST)
        )
        session, account = await climbed(server)
        assert account.answered
        assert len(server.cursors) == 2 * standard._PATIENCE
        assert session.resumes == 2  # the others were in vain


async def test_what_the_wire_does_costs_no_patience() -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        server.get = one_by_one(*[breaks] * 30, says(*map(logged, range(2, 5)), LAST))
        _, account = await climbed(server)
        assert account.answered
        assert len(server.cursors) == 31


async def test_a_server_that_is_gone_is_not_waited_for_longer_than_asked() -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=breaks)
        server.get = breaks
        _, account = await climbed(server, most=0.1)
        assert account.result is None


async def test_once_all_is_answered_what_is_missing_has_a_quiet_while_to_come() -> None:
    async with scripted() as server:
        called, arrived = asyncio.Event(), asyncio.Event()

        async def call(asked: Asked) -> None:
            called.set()
            asked.streams()
            await arrived.wait()
            asked.sends(LAST)
            asked.ends()

        async def get(asked: Asked) -> None:
            asked.streams()
            await called.wait()
            asked.sends(logged(1, "s"))

        server.call, server.get = call, get
        async with StandardSession(server.url, Trace()) as session:
            session.received = lambda count: arrived.set()
            await soon(session.open())
            assert await soon(session.listen())
            account = session.start(CLIMB, 1)
            await soon(session.finish(0.02, 3600))
        assert account.answered
        assert account.missing == [2, 3, 4]


# The standalone stream --------------------------------------------------------------------------------------


async def test_the_standalone_stream_is_listened_to_beside_the_call_and_resumed_like_it() -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), then=Scripted.nothing)
        server.get = one_by_one(
            says(then=breaks), says(logged(2, "s"), then=breaks), says(logged(3, "t"), then=Scripted.nothing)
        )
        counts: list[int] = []
        third = asyncio.Event()

        def received(count: int) -> None:
            counts.append(count)
            if count == 3:
                third.set()

        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
            session.received = received
            account = session.start(CLIMB, 1)
            assert await soon(session.listen())
            await soon(third.wait())
        assert server.cursors == [None, None, "s"]
        assert set(zip(account.rungs, account.streams, strict=True)) == {(1, 1), (2, 0), (3, 0)}
        assert counts == [1, 2, 3]


async def test_a_server_without_a_standalone_stream_is_not_listened_to() -> None:
    async with scripted() as server:
        server.get = refused
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
            assert not await soon(session.listen())
        assert len(server.cursors) == 1


async def test_a_standalone_stream_that_is_not_answered_is_an_error() -> None:
    async with scripted() as server:
        server.get = breaks
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
            with pytest.raises(TargetError, match=r"GET http.*: \w"):
                await soon(session.listen())


# What is asked, told and replied ----------------------------------------------------------------------------


async def test_a_question_of_the_server_is_replied_to_however_often_the_wire_breaks() -> None:
    async with scripted() as server:
        climb = Climb("r", 1, 0.0, (Kind.ASK,))
        replied = asyncio.Event()

        async def told(asked: Asked) -> None:
            if "method" in asked.message:
                asked.answers(202)
            elif len(server.asked) < 7:
                await asked.breaks()
            else:
                asked.answers(202)
                replied.set()

        async def call(asked: Asked) -> None:
            asked.streams(event("a", rung(1, climb)))
            await replied.wait()
            asked.streams(event("b", answer(climb))).ends()

        server.call, server.told = call, told
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())
            session.start(climb, 1)
            await soon(replied.wait())
        reply = {"jsonrpc": "2.0", "id": "s1", "result": {"action": "accept", "content": {"rung": 1}}}
        assert [asked.message for asked in server.asked if "result" in asked.message] == [reply] * 4


async def test_an_outage_is_sat_out_by_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(standard, "_BACKOFF", 0.02)
    async with scripted() as server:
        server.told = breaks
        async with StandardSession(server.url, Trace()) as session:
            monkeypatch.setattr(standard.asyncio, "sleep", sleep)
            await session.tell(INITIALIZED)
            monkeypatch.undo()
    assert len(waits) == standard._PATIENCE
    assert sum(waits) > 1  # the longest outage of a schedule is 150 ms


async def endless(asked: Asked) -> None:
    asked.streams(b": still there\n\n")


async def test_a_body_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BODY", 0.02)
    async with scripted() as server:
        server.told = endless
        async with StandardSession(server.url, Trace()) as session:
            await soon(session.open())


async def no_json(asked: Asked) -> None:
    asked.answers(200, b"[1]")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (refused, "is answered 404"),
        (no_json, "no JSON object"),
        (ends, "got no answer"),
        (says(event("a", {"id": 3, "result": {}})), "got no answer"),
        (breaks, r"/mcp: \w"),
        (says(then=breaks), r"/mcp: \w"),
        (says(then=Scripted.nothing), "TimeoutError"),
        (chatters, "TimeoutError"),
    ],
)
async def test_a_question_that_is_not_answered_is_an_error_that_says_so(
    script: Script, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told == "TimeoutError":
        monkeypatch.setattr(standard, "ASKED", 0.1)
    async with scripted() as server:
        server.call = script
        async with StandardSession(server.url, Trace()) as session:
            with pytest.raises(TargetError, match=rf"^tools/call at http.*{told}"):
                await soon(session.ask(runs_request(2, "r")))


async def test_an_answer_is_found_among_other_messages() -> None:
    async with scripted() as server:
        server.call = says(
            logged(1, "a"), event("b", {"id": 2, "result": {"mine": 1}}), then=Scripted.nothing
        )
        async with StandardSession(server.url, Trace()) as session:
            assert await soon(session.ask(runs_request(2, "r"))) == {"id": 2, "result": {"mine": 1}}


NONSENSE = (
    b"",
    b"x",
    b"[1]",
    b"3",
    b"null",
    b'"\xff"',
    b"\xff",
    b"{",
    b'{"a":' * 100_000,
    b'{"a":"\\ud800"}',
)


@pytest.mark.parametrize("data", NONSENSE, ids=lambda data: repr(data[:8]))
async def test_data_that_is_no_json_object_is_no_message_and_raises_nothing(data: bytes) -> None:
    assert message_of(Block(data=data)) is None
    async with scripted() as server:
        server.call = says(b"id: a\ndata: %s\n\n" % data, *map(logged, range(1, 5)), LAST)
        session, account = await climbed(server)
        assert account.answered
        assert session.ids == {"a", "z"}


@pytest.mark.parametrize(
    "junk", [b"id: \xff\n\n", b"data: " + b"x" * (reading.LIMIT + 1)], ids=["id", "giant"]
)
async def test_a_stream_that_is_none_any_more_is_resumed_from_where_it_was_one(junk: bytes) -> None:
    async with scripted() as server:
        server.call = says(logged(1, "a"), junk)
        server.get = says(*map(logged, range(2, 5)), LAST)
        _, account = await climbed(server)
        assert server.cursors == ["a"]
        assert account.answered


@pytest.mark.parametrize(
    ("id", "number"),
    [("47.0.aa", 47), ("47", 47), ("", None), (None, None), ("x47", None), ("²", None), ("9" * 5000, None)],
)
def test_the_number_of_an_event_is_what_its_id_begins_with(id: str | None, number: int | None) -> None:
    assert sequence_of(id) == number


# The session view -------------------------------------------------------------------------------------------


def block(number: int | str, data: bytes = b"{}", event: str = "message") -> Block:
    return Block(event, f"{number}.0.aa" if isinstance(number, int) else number, data)


@asynccontextmanager
async def at(number: int) -> AsyncGenerator[DoorSession]:
    """A session that has processed so much; nothing is asked of the server."""
    async with DoorSession("http://127.0.0.1:9/mcp", Trace()) as session:
        session.take(block(number))
        yield session


@pytest.mark.parametrize(
    ("numbers", "skipped", "again"),
    [
        ((6, 7, 8), [], []),
        ((7, 8), [(6, 6)], []),
        ((6, 9, 10, 15), [(7, 8), (11, 14)], []),
        ((6, 6, 7), [], [6]),
        ((6, 7, 6, 7, 8), [], [6, 7]),
        ((5, 6), [], [5]),
        ((8, 6, 7, 9), [], []),  # late, which the ledger tells
        ((8, 7, 9), [(6, 6)], []),
        ((10**17,), [(6, 10**17 - 1)], []),
    ],
)
async def test_what_is_skipped_and_what_comes_again_is_known_by_number(
    numbers: tuple[int, ...], skipped: list[tuple[int, int]], again: list[int]
) -> None:
    async with at(5) as session:
        for number in numbers:
            assert session.take(block(number))
        assert (session.skipped, session.again) == (skipped, again)
        assert session.seq == numbers[-1]


async def test_control_blocks_and_priming_are_no_events() -> None:
    async with at(5) as session:
        assert not session.take(Block("received", None, b"{}"))
        assert not session.take(Block("message", "9.0.aa", b""))
        assert not session.take(Block("message", "9.0.aa", None))
        assert (session.seq, session.skipped) == (5, [])


async def test_an_id_that_is_no_number_is_a_cursor_all_the_same() -> None:
    async with at(5) as session:
        assert session.take(block("what"))
        assert (session.cursor, session.seq) == ("what", 0)
        assert session.take(block(6))
        assert (session.skipped, session.again) == ([], [])


async def test_only_messages_are_counted_as_such() -> None:
    async with at(5) as session:
        session.take(block(6, event="upgrade-accepted"))
        session.take(block(7, b"[]"))
        session.take(block(8))
        assert session.ledger.count == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"error": None},
        {"error": []},
        {"error": {"data": 3}},
        {"error": {"data": {"reason": []}}},
        {"error": {"data": {"reason": "no-such-reason"}}},
    ],
)
def test_a_refusal_that_is_none_of_ours_has_no_reason(body: dict[str, Any]) -> None:
    assert reason_of(body) == ""


async def test_a_session_is_opened_asked_and_refused_with_reasons() -> None:
    async with naive_server() as url, DoorSession(url + "/", Trace()) as session:
        await soon(session.open())
        assert session.seq == 1
        assert session.limits["retain_events"] == 10_000
        assert session.timers["keepalive"] == 15.0
        answer = await soon(session.ask({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}))
        assert [tool["name"] for tool in answer["result"]["tools"]] == ["ladder", "runs"]
        assert session.seq == 2
        assert (session.skipped, session.again) == ([], [])

        status, body = await session.upgrade("47", "nonce")
        assert (status, reason_of(body)) == (400, "malformed")
        knocked = await session.knock("3.0.0123456789abcdef")
        assert (knocked.status, knocked.reason, knocked.frames) == (409, "cursor-ahead", None)
        async with session.events("x") as answered:
            assert (answered.status, answered.streams) == (400, False)
        status, body = await session.request("POST", "messages", {}, Mcp_Message_Number="9")
        assert (status, reason_of(body)) == (409, "message-gap")


async def test_through_the_door_there_are_frames_and_they_end_with_the_session() -> None:
    async with naive_server() as url:
        async with DoorSession(url, Trace()) as session:
            await soon(session.open())
            knocked = await soon(session.knock(session.cursor))
            assert (knocked.status, knocked.echo) == (101, 2)
            assert knocked.frames is not None
            first = await soon(knocked.frames.next())
            assert first is not None
            assert first.event == "resume-cursor"
            acceptance = await soon(knocked.frames.next())
            assert acceptance is not None
            assert acceptance.event == "upgrade-accepted"
            assert session.take(acceptance)
            await knocked.frames.ack(session.cursor)
        assert await soon(knocked.frames.next(5.0)) is None


async def test_a_message_whose_answer_is_lost_is_sent_again_under_its_number() -> None:
    async with scripted() as server:
        server.told = one_by_one(breaks, breaks, Scripted.accepted)
        async with DoorSession(server.url, Trace()) as session:
            assert await soon(session.post(INITIALIZED)) == (202, {})
            assert [asked.headers["mcp-message-number"] for asked in server.asked] == ["1", "1", "1"]
            await soon(session.post(INITIALIZED))
            assert server.asked[-1].headers["mcp-message-number"] == "2"


async def test_what_is_not_answered_has_no_status() -> None:
    async with scripted() as server:
        server.told = server.get = breaks
        async with DoorSession(server.url, Trace()) as session:
            assert await soon(session.request("POST", "ack", {})) == (0, {})
            assert await soon(session.post(INITIALIZED)) == (0, {})
            knocked = await soon(session.knock("0"))
            assert (knocked.status, knocked.frames) == (0, None)


def opened(**body: Any) -> Script:
    """A session that is opened, with a token that no path can hold as it is."""

    async def told(asked: Asked) -> None:
        if asked.path.endswith("/session"):
            asked.answers(201, json.dumps({"session": "a/b ü?", "cursor": "0.0.aa", **body}).encode())
        else:
            asked.answers(202)

    return told


async def no_cursor(asked: Asked) -> None:
    asked.answers(201, b'{"session":"x"}')


@pytest.mark.parametrize(
    ("told", "get"),
    [
        (refused, ends),
        (no_json, ends),
        (breaks, ends),
        (opened(), refused),
        (opened(), breaks),
        (opened(), ends),
        (opened(), says(event("1.0.aa", {"id": 7}), then=breaks)),
        (opened(), Scripted.nothing),
        (opened(), says(then=Scripted.nothing)),
        (opened(), chatters),
        (no_cursor, says(event("1.0.aa", {"id": 0, "result": {}}))),
    ],
)
async def test_a_server_without_a_session_view_that_works_is_an_error(
    told: Script, get: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.torture.door.ASKED", 0.3)
    async with scripted() as server:
        server.told, server.get = told, get
        async with DoorSession(server.url, Trace()) as session:
            with pytest.raises(TargetError, match="session"):
                await soon(session.open())


async def test_a_token_is_quoted_and_what_a_strange_server_advertises_is_nothing() -> None:
    async with scripted() as server:
        server.told = opened(limits=[1], timers=None)
        server.get = says(event("1.0.aa", {"id": 0, "result": {}}))
        async with DoorSession(server.url, Trace()) as session:
            await soon(session.open())
            assert (session.limits, session.timers) == ({}, {})
        paths = {asked.path for asked in server.asked[1:]}
        assert paths == {f"/mcp/session/a%2Fb%20%C3%BC%3F{part}" for part in ("/messages", "/events", "")}


async def test_an_event_that_is_skipped_at_the_very_beginning_is_skipped() -> None:
    async with scripted() as server:
        server.told = opened()
        server.get = says(event("3.0.aa", {"id": 0, "result": {}}))
        async with DoorSession(server.url, Trace()) as session:
            await soon(session.open())
            assert session.skipped == [(1, 2)]


# Sockets ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def socket(*frames: bytes | str, headers: tuple[tuple[str, str], ...] = ()) -> AsyncGenerator[Any]:
    """A door that says this, and what it was told."""
    heard: asyncio.Queue[str | bytes] = asyncio.Queue()

    async def door(connection: ServerConnection) -> None:
        for frame in frames:
            await connection.send(frame)
        async for said in connection:
            heard.put_nowait(said)

    def add(connection: ServerConnection, request: Any, response: Any) -> None:
        for name, value in headers:
            response.headers[name] = value

    async with serve(door, "127.0.0.1", 0, subprotocols=["mcp.v1"], process_response=add) as server:  # type: ignore[list-item]
        port = next(iter(server.sockets)).getsockname()[1]
        session = DoorSession(f"http://127.0.0.1:{port}/mcp", Trace())
        knocked = await soon(session.knock("1.0.é–"))
        assert knocked.frames is not None
        yield knocked, heard
        knocked.frames.drop()
        await session.__aexit__()


PROBE = encode_block("probe", b'{"nonce":"n"}')


async def test_probes_are_answered_and_keepalives_passed_over() -> None:
    frames = (
        PROBE.decode(),
        encode_block("keepalive", b"{}").decode(),
        (PROBE + logged(1, "1.0.aa")).decode(),
    )
    async with socket(*frames) as (knocked, heard):
        found = await soon(knocked.frames.next())
        assert found.id == "1.0.aa"
        for _ in range(2):
            assert await soon(heard.get()) == encode_block("probe-ack", b'{"nonce":"n"}').decode()


async def test_a_socket_that_is_silent_or_talks_nonsense_has_no_next_block() -> None:
    async with socket() as (knocked, _):
        assert await soon(knocked.frames.next(0.02)) is None
    async with socket(b"id: \xff\n\n") as (knocked, _):
        assert await soon(knocked.frames.next()) is None


@pytest.mark.parametrize(
    ("headers", "echo"),
    [
        ((), None),
        ((("X-MCP-Resume-Cursor", "52"),), 52),
        ((("X-MCP-Resume-Cursor", "x"),), None),
        ((("X-MCP-Resume-Cursor", "9" * 5000),), None),
        ((("X-MCP-Resume-Cursor", "52"), ("X-MCP-Resume-Cursor", "53")), None),
    ],
)
async def test_the_cursor_of_a_101_is_one_number_or_none(
    headers: tuple[tuple[str, str], ...], echo: int | None
) -> None:
    async with socket(headers=headers) as (knocked, _):
        assert (knocked.status, knocked.echo) == (101, echo)
        assert isinstance(knocked.frames, Frames)
