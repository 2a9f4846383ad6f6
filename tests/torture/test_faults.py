"""The fault proxy does to a connection what it says, and nothing to the others."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import struct
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import uvloop

from gapless.torture import faults
from gapless.torture.faults import Direction, FaultKind, FaultProxy, Link

UP, DOWN = Direction.TO_SERVER, Direction.TO_CLIENT
MIB = 1024 * 1024


class End(asyncio.Protocol):
    """One end of a connection: what it got, segment by segment, and how that ended."""

    def __init__(self, made: Callable[[End], None] = lambda end: None) -> None:
        self.segments: list[bytes] = []
        self.got = bytearray()
        self.times: list[float] = []
        self.writable = True
        self.finished = False
        self.was_reset = False
        self.lost = False
        self._made = made
        self._moved = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such
        self._made(self)

    def data_received(self, data: bytes) -> None:
        self.segments.append(data)
        self.got += data
        self.times.append(asyncio.get_running_loop().time())
        self._moved.set()

    def eof_received(self) -> bool:
        self.finished = True
        self._moved.set()
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.was_reset = True, isinstance(exc, ConnectionResetError)
        self._moved.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    async def gets(self, data: bytes) -> None:
        """Until this has come; nothing else has, since the last time."""
        await self.until(lambda: len(self.got) >= len(data) or self.lost or self.finished)
        assert self.got == data
        self.segments.clear()
        self.got.clear()

    async def gets_fin(self) -> None:
        await self.until(lambda: self.finished or self.lost)
        assert self.finished

    async def gets_rst(self) -> None:
        await self.until(lambda: self.finished or self.lost)
        assert self.was_reset

    async def says(self, *chunks: bytes) -> None:
        """Send each by itself."""
        for chunk in chunks:
            self.transport.write(chunk)
            await settled()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._moved.set()

    def resets(self) -> None:
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Wire:
    """A proxy, and an upstream that does nothing by itself."""

    def __init__(self, proxy: FaultProxy, servers: asyncio.Queue[End]) -> None:
        self.proxy = proxy
        self.servers = servers
        self.ends: list[End] = []
        self.opened = 0
        self._told = proxy.on_link
        self._moved = asyncio.Event()
        proxy.on_link = self._on_link

    def _on_link(self, link: Link, opened: bool) -> None:
        self.opened += opened
        self._moved.set()
        if self._told is not None:
            self._told(link, opened)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    async def gone(self, *links: Link) -> None:
        """Until these are no longer open."""
        await self.until(lambda: not set(links) & set(self.proxy.links))

    async def client(self) -> End:
        loop = asyncio.get_running_loop()
        _, end = await loop.create_connection(End, "127.0.0.1", self.proxy.port)
        self.ends.append(end)
        return end

    async def server(self) -> End:
        return await asyncio.wait_for(self.servers.get(), 10)

    async def pair(self) -> Pair:
        opened = self.opened
        client, server = await self.client(), await self.server()
        await self.until(lambda: self.opened > opened)
        return Pair(self.proxy.links[-1], client, server)


class Pair(NamedTuple):
    """A link and its two ends."""

    link: Link
    client: End
    server: End


@asynccontextmanager
async def wired(**callbacks: Any) -> AsyncGenerator[Wire]:
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    servers: asyncio.Queue[End] = asyncio.Queue()
    accepted: list[End] = []

    def made(end: End) -> None:
        accepted.append(end)
        servers.put_nowait(end)

    upstream = await asyncio.get_running_loop().create_server(lambda: End(made), "127.0.0.1", 0)
    proxy = FaultProxy("127.0.0.1", upstream.sockets[0].getsockname()[1], **callbacks)
    await proxy.start()
    wire = Wire(proxy, servers)
    try:
        yield wire
    finally:
        async with asyncio.timeout(5):  # whatever was done to the links
            await proxy.close()
        upstream.close()
        for end in [*wire.ends, *accepted]:
            end.transport.abort()
        await settled()
    assert failed == []


@asynccontextmanager
async def paired(**callbacks: Any) -> AsyncGenerator[Pair]:
    async with wired(**callbacks) as wire:
        yield await wire.pair()


def plain(names: Mapping[str, Any]) -> list[Any]:
    """Those of these asynchronous tests that need no fixtures, to be run on another loop."""
    tests = [test for name, test in names.items() if name.startswith("test_")]
    found: list[Any] = []
    for test in filter(inspect.iscoroutinefunction, tests):
        match list(inspect.signature(test).parameters):
            case []:
                found.append(pytest.param(test, id=test.__name__))
            case ["direction"]:
                found += [
                    pytest.param(partial(test, way), id=f"{test.__name__}-{way.value}") for way in Direction
                ]
            case _:
                pass
    return found


async def settled() -> None:
    """Until what was sent has gone as far as it goes now: for that, something must not arrive."""
    for _ in range(60):
        await asyncio.sleep(0)


def ends(pair: Pair, direction: Direction) -> tuple[End, End]:
    """Where bytes in this direction come from, and where they go."""
    return (pair.client, pair.server) if direction is UP else (pair.server, pair.client)


async def crammed(pair: Pair) -> int:
    """Let the client read no more, and send it what the kernel takes and a little that the proxy has."""
    pair.client.transport.pause_reading()
    transport = pair.link._writers[0].transport
    sent = 0
    while not transport.get_write_buffer_size():
        await pair.server.says(bytes(16 * 1024))
        sent += 16 * 1024
    return sent


both = pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)


async def _written_until_lost(end: End) -> None:
    # Who has had a FIN, and so reads no more, learns of a reset when it writes.
    while not end.lost:
        await end.says(b"anybody there?")


# Nothing done ---------------------------------------------------------------------------------------------


async def test_bytes_and_ends_pass_both_ways() -> None:
    async with paired() as (link, client, server):
        await client.says(b"to the server")
        await server.gets(b"to the server")
        await server.says(b"to the client")
        await client.gets(b"to the client")
        server.transport.write_eof()
        await client.gets_fin()
        await client.says(b"goes on")
        await server.gets(b"goes on")
        assert link.open
        client.transport.write_eof()
        await server.gets_fin()


@both
async def test_a_reset_of_one_end_resets_the_other(direction: Direction) -> None:
    async with paired() as pair:
        near, far = ends(pair, direction)
        near.resets()
        await far.gets_rst()
        assert not pair.link.open


async def test_an_end_that_went_after_its_fin_is_noticed_when_it_is_written_to() -> None:
    async with paired() as (_, client, server):
        client.transport.write_eof()
        await server.gets_fin()
        client.resets()
        await settled()
        await asyncio.wait_for(_written_until_lost(server), 10)


async def test_bulk_passes_whole() -> None:
    async with paired() as (_, client, server):
        bulk = bytes(range(256)) * 4096 * 8
        server.transport.write(bulk)
        await client.gets(bulk)


# Ends of the connection -----------------------------------------------------------------------------------


async def test_a_reset_is_seen_as_a_reset_on_both_sides() -> None:
    async with paired() as (link, client, server):
        link.reset()
        await client.gets_rst()
        await server.gets_rst()
        assert not link.open


async def test_a_close_lets_what_is_in_flight_arrive_and_delays_it_no_longer() -> None:
    async with paired() as (link, client, server):
        link.delay(DOWN, 3600)
        link.throttle(DOWN, 1)
        link.delay(UP, 3600)
        await server.says(b"last words")
        await client.says(b"mine, too")
        link.close()
        await client.gets(b"last words")
        await client.gets_fin()
        await server.gets(b"mine, too")
        await server.gets_fin()


async def test_a_close_lets_all_of_it_arrive_however_it_was_split() -> None:
    async with paired() as (link, client, server):
        link.split(DOWN)
        link.delay(DOWN, 3600)
        await server.says(bytes(MIB // 2))
        link.close()
        await client.gets(bytes(MIB // 2))
        await client.gets_fin()


async def test_a_close_lets_what_came_before_a_reset_arrive(unhurried: None) -> None:
    async with paired() as (link, client, server):
        link.delay(DOWN, 3600)
        await server.says(b"last words")
        server.resets()
        await settled()
        link.close()
        await client.gets(b"last words")
        await client.gets_fin()


async def test_a_close_loses_what_is_held() -> None:
    async with paired() as (link, client, server):
        link.hold(DOWN)
        await server.says(b"held")
        link.close()
        await client.gets_fin()
        assert client.got == b""


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was closed waits for its ends: what happens, happens by itself."""
    monkeypatch.setattr(faults, "_LINGER", 3600)


