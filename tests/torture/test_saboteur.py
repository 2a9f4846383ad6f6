"""A saboteur does each fault at its moment, to what it is meant for, and to nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from gapless.torture import saboteur as module
from gapless.torture.ladder import Ledger
from gapless.torture.saboteur import Saboteur, sabotage
from gapless.torture.schedule import Fault, parse_schedule
from gapless.torture.trial import Target, Trace
from tests.torture.test_faults import End, Pair, Wire, settled, wired
from tests.torture.test_faults_http import GET, HANDSHAKE, OK, POST, STREAM

EVENT = b"id: 1.0.aa\ndata: {}\n\n"
RESULT = b'id: 2.0.ab\ndata: {"id":1,"result":{"content":[]}}\n\n'
SWITCHING = (
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    b"x-mcp-resume-cursor: 52\r\n\r\n"
)
CURSOR = b'\x81\x30event: resume-cursor\ndata: {"cursor":52}\n\n'
DEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Scene(NamedTuple):
    """A wire with a saboteur on it."""

    wire: Wire
    saboteur: Saboteur

    @property
    def told(self) -> list[str]:
        """What the timeline says of faults."""
        return [entry.what for entry in self.saboteur.trace.entries if entry.lane == "fault"]

    def begin(self) -> Callable[[int], None]:
        return self.saboteur.begin(Ledger())

    async def asks(self, request: bytes) -> Pair:
        """A request on a connection of its own, which the server gets."""
        pair = await self.wire.pair()
        await pair.client.says(request)
        await pair.server.gets(request)
        return pair

    async def streams(self) -> Pair:
        """An event stream that has begun."""
        pair = await self.asks(GET)
        await pair.server.says(STREAM)
        await pair.client.gets(STREAM)
        return pair


@asynccontextmanager
async def scene(schedule: str = "") -> AsyncGenerator[Scene]:
    async with wired() as wire:
        saboteur = Saboteur(wire.proxy, parse_schedule(schedule), Trace())
        yield Scene(wire, saboteur)
        saboteur.close()


# Each fault -------------------------------------------------------------------------------------------------

Effect = Callable[[Scene], Awaitable[None]]
EFFECTS: dict[Fault, Effect] = {}


def effect(*faults: Fault) -> Callable[[Effect], Effect]:
    """What is seen of a fault that is struck at once, on wires where nothing else is done."""

    def add(check: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(faults, check))
        return check

    return add


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
async def test_a_fault_does_what_it_says(fault: Fault) -> None:
    async with scene(f"0:{fault.value}") as staged:
        await EFFECTS[fault](staged)
        assert staged.told[0] == fault.value
        assert staged.saboteur.waiting == []


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts for a while lasts as long as a test needs to see it."""
    for name in ("_SWALLOW", "_THROTTLED", "_SPLIT", "_HOLD", "_OUTAGE"):
        monkeypatch.setattr(module, name, 0.02)


@effect(Fault.RESET)
async def _(scene: Scene) -> None:
    stream, post = await scene.streams(), await scene.asks(POST)
    scene.begin()
    await stream.client.gets_rst()
    await stream.server.gets_rst()
    await post.server.says(OK)
    await post.client.gets(OK)


@effect(Fault.CLOSE)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.client.gets_fin()
    await stream.server.gets_fin()


@effect(Fault.HALF_CLOSE)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.client.gets_fin()
    await settled()
    assert (stream.server.finished, stream.server.lost) == (False, False)


@effect(Fault.HALF_OPEN)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.server.says(chunk(EVENT))
    stream.server.transport.write_eof()
    await stream.client.says(GET)
    await settled()
    assert (stream.client.got, stream.client.finished, stream.server.got) == (b"", False, b"")


@effect(Fault.SWALLOW)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.server.says(chunk(EVENT))
    await stream.client.gets_rst()
    assert stream.client.got == b""


@effect(Fault.DELAY)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    said = asyncio.get_running_loop().time()
    await stream.server.says(chunk(EVENT))
    await stream.client.gets(chunk(EVENT))
    assert stream.client.times[-1] - said >= module._DELAY


@effect(Fault.THROTTLE)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    said = asyncio.get_running_loop().time()
    await stream.server.says(chunk(bytes(40_000)))
    await stream.client.gets(chunk(bytes(40_000)))
    assert module._THROTTLED < stream.client.times[-1] - said < 40_000 / module._RATE


@effect(Fault.SPLIT)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    stream.server.transport.write(EVENT)
    await stream.client.until(lambda: len(stream.client.got) == len(EVENT))
    assert len(stream.client.segments) > 3


@effect(Fault.COALESCE)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.server.says(chunk(EVENT), chunk(RESULT))
    await stream.client.until(lambda: bool(stream.client.got))
    assert stream.client.segments == [chunk(EVENT) + chunk(RESULT)]


