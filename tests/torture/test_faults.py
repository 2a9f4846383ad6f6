"""The fault proxy does to a connection what it says, and nothing to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from gapless.torture.faults import Direction, FaultProxy, Link

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Upstream:
    """A server whose connections a test holds."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Ends] = asyncio.Queue()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.accepted.put((reader, writer))


class Pair:
    """One proxied connection, both ends of it."""

    def __init__(self, link: Link, client: Ends, server: Ends) -> None:
        self.link = link
        self.client_reads, self.client_writes = client
        self.server_reads, self.server_writes = server


async def soon(reader: asyncio.StreamReader, count: int = 1024) -> bytes:
    return await asyncio.wait_for(reader.read(count), 10)


@pytest.fixture
async def upstream() -> AsyncIterator[tuple[Upstream, int]]:
    held = Upstream()
    server = await asyncio.start_server(held.accept, "127.0.0.1", 0)
    yield held, server.sockets[0].getsockname()[1]
    server.close()
    while not held.accepted.empty():
        (_, writer) = held.accepted.get_nowait()
        writer.close()


@pytest.fixture
async def proxy(upstream: tuple[Upstream, int]) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy("127.0.0.1", upstream[1])
    await proxy.start()
    yield proxy
    await proxy.close()


@pytest.fixture
async def pair(proxy: FaultProxy, upstream: tuple[Upstream, int]) -> AsyncIterator[Pair]:
    client = await asyncio.open_connection("127.0.0.1", proxy.port)
    server = await asyncio.wait_for(upstream[0].accepted.get(), 10)
    pair = Pair(proxy.links[-1], client, server)
    yield pair
    for writer in (pair.client_writes, pair.server_writes):
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_bytes_and_ends_pass_both_ways(pair: Pair) -> None:
    pair.client_writes.write(b"to the server")
    assert await soon(pair.server_reads) == b"to the server"
    pair.server_writes.write(b"to the client")
    assert await soon(pair.client_reads) == b"to the client"
    pair.server_writes.write_eof()
    assert await soon(pair.client_reads) == b""


async def test_a_reset_is_seen_as_a_reset_on_both_sides(pair: Pair) -> None:
    pair.link.reset()
    for reader in (pair.client_reads, pair.server_reads):
        with pytest.raises(ConnectionResetError):
            await soon(reader)


async def test_a_close_lets_what_is_in_flight_arrive(pair: Pair) -> None:
    pair.server_writes.write(b"last words")
    assert await soon(pair.client_reads) == b"last words"
    pair.link.close()
    assert await soon(pair.client_reads) == b""
    assert await soon(pair.server_reads) == b""


async def test_a_black_hole_swallows_bytes_and_ends_and_keeps_the_connection(pair: Pair) -> None:
    pair.link.black_hole(Direction.TO_SERVER)
    pair.client_writes.write(b"swallowed")
    pair.client_writes.write_eof()
    pair.server_writes.write(b"the other way still works")
    assert await soon(pair.client_reads) == b"the other way still works"
    assert not pair.server_reads.at_eof()
    assert pair.link.open


async def test_what_is_held_comes_when_it_is_released(pair: Pair) -> None:
    pair.link.hold(Direction.TO_CLIENT)
    pair.server_writes.write(b"held")
    await pair.server_writes.drain()
    pair.client_writes.write(b"x")
    assert await soon(pair.server_reads) == b"x"
    pair.link.release(Direction.TO_CLIENT)
    assert await soon(pair.client_reads) == b"held"


async def test_a_trap_springs_once_its_pattern_has_passed(pair: Pair) -> None:
    pair.link.arm(Direction.TO_CLIENT, b"pattern", Link.close)
    pair.server_writes.write(b"a pat")
    assert await soon(pair.client_reads) == b"a pat"
    pair.server_writes.write(b"tern and more")
    assert await soon(pair.client_reads) == b"tern and more"
    assert await soon(pair.client_reads) == b""


async def test_a_trap_set_before_a_pattern_keeps_it_from_passing(pair: Pair) -> None:
    pair.link.arm(Direction.TO_CLIENT, b"101", Link.black_hole, before=True)
    pair.server_writes.write(b"HTTP/1.1 101 Switching Protocols")
    assert await soon(pair.client_reads) == b"HTTP/1.1 "
    assert pair.link.open


async def test_requests_are_told_apart_by_their_first_line(pair: Pair) -> None:
    pair.client_writes.write(b"GET /mcp/session/x/events HTTP/1.1\r\nUpgrade: websocket\r\n\r\n")
    await soon(pair.server_reads)
    assert pair.link.carries_events
    assert pair.link.upgraded


async def test_a_stripped_handshake_arrives_as_a_plain_get(proxy: FaultProxy, pair: Pair) -> None:
    proxy.on_request = Link.strip_upgrade
    request = b"GET /e HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n"
    pair.client_writes.write(request)
    arrived = await soon(pair.server_reads)
    assert b"Upgrade" not in arrived
    assert b"Sec-WebSocket-Key: k" in arrived


async def test_while_refusing_it_accepts_nobody(proxy: FaultProxy) -> None:
    proxy.refusing = True
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    with suppress(ConnectionResetError):  # or it is closed at once, which is as good
        assert await soon(reader) == b""
    writer.close()
    assert proxy.links == []