async def test_a_closed_link_ends_though_its_ends_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_LINGER", 0.01)
    async with paired() as (link, client, server):
        link.close()
        assert not link.open
        await client.gets_fin()
        await server.gets_fin()
        await asyncio.wait_for(_written_until_lost(client), 10)


@both
async def test_a_half_close_ends_one_direction_and_the_other_goes_on(direction: Direction) -> None:
    async with paired() as pair:
        near, far = ends(pair, direction)
        pair.link.delay(direction, 3600)
        await near.says(b"in flight")
        pair.link.half_close(direction)
        await far.gets(b"in flight")
        await far.gets_fin()
        await near.says(b"too late")
        await far.says(b"the other way")
        await near.gets(b"the other way")
        assert far.got == b""
        assert not near.finished
        assert pair.link.open


@both
async def test_what_comes_after_a_half_close_is_taken_and_thrown_away(direction: Direction) -> None:
    async with paired() as pair:
        near, far = ends(pair, direction)
        pair.link.half_close(direction)
        near.transport.set_write_buffer_limits(high=0)
        near.transport.write(bytes(64 * MIB))
        await near.until(lambda: near.writable)
        assert far.got == b""


async def test_a_half_close_waits_for_what_has_come_and_not_for_more() -> None:
    async with paired() as pair:
        sent = await crammed(pair)
        pair.link.half_close(DOWN)
        await pair.server.says(b"too late")
        pair.client.transport.resume_reading()
        await pair.client.gets_fin()
        assert pair.client.got == bytes(sent)