@effect(Fault.CUT_ALL)
async def _(scene: Scene) -> None:
    stream, post = await scene.streams(), await scene.asks(POST)
    scene.begin()
    for end in (stream.client, stream.server, post.client, post.server):
        await end.gets_rst()


@effect(Fault.OUTAGE)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.client.gets_rst()
    refused = await scene.wire.client()
    await refused.gets_rst()
    async with asyncio.timeout(10):
        while refused.lost or scene.wire.proxy.refusing:
            refused = await scene.wire.client()
            await settled()


@effect(Fault.CUT_HEAD)
async def _(scene: Scene) -> None:
    open_already = await scene.streams()
    scene.begin()
    next_stream = await scene.asks(GET)
    await next_stream.server.says(STREAM)
    await next_stream.client.gets_rst()
    assert next_stream.client.got == b""
    assert open_already.link.open


@effect(Fault.BUFFER)
async def _(scene: Scene) -> None:
    scene.begin()
    stream = await scene.asks(GET)
    await stream.server.says(STREAM, chunk(EVENT))
    await settled()
    assert stream.client.got == b""
    await stream.server.says(b"0\r\n\r\n")
    await stream.client.gets(STREAM + chunk(EVENT) + b"0\r\n\r\n")


@effect(Fault.NOT_FOUND)
async def _(scene: Scene) -> None:
    scene.begin()
    stream = await scene.wire.pair()
    await stream.client.says(GET)
    await stream.client.gets_fin()
    assert stream.client.got.startswith(b"HTTP/1.1 404 ")
    assert b"text/plain" in stream.client.got
    assert stream.server.got == b""


@effect(Fault.CUT_RESULT)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.server.says(chunk(EVENT), chunk(RESULT))
    await stream.client.gets_rst()
    assert b'"result"' not in stream.client.got
    assert chunk(EVENT) in stream.client.got


@effect(Fault.CUT_END)
async def _(scene: Scene) -> None:
    stream = await scene.streams()
    scene.begin()
    await stream.server.says(chunk(EVENT), chunk(RESULT) + b"0\r\n\r\n")
    await stream.client.gets_rst()
    assert stream.client.got.endswith(RESULT)


@effect(Fault.CUT_FIRST)
async def _(scene: Scene) -> None:
    scene.begin()
    post = await scene.asks(POST)
    await post.server.says(STREAM, chunk(EVENT))
    await post.client.gets_rst()
    assert b"id:" not in post.client.got


@effect(Fault.LOST_ANSWER)
async def _(scene: Scene) -> None:
    scene.begin()
    post = await scene.asks(POST)
    await post.server.says(OK)
    await post.client.gets_rst()
    assert post.client.got == b""


@effect(Fault.REPEAT)
async def _(scene: Scene) -> None:
    scene.begin()
    post = await scene.asks(POST)
    again = await scene.wire.server()
    await again.gets(POST)
    await again.says(OK)
    await post.server.says(OK)
    await post.client.gets(OK)


@effect(Fault.MOVE)
async def _(scene: Scene) -> None:
    moves: list[str] = []
    scene.saboteur.moved = lambda: moves.append("moved")
    scene.begin()
    assert moves == ["moved"]


@effect(Fault.REFUSE_200, Fault.REFUSE_400, Fault.REFUSE_403, Fault.REFUSE_502)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.wire.pair()
    await knock.client.says(HANDSHAKE)
    await knock.client.gets_fin()
    status = scene.told[0].rpartition("-")[2]
    assert knock.client.got.startswith(f"HTTP/1.1 {status} ".encode())
    assert knock.server.got == b""


@effect(Fault.STRIP_UPGRADE)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.wire.pair()
    await knock.client.says(HANDSHAKE)
    await knock.server.until(lambda: knock.server.got.endswith(b"\r\n\r\n"))
    assert b"upgrade:" not in knock.server.got.lower()
    assert b"Last-Event-ID" in knock.server.got


@effect(Fault.STRIP_ECHO)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.asks(HANDSHAKE)
    await knock.server.says(SWITCHING + CURSOR)
    await knock.client.until(lambda: knock.client.got.endswith(CURSOR))
    assert b"101" in knock.client.got
    assert b"x-mcp-resume-cursor" not in knock.client.got


@effect(Fault.EAT_101)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.asks(HANDSHAKE)
    await knock.server.says(SWITCHING + CURSOR)
    knock.server.transport.write_eof()
    await settled()
    assert (knock.client.got, knock.client.finished, knock.client.lost) == (b"", False, False)


@effect(Fault.HOLD_101)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.asks(HANDSHAKE)
    asked = asyncio.get_running_loop().time()
    await knock.server.says(SWITCHING)
    await knock.client.gets(SWITCHING)
    assert knock.client.times[0] - asked > 0.01