async def test_after_a_half_close_a_reset_still_ends_the_link() -> None:
    async with wired() as wire:
        link, client, server = await wire.pair()
        link.half_close(DOWN)
        await client.gets_fin()
        assert link.open
        server.resets()
        await wire.gone(link)


async def test_a_link_with_both_halves_closed_is_closed() -> None:
    async with wired() as wire:
        link, client, server = await wire.pair()
        link.half_close(UP)
        link.half_close(DOWN)
        await client.gets_fin()
        await server.gets_fin()
        await wire.gone(link)


async def test_a_link_that_ends_leaves_nothing_behind_of_what_a_slow_client_has_still_to_read() -> None:
    async with wired() as wire:
        link, client, server = pair = await wire.pair()
        client.transport.write_eof()
        await server.gets_fin()
        sent = await crammed(pair)
        server.transport.close()
        await settled()
        client.transport.resume_reading()
        await client.gets(bytes(sent))
        await client.gets_fin()
        await wire.gone(link)


# Half-open ------------------------------------------------------------------------------------------------


@both
async def test_a_black_hole_swallows_bytes_and_ends_and_keeps_the_connection(direction: Direction) -> None:
    async with paired() as pair:
        near, far = ends(pair, direction)
        pair.link.black_hole(direction)
        await near.says(b"swallowed")
        near.transport.write_eof()
        await far.says(b"the other way still works")
        await near.gets(b"the other way still works")
        assert far.got == b""
        assert not far.finished
        assert pair.link.open


async def test_a_black_hole_is_in_both_directions_unless_one_is_named() -> None:
    async with paired() as (link, client, server):
        link.black_hole()
        await client.says(b"swallowed")
        await server.says(b"swallowed")
        assert (client.got, server.got) == (b"", b"")


@both
async def test_a_link_of_which_one_end_is_gone_unnoticed_can_be_ended(direction: Direction) -> None:
    for end in (Link.close, Link.reset):
        async with wired() as wire:
            near, far = ends(pair := await wire.pair(), direction)
            pair.link.black_hole(direction)
            near.resets()
            await far.says(b"to nobody", b"to nobody")
            assert pair.link.open
            end(pair.link)
            await _written_until_lost(far)
            assert wire.proxy.links == []


@both
async def test_a_link_of_which_one_end_is_gone_unnoticed_is_gone_once_the_other_ends(
    direction: Direction,
) -> None:
    async with wired() as wire:
        near, far = ends(pair := await wire.pair(), direction)
        pair.link.black_hole(direction)
        near.resets()
        await settled()
        far.transport.write_eof()
        await wire.gone(pair.link)


@both
async def test_a_black_hole_swallows_a_reset(direction: Direction) -> None:
    async with paired() as pair:
        near, far = ends(pair, direction)
        pair.link.black_hole(direction)
        near.resets()
        await settled()
        await far.says(b"to nobody", b"to nobody")
        assert not far.lost
        assert pair.link.open


async def test_a_black_hole_takes_more_than_a_lane_holds() -> None:
    async with paired() as (link, client, server):
        link.black_hole(DOWN)
        link.split(DOWN)
        server.transport.set_write_buffer_limits(high=0)
        server.transport.write(bytes(64 * MIB))
        await server.until(lambda: server.writable)
        assert client.got == b""


@pytest.mark.parametrize("fin_first", [False, True])
async def test_a_black_holed_link_can_still_be_closed(fin_first: bool, unhurried: None) -> None:
    async with paired() as (link, client, server):
        link.black_hole()
        if fin_first:
            server.transport.write_eof()
            await settled()
        link.close()
        await client.gets_fin()
        await server.gets_fin()


async def test_a_black_holed_link_can_still_be_reset() -> None:
    async with paired() as (link, client, server):
        link.black_hole()
        server.transport.write_eof()
        await settled()
        link.reset()
        await client.gets_rst()
        await server.gets_rst()


async def test_a_black_holed_link_is_gone_once_both_its_ends_are() -> None:
    async with wired() as wire:
        link, client, server = await wire.pair()
        link.black_hole()
        client.transport.close()
        await settled()
        assert wire.proxy.links == [link]
        server.transport.close()
        await wire.gone(link)
        assert not link.open


# Late -----------------------------------------------------------------------------------------------------


@both
async def test_what_is_held_comes_when_it_is_released(direction: Direction) -> None:
    async with paired() as pair:
        near, far = ends(pair, direction)
        pair.link.hold(direction)
        await near.says(b"held, ", b"and more")
        near.transport.write_eof()
        await settled()
        assert far.got == b""
        assert not far.finished
        pair.link.release(direction)
        await far.gets(b"held, and more")
        await far.gets_fin()


@pytest.mark.parametrize("fault", [lambda link: link.hold(DOWN), lambda link: link.delay(DOWN, 3600)])
async def test_a_lane_that_waits_reads_no_more_than_it_may_hold(fault: Callable[[Link], None]) -> None:
    async with paired() as (link, client, server):
        fault(link)
        bulk = bytes(64 * MIB)
        server.transport.write(bulk)
        before = -1
        while before != server.transport.get_write_buffer_size():
            before = server.transport.get_write_buffer_size()
            await settled()
        assert before > 32 * MIB  # the rest is in the kernel's buffers, and 1 MiB in the proxy
        link.release(DOWN)
        link.delay(DOWN, 0)
        await client.gets(bulk)