@effect(Fault.CUT_101)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.asks(HANDSHAKE)
    await knock.server.says(SWITCHING)
    await knock.client.gets_rst()
    assert knock.client.got == b""


@effect(Fault.CUT_GAP)
async def _(scene: Scene) -> None:
    scene.begin()
    knock = await scene.asks(HANDSHAKE)
    await knock.server.says(SWITCHING, CURSOR)
    await knock.client.gets_rst()
    assert knock.client.got.startswith(SWITCHING)
    assert CURSOR.startswith(knock.client.got[len(SWITCHING) :])


# Moments ----------------------------------------------------------------------------------------------------


async def test_steps_happen_at_their_counts_from_when_the_schedule_began() -> None:
    async with scene("0:buffer 3:move 3:repeat 9:move 12:not-found") as (_, saboteur):
        moves: list[str] = []
        saboteur.moved = lambda: moves.append("moved")
        ledger = Ledger()
        ledger.count = 5
        received = saboteur.begin(ledger)
        assert saboteur.waiting == [Fault.BUFFER]
        received(7)
        assert (saboteur.waiting, moves) == ([Fault.BUFFER], [])
        received(8)
        assert (saboteur.waiting, moves) == ([Fault.BUFFER, Fault.REPEAT], ["moved"])
        received(8)
        assert len(moves) == 1
        received(40)
        assert (saboteur.waiting, moves) == ([Fault.BUFFER, Fault.REPEAT, Fault.NOT_FOUND], ["moved"] * 2)


async def test_a_schedule_that_has_not_begun_does_nothing() -> None:
    async with scene("0:reset 0:lost-answer") as staged:
        stream = await staged.streams()
        post = await staged.asks(POST)
        await post.server.says(OK)
        await post.client.gets(OK)
        assert stream.link.open
        assert staged.told == []


async def test_a_fault_of_streams_waits_for_none() -> None:
    async with scene("0:reset") as staged:
        staged.begin()
        stream = await staged.streams()
        await stream.server.says(chunk(EVENT))
        await stream.client.gets(chunk(EVENT))


async def test_sockets_and_answers_that_are_streams_carry_events_too() -> None:
    async with scene("0:reset") as staged:
        post = await staged.asks(POST)
        await post.server.says(STREAM)
        await post.client.gets(STREAM)
        socket = await staged.asks(HANDSHAKE)
        await socket.server.says(SWITCHING)
        await socket.client.gets(SWITCHING)
        assert staged.saboteur.streams == [post.link, socket.link]
        staged.begin()
        await post.client.gets_rst()
        await socket.client.gets_rst()
        assert staged.saboteur.streams == []


async def test_a_connection_that_is_asked_for_something_else_carries_no_events_any_more() -> None:
    async with scene("0:reset") as staged:
        stream = await staged.streams()
        await stream.server.says(b"0\r\n\r\n")
        await stream.client.gets(b"0\r\n\r\n")
        await stream.client.says(POST)
        await stream.server.gets(POST)
        staged.begin()
        await stream.server.says(OK)
        await stream.client.gets(OK)


async def test_a_waiting_fault_takes_one_request_of_those_it_is_for() -> None:
    async with scene("0:lost-answer 0:not-found 0:refuse-403 0:lost-answer") as staged:
        saboteur = staged.saboteur
        staged.begin()
        assert saboteur.waiting == [Fault.LOST_ANSWER, Fault.LOST_ANSWER, Fault.NOT_FOUND, Fault.REFUSE_403]

        first = await staged.asks(POST)
        assert saboteur.waiting == [Fault.LOST_ANSWER, Fault.NOT_FOUND, Fault.REFUSE_403]
        await first.server.says(OK)
        await first.client.gets_rst()

        knock = await staged.wire.pair()
        await knock.client.says(HANDSHAKE)
        await knock.client.gets_fin()
        assert saboteur.waiting == [Fault.LOST_ANSWER, Fault.NOT_FOUND]

        get = await staged.wire.pair()
        await get.client.says(GET)
        await get.client.gets_fin()
        assert saboteur.waiting == [Fault.LOST_ANSWER]

        await staged.streams()
        await staged.asks(HANDSHAKE)
        assert saboteur.waiting == [Fault.LOST_ANSWER]
        second = await staged.asks(POST)
        await second.server.says(OK)
        await second.client.gets_rst()

        third = await staged.asks(POST)
        await third.server.says(OK)
        await third.client.gets(OK)


async def test_a_request_is_taken_by_one_waiting_fault() -> None:
    async with scene("0:buffer 0:lost-answer 0:not-found 0:repeat") as staged:
        staged.begin()
        await staged.asks(POST)
        assert staged.saboteur.waiting == [Fault.BUFFER, Fault.NOT_FOUND, Fault.REPEAT]