async def test_a_delay_lets_everything_arrive_later_and_slows_nothing_down() -> None:
    async with paired() as (link, client, server):
        loop = asyncio.get_running_loop()
        link.delay(DOWN, 0.1)
        sent: list[float] = []
        for number in range(50):
            sent.append(loop.time())
            await server.says(b"%02d" % number)
        await client.until(lambda: len(client.got) == 100)
        assert client.got == b"".join(b"%02d" % number for number in range(50))
        counted = zip(client.times, client.segments, strict=True)
        arrived = [at for at, segment in counted for _ in range(len(segment) // 2)]
        assert all(late - early >= 0.099 for early, late in zip(sent, arrived, strict=True))
        assert arrived[-1] - sent[0] < 50 * 0.1 / 2  # one after the other, they would take 5 s


async def test_an_end_is_delayed_too() -> None:
    async with paired() as (link, client, server):
        link.delay(DOWN, 3600)
        server.transport.write_eof()
        await settled()
        assert not client.finished
        link.delay(DOWN, 0)
        await client.gets_fin()


async def test_a_throttled_lane_forwards_no_faster_than_it_may() -> None:
    async with paired() as (link, client, server):
        loop = asyncio.get_running_loop()
        link.throttle(DOWN, 1000)
        began = loop.time()
        await server.says(b"x" * 200)
        await client.gets(b"x" * 200)
        assert loop.time() - began >= 0.17  # the first 20 bytes go at once
        link.throttle(DOWN, 0.001)
        await server.says(b"xx")
        link.throttle(DOWN, 0)
        await client.gets(b"xx")


# Cut up and put together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
async def test_split_bytes_arrive_in_as_many_segments(size: int) -> None:
    async with paired() as (link, client, server):
        link.split(DOWN, size)
        data = bytes(range(100))
        await server.says(data)
        await client.until(lambda: len(client.got) == len(data))
        assert client.segments == [data[at : at + size] for at in range(0, len(data), size)]


async def test_a_reader_of_streams_sees_the_cuts_too() -> None:
    async with wired() as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.proxy.port)
        server = await wire.server()
        await wire.until(lambda: bool(wire.proxy.links))
        wire.proxy.links[0].split(DOWN)
        server.transport.write(b"0123456789")
        read: list[bytes] = []
        async with asyncio.timeout(10):
            while len(read) < 10:
                read.append(await reader.read(100))
        writer.close()
        assert read == [b"%d" % number for number in range(10)]


async def test_coalesced_bytes_arrive_in_one_segment() -> None:
    async with paired() as (link, client, server):
        loop = asyncio.get_running_loop()
        link.coalesce(DOWN, 0.2)
        began = loop.time()
        await server.says(b"one ", b"two ", b"three")
        assert client.got == b""
        server.transport.write_eof()
        await client.until(lambda: client.finished)
        assert client.segments == [b"one two three"]
        assert loop.time() - began >= 0.199


# Traps ----------------------------------------------------------------------------------------------------


async def test_a_trap_springs_once_its_pattern_has_passed() -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", Link.close)
        await server.says(b"a pat")
        await client.gets(b"a pat")
        await server.says(b"tern and more", b"lost")
        await client.gets(b"tern and more")
        await client.gets_fin()


async def test_a_trap_strikes_right_behind_its_pattern() -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", Link.black_hole)
        await server.says(b"a pattern and more")
        assert client.got == b"a pattern"


async def test_a_trap_set_before_a_pattern_keeps_it_from_passing() -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"101", Link.black_hole, before=True)
        await server.says(b"HTTP/1.1 101 Switching Protocols")
        await client.gets(b"HTTP/1.1 ")
        assert link.open


async def test_of_a_pattern_split_over_chunks_nothing_passes_before_the_trap_strikes() -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", Link.black_hole, before=True)
        await server.says(b"papa", b"tt", b"pat")
        assert client.got == b"papatt"
        await server.says(b"te", b"rn", b"more")
        assert client.got == b"papatt"


@pytest.mark.parametrize("ending", ["more", "end"])
async def test_what_only_seemed_to_be_a_pattern_passes_in_the_end(ending: str) -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", Link.reset, before=True)
        await server.says(b"a pat")
        assert client.got == b"a "
        if ending == "more":
            await server.says(b" on the back")
            await client.gets(b"a pat on the back")
        else:
            server.transport.write_eof()
            await client.gets_fin()
            assert client.got == b"a pat"


@pytest.mark.parametrize("action", [Link.close, lambda link: link.half_close(DOWN)])
async def test_where_a_trap_closes_before_a_pattern_nothing_more_passes(
    action: Callable[[Link], None],
) -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", action, before=True)
        link.hold(DOWN)
        await server.says(b"a pattern", b"and more")
        link.release(DOWN)
        await client.gets_fin()
        assert client.got == b"a "


async def test_a_pattern_that_a_trap_holds_comes_when_it_is_released() -> None:
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", lambda link: link.hold(DOWN), before=True)
        await server.says(b"a pattern", b" and more")
        assert client.got == b"a "
        link.release(DOWN)
        await client.gets(b"a pattern and more")


async def test_a_trap_strikes_what_was_held_before_it_was_set() -> None:
    async with paired() as (link, client, server):
        link.hold(DOWN)
        await server.says(b"a pattern")
        link.arm(DOWN, b"pattern", Link.black_hole, before=True)
        link.release(DOWN)
        await client.gets(b"a ")
        await settled()
        assert client.got == b""


async def test_all_traps_of_one_place_spring_in_their_order_and_each_once() -> None:
    sprung: list[str] = []
    async with paired() as (link, client, server):
        link.arm(DOWN, b"and a", lambda _: sprung.append("last"))
        link.arm(DOWN, b"pattern", lambda _: sprung.append("long"))
        link.arm(DOWN, b"tern", lambda _: sprung.append("short"))
        link.arm(DOWN, b" and", lambda _: sprung.append("next"), before=True)
        link.arm(UP, b"pattern", lambda _: sprung.append("the other way"))
        await server.says(b"a pattern and a pattern and")
        await client.gets(b"a pattern and a pattern and")
    assert sprung == ["long", "short", "next", "last"]


async def test_a_trap_that_is_set_twice_springs_once() -> None:
    sprung: list[Link] = []
    async with paired() as (link, client, server):
        link.arm(DOWN, b"pattern", sprung.append)
        link.arm(DOWN, b"pattern", sprung.append)
        await server.says(b"pattern")
        await client.gets(b"pattern")
        assert sprung == [link]
        link.arm(DOWN, b"pattern", sprung.append)
        await server.says(b"pattern")
        await client.gets(b"pattern")
        assert sprung == [link, link]


async def test_a_trap_remembers_no_more_than_it_needs() -> None:
    async with paired() as (link, _, server):
        link.arm(DOWN, b"pattern", Link.reset)
        await server.says(b"x" * 1000, b"y" * 1000)
        (trap,) = link._responses._traps
        assert trap.seen == b"y" * 6


async def test_a_trap_cuts_split_bytes_where_it_should() -> None:
    async with paired() as (link, client, server):
        link.split(DOWN, 4)
        link.arm(DOWN, b"pattern", Link.black_hole)
        await server.says(b"a pattern and more")
        await client.until(lambda: len(client.got) >= 9)
        await settled()
        assert client.segments == [b"a pa", b"tter", b"n"]


# The proxy ------------------------------------------------------------------------------------------------


async def test_while_refusing_it_resets_everybody() -> None:
    async with wired() as wire:
        wire.proxy.refusing = True
        client = await wire.client()
        await client.gets_rst()
        assert wire.proxy.links == []
        wire.proxy.refusing = False
        await wire.pair()


async def test_where_nobody_listens_upstream_the_client_is_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    proxy = FaultProxy("127.0.0.1", port)
    await proxy.start()
    _, client = await asyncio.get_running_loop().create_connection(End, "127.0.0.1", proxy.port)
    await client.gets_rst()
    await proxy.close()


async def test_every_write_and_end_is_told() -> None:
    told: list[tuple[int, Direction, int, str]] = []
    async with wired(on_bytes=lambda link, *rest: told.append((link.number, *rest))) as wire:
        link, client, server = await wire.pair()
        await client.says(b"abc")
        link.black_hole(UP)
        await client.says(b"defg")
        server.transport.write_eof()
        await client.gets_fin()
        link.reset()
        await server.until(lambda: server.lost)
    assert told == [
        (1, UP, 3, ""),
        (1, UP, 4, "swallowed"),
        (1, DOWN, 0, "fin"),
        (1, UP, 0, "rst"),
        (1, DOWN, 0, "rst"),
    ]


async def test_links_are_told_when_they_open_and_when_they_end() -> None:
    told: list[tuple[int, bool, bool]] = []
    async with wired(on_link=lambda link, opened: told.append((link.number, opened, link.open))) as wire:
        first, second = await wire.pair(), await wire.pair()
        assert wire.proxy.links == [first.link, second.link]
        first.link.close()
        assert wire.proxy.links == [second.link]
        second.client.transport.close()
        second.server.transport.close()
        await wire.gone(second.link)
        await wire.pair()
    assert told == [
        (1, True, True),
        (2, True, True),
        (1, False, False),
        (2, False, False),
        (3, True, True),
        (3, False, False),
    ]


async def test_a_link_may_be_reset_as_it_opens() -> None:
    def reset(link: Link, opened: bool) -> None:
        link.hold(DOWN)
        link.reset()

    async with wired(on_link=reset) as wire:
        client = await wire.client()
        await client.gets_rst()
        await settled()
        assert wire.proxy.links == []
        assert not wire.proxy._tasks