@pytest.mark.parametrize("fault", [Fault.CUT_RESULT, Fault.CUT_END], ids=lambda fault: fault.value)
async def test_a_cut_of_the_result_is_not_lost_with_the_stream_it_was_armed_on(fault: Fault) -> None:
    async with scene(f"0:{fault.value} 0:reset") as staged:
        first = await staged.streams()
        staged.begin()
        await first.client.gets_rst()
        second = await staged.streams()
        await second.server.says(chunk(RESULT), b"0\r\n\r\n")
        await second.client.gets_rst()

        third = await staged.streams()
        await third.server.says(chunk(RESULT), b"0\r\n\r\n")
        await third.client.gets(chunk(RESULT) + b"0\r\n\r\n")


async def test_an_end_of_blocks_with_crlf_is_an_end_too() -> None:
    async with scene("0:cut-end") as staged:
        stream = await staged.streams()
        staged.begin()
        result = RESULT.replace(b"\n", b"\r\n")
        await stream.server.says(chunk(result) + b"0\r\n\r\n")
        await stream.client.gets_rst()
        assert stream.client.got.endswith(result)


# The end ----------------------------------------------------------------------------------------------------


async def test_after_the_end_nothing_happens_any_more() -> None:
    async with scene("0:lost-answer 0:cut-result 5:move 5:reset") as staged:
        moves: list[str] = []
        staged.saboteur.moved = lambda: moves.append("moved")
        received = staged.begin()
        staged.saboteur.close()
        received(100)
        assert moves == []
        post = await staged.asks(POST)
        await post.server.says(OK)
        await post.client.gets(OK)
        stream = await staged.streams()
        await stream.server.says(chunk(RESULT))
        await stream.client.gets(chunk(RESULT))


async def test_the_end_lets_connections_in_again_and_leaves_none_that_something_was_done_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_SWALLOW", "_HOLD", "_OUTAGE", "_THROTTLED"):
        monkeypatch.setattr(module, name, 3600)
    async with scene("1:half-open 2:throttle 2:swallow 3:hold-101 4:outage") as staged:
        stream = await staged.streams()
        received = staged.begin()
        received(3)
        knock = await staged.asks(HANDSHAKE)
        await knock.server.says(SWITCHING)
        staged.saboteur.close()
        await stream.client.gets_rst()
        await knock.client.gets_rst()
    async with scene("0:outage") as staged:
        staged.begin()
        assert staged.wire.proxy.refusing
        staged.saboteur.close()
        await staged.asks(POST)


async def test_what_was_to_come_later_does_not_come_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OUTAGE", 0)
    async with scene("0:outage") as staged:
        staged.begin()
        staged.saboteur.close()
        staged.wire.proxy.refusing = True  # somebody else's doing
        await settled()
        assert staged.wire.proxy.refusing


# A trial's own ----------------------------------------------------------------------------------------------


async def test_sabotage_is_a_proxy_of_its_own_before_the_target_with_everything_on_the_timeline() -> None:
    servers: asyncio.Queue[End] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    upstream = await loop.create_server(lambda: End(servers.put_nowait), "127.0.0.1", 0)
    target = Target(f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}/mcp?key=1")
    trace = Trace()
    async with sabotage(target, parse_schedule("1:move"), trace) as (url, saboteur):
        assert url == f"http://127.0.0.1:{saboteur.proxy.port}/mcp?key=1"
        _, client = await loop.create_connection(End, "127.0.0.1", saboteur.proxy.port)
        server = await servers.get()
        await client.says(POST)
        await server.gets(POST)
        await server.says(OK)
        await client.gets(OK)
        saboteur.begin(Ledger())(1)
        port = saboteur.proxy.port
    await client.until(lambda: client.lost)
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(End, "127.0.0.1", port)
    assert [(one.link, one.down, one.count) for one in trace.bytes if one.count] == [
        (1, False, len(POST)),
        (1, True, len(OK)),
    ]
    assert [(entry.lane, entry.what) for entry in trace.entries] == [
        ("wire", "1 POST /messages"),
        ("fault", "move"),
    ]
    upstream.close()
    server.transport.abort()
    await settled()


async def test_requests_are_told_of_after_the_schedules_own_faults() -> None:
    async with scene("0:not-found") as staged:
        told: list[tuple[str, int]] = []
        staged.saboteur.requested = lambda link: told.append((link.request, len(staged.saboteur.waiting)))
        staged.begin()
        await staged.asks(POST)
        get = await staged.wire.pair()
        await get.client.says(GET)
        await get.client.gets_fin()
        assert told == [("POST /messages", 1), ("GET /mcp/session/x/events", 0)]