async def test_the_proxy_resets_its_links_when_it_closes() -> None:
    async with wired() as wire:
        _, client, server = await wire.pair()
        await wire.proxy.close()
        await client.gets_rst()
        await server.gets_rst()


@pytest.mark.parametrize("turns", range(8))
async def test_the_proxy_drops_a_connection_that_is_on_its_way_to_be_a_link_when_it_closes(
    turns: int,
) -> None:
    before = asyncio.all_tasks()
    async with wired() as wire:
        client = await wire.client()
        for _ in range(turns):
            await asyncio.sleep(0)
        await wire.proxy.close()
        await client.until(lambda: client.finished or client.lost)
        assert asyncio.all_tasks() == before


async def test_a_client_that_does_not_wait_for_its_link_leaves_nothing_behind() -> None:
    gone = asyncio.Event()
    connect = asyncio.open_connection

    async def slowly(*address: Any, **options: Any) -> Any:
        server = await connect(*address, **options)
        await gone.wait()
        return server

    async with wired() as wire:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "open_connection", slowly)
            client = await wire.client()
            server = await wire.server()
            client.resets()
            await settled()
            gone.set()
            await server.gets_rst()
        await settled()
        assert wire.proxy.links == []
        assert not wire.proxy._tasks


_STUCK: dict[str, Callable[[Link], None]] = {
    "held": lambda link: link.hold(DOWN),
    "delayed": lambda link: link.delay(DOWN, 3600),
    "throttled": lambda link: link.throttle(DOWN, 0.001),
    "coalescing": lambda link: link.coalesce(DOWN, 3600),
    "black-holed": Link.black_hole,
    "buffering": Link.buffer_response,
    "closed": Link.close,
    "half-closed": lambda link: link.half_close(UP),
    "not read": lambda link: None,
}


@pytest.mark.parametrize("fault", _STUCK.values(), ids=_STUCK)
async def test_the_proxy_closes_at_once_whatever_its_links_are_at(
    fault: Callable[[Link], None], unhurried: None
) -> None:
    before = asyncio.all_tasks()
    async with wired() as wire:
        link, client, server = await wire.pair()
        fault(link)
        client.transport.pause_reading()
        server.transport.write(bytes(16 * MIB))
        await settled()
        async with asyncio.timeout(5):
            await wire.proxy.close()
        assert wire.proxy.links == []
        assert asyncio.all_tasks() == before


async def test_of_many_links_nothing_is_left() -> None:
    before = asyncio.all_tasks()
    gone: list[weakref.ref[Link]] = []

    async def come_and_go(wire: Wire, reset: bool) -> None:
        link, client, server = await wire.pair()
        link.arm(DOWN, b"never", Link.reset, before=True)
        gone.append(weakref.ref(link))
        if reset:
            link.hold(DOWN)
            await server.says(b"held")
            link.reset()
        else:
            client.transport.close()
            await server.gets_fin()
            server.transport.close()
        await client.until(lambda: client.lost)

    async with wired() as wire:
        for number in range(200):
            await come_and_go(wire, bool(number % 2))
        await wire.gone(*wire.proxy.links)
        await settled()
        gc.collect()
        assert not wire.proxy._tasks
        assert [ref for ref in gone if ref() is not None] == []
        assert asyncio.all_tasks() == before


async def test_a_callback_that_fails_is_heard_and_ends_its_link_only() -> None:
    def fail(link: Link) -> None:
        raise ZeroDivisionError

    heard: list[dict[str, Any]] = []
    async with wired() as wire:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        other, (link, client, server) = await wire.pair(), await wire.pair()
        link.arm(DOWN, b"x", fail)
        await server.says(b"x")
        await client.gets(b"x")
        await client.gets_fin()
        assert wire.proxy.links == [other.link]
        (context,) = heard
        assert context["exception"].split(ZeroDivisionError)[0] is not None


@pytest.mark.parametrize("test", plain(globals()))
def test_it_is_so_on_uvloop_too(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def test_every_kind_of_fault_is_named_and_can_be_done() -> None:
    public = {name for name in vars(Link) if not name.startswith("_")}
    other = {"carries_events", "upgraded", "arm", "release", "run"}
    assert {kind.value for kind in FaultKind} == public - other | {"refusing"}
    assert hasattr(FaultProxy("127.0.0.1", 1), FaultKind.REFUSE.value)
