"""The naive server: right while nothing is switched on, and wrong in the way that a switch says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

import gapless
from gapless.protocol.block import Block, BlockDecoder
from tests.real.serving import proxied
from tests.torture.naive import NaiveSwitches, naive_server

both = pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])

SILENCE = b":\n\n"
"""A comment comes when there is nothing else to send: soon, with the timers below."""
KINDS = ["progress", "log", "ask", "changed", "stray"]


# With every switch off -----------------------------------------------------------------------------


async def climbed(client: Client, told: Callable[[int], None]) -> list[int]:
    """The progress that a climb told; `told` is called with the count of it."""
    steps: list[int] = []

    async def progressed(progress: float, total: float | None, message: str | None) -> None:
        steps.append(int(progress))
        told(len(steps))

    arguments = {"run": "cut", "rungs": 60, "delay": 0.005, "kinds": KINDS}
    result = await client.call_tool("ladder", arguments, progress_callback=progressed)
    account = json.loads(getattr(result.content[0], "text", ""))
    assert account == {"run": "cut", "rungs": 60, "answers": list(range(3, 61, 5))}
    begun = await client.call_tool("runs", {"run": "cut"})
    assert getattr(begun.content[0], "text", "") == "1"
    return steps


async def answer(context: Any, params: Any) -> ElicitResult:
    return ElicitResult(action="accept", content={"rung": int(params.message.rpartition(" ")[2])})


@pytest.mark.parametrize("door", ["never", "one step", "two steps"])
async def test_our_client_climbs_through_cuts_and_through_the_door(door: str) -> None:
    steps: Literal[1, 2] = 2 if door == "two steps" else 1
    used: set[str] = set()
    async with naive_server() as url, proxied(url) as (via, proxy):
        connection = gapless.connect(
            via, upgrade="never", steps=steps, observe=lambda seen: used.add(seen.transport)
        )

        def told(count: int) -> None:
            if count in (2, 8):
                for link in list(proxy.links):
                    link.reset()
            if count == 5 and door != "never":
                connection.migrate()

        async with Client(connection, mode="legacy", elicitation_callback=answer) as client:
            assert await climbed(client, told) == list(range(1, 61, 5))
    assert ("websocket" in used) is (door != "never")


async def test_a_standard_client_resumes_without_a_hole() -> None:
    async with naive_server(NaiveSwitches(retry_ms=10)) as url, proxied(url) as (via, proxy):

        def told(count: int) -> None:
            if count == 3:  # once: the SDK's client forgets its cursor when a resumed stream breaks
                for link in list(proxy.links):
                    link.reset()

        transport = streamable_http_client(via)
        async with Client(transport, mode="legacy", elicitation_callback=answer) as client:
            assert await climbed(client, told) == list(range(1, 61, 5))
            assert any(link.request.startswith("GET") for link in proxy.links)


# By hand -------------------------------------------------------------------------------------------


class Got:
    """An answer, as far as it was read."""

    def __init__(self, response: httpx2.Response) -> None:
        self.status = response.status_code
        self.token = response.headers.get("mcp-session-id", "")
        self.body = b""

    @property
    def blocks(self) -> list[Block]:
        """Its events: blocks with an ID and data."""
        return [block for block in BlockDecoder(2**26).feed(self.body) if block.id and block.data]

    @property
    def seqs(self) -> list[int]:
        """Their numbers."""
        return [int(str(block.id).partition(".")[0]) for block in self.blocks]

    @property
    def reason(self) -> str:
        """Why it is a refusal."""
        return json.loads(self.body)["error"]["data"]["reason"]


class Hand:
    """A client without a will of its own. `ids` are the IDs of the events that it has read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx2.AsyncClient(verify=False, trust_env=False, timeout=5)
        self.streams: list[asyncio.StreamWriter] = []
        self.sockets: list[ClientConnection] = []
        self.ids: list[str] = []
        self.number = 0
        self.token = ""

    async def send(self, method: str, path: str, until: bytes = SILENCE, **request: Any) -> Got:
        """A request, and its answer up to `until`, or its end."""
        headers = {"Accept": "application/json, text/event-stream", "Mcp-Client": "hand"}
        headers |= request.pop("headers", {})
        async with self.http.stream(method, self.url + path, headers=headers, **request) as response:
            got = Got(response)
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    got.body += chunk
                    if until in got.body and got.body.endswith(b"\n\n"):
                        break
        return got

    async def listen(self, path: str, headers: dict[str, str]) -> asyncio.StreamReader:
        """An event stream whose first block has begun to arrive, and of which no more is read."""
        host, port = self.url.removeprefix("http://").removesuffix("/mcp").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.streams.append(writer)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"GET /mcp{path} HTTP/1.1\r\nHost: {host}\r\n{head}\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"retry: "), 10)
        return reader

    # The session view

    async def open(self) -> None:
        body = json.loads((await self.send("POST", "/session")).body)
        self.path, self.ids, self.number = f"/session/{body['session']}", [body["cursor"]], 0

    async def post(self, message: dict[str, Any], number: int | None = None, process: str = "hand") -> Got:
        self.number = number or self.number + 1
        headers = {"Mcp-Message-Number": str(self.number), "Mcp-Client": process}
        return await self.send("POST", f"{self.path}/messages", json=message, headers=headers)

    async def events(self, cursor: str | None, until: bytes = SILENCE) -> Got:
        headers = {} if cursor is None else {"Last-Event-ID": cursor}
        return await self.send("GET", f"{self.path}/events", until, headers=headers)

    async def climb(self, rungs: int = 3) -> None:
        """Climb, and read all of it: `rungs` events and the result."""
        await self.post(climb(self.number + 1, rungs=rungs))
        got = await self.events(self.ids[-1], b'"result"')
        self.ids += [str(block.id) for block in got.blocks]

    async def negotiate(self, cursor: str, nonce: str) -> Got:
        body = {"cursor": cursor, "negotiation": nonce, "protocol": "mcp.v1"}
        return await self.send("POST", f"{self.path}/upgrade", json=body)

    async def knock(self, cursor: str, ticket: str = "") -> ClientConnection | int:
        """A socket, or the status of the refusal."""
        query = f"?ticket={ticket}" if ticket else ""
        try:
            socket = await connect(
                f"{self.url}{self.path}/events{query}".replace("http", "ws", 1),
                subprotocols=[Subprotocol("mcp.v1")],
                additional_headers={"Last-Event-ID": cursor, "Mcp-Client": "hand"},
                ping_interval=None,
                proxy=None,
            )
        except InvalidStatus as refused:
            return refused.response.status_code
        self.sockets.append(socket)
        return socket

    async def bind(self, cursor: str) -> ClientConnection:
        socket = await self.knock(cursor)
        assert isinstance(socket, ClientConnection)
        return socket

    # The stream view

    async def initialize(self) -> None:
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "", "version": ""},
        }
        self.token = (await self.standard(request(0, "initialize", **params))).token

    async def standard(self, message: dict[str, Any], until: bytes = b'"result"') -> Got:
        return await self.send("POST", "", until, json=message, headers=self.standard_headers())

    async def resume(self, cursor: str, until: bytes = b'"result"') -> Got:
        return await self.send("GET", "", until, headers={**self.standard_headers(), "Last-Event-ID": cursor})

    def standard_headers(self) -> dict[str, str]:
        token = {"Mcp-Session-Id": self.token} if self.token else {}
        return {"Mcp-Protocol-Version": "2025-11-25", **token}


def request(id: int, method: str = "tools/call", **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def climb(id: int, **arguments: Any) -> dict[str, Any]:
    """A call of the ladder, by default at once."""
    arguments = {"run": "run", "rungs": 3, "delay": 0, **arguments}
    return request(id, name="ladder", arguments=arguments, _meta={"progressToken": id})


async def rest(reader: asyncio.StreamReader) -> bytes:
    """The rest of an event stream that ends."""
    seen = b""
    async with asyncio.timeout(10):
        while not seen.endswith(b"\r\n0\r\n\r\n"):
            seen += await reader.read(2**20)
    return seen


async def frames(socket: ClientConnection, until: bytes) -> bytes:
    """What a socket says, up to a frame that has `until` in it."""
    seen = b""
    async with asyncio.timeout(10):
        while until not in seen:
            frame = await socket.recv()
            seen += frame.encode() if isinstance(frame, str) else frame
    return seen


def ack_of(frames: bytes) -> str:
    """The `cursor-ack` for the last event in `frames`."""
    last = [block.id for block in BlockDecoder(2**20).feed(frames) if block.id][-1]
    return f'event: cursor-ack\ndata: {{"cursor":"{last}"}}\n\n'


def seqs_of(frames: bytes) -> list[int]:
    return [int(str(block.id).partition(".")[0]) for block in BlockDecoder(2**20).feed(frames) if block.id]


@asynccontextmanager
async def hand(**switches: Any) -> AsyncGenerator[Hand]:
    """A hand with a session of a naive server."""
    async with naive_server(NaiveSwitches(keepalive=0.05, probe_timeout=0.05, **switches)) as url:
        poking = Hand(url)
        await poking.open()
        try:
            yield poking
        finally:
            for connection in (*poking.sockets, *poking.streams):
                connection.transport.abort()
            await poking.http.aclose()


async def test_refusals_are_those_of_the_protocol() -> None:
    async with hand() as client:
        await client.climb()
        start, end = client.ids[0], client.ids[-1]
        assert (await client.post(climb(7), 3)).reason == "message-gap"
        assert (await client.post(climb(7), 1)).reason == "message-conflict"
        assert (await client.post(climb(7), 2, process="another")).status == 202
        assert (await client.post(climb(8), 3)).reason == "message-conflict"
        assert (await client.send("GET", f"{client.path}/events?ticket=x")).status == 426
        assert (await client.send("DELETE", "", headers={"Mcp-Session-Id": client.path[9:]})).status == 409
        offer = json.loads((await client.negotiate(start, "one")).body)
        socket = await client.bind(start)  # it completes the negotiation (U7)
        assert (await client.negotiate(start, "one")).reason == "ticket-spent"
        assert await client.knock(start, offer["ticket"]) == 409
        socket.transport.abort()
        assert (await client.events(end)).status == 200
        await client.send("DELETE", client.path)
        assert (await client.events(start)).reason == "session-ended"


async def test_an_acceptance_ends_the_streams_and_another_at_it_burns_the_session() -> None:
    async with hand() as client:
        reader = await client.listen(f"{client.path}/events", {})
        await client.negotiate(client.ids[0], "one")
        assert b"event: upgrade-accepted" in await rest(reader)
        shown = await client.events(client.ids[0])
        assert not shown.body.endswith(SILENCE)
        assert (await client.negotiate(str(shown.blocks[-1].id), "two")).reason == "session-superseded"


async def test_the_gap_of_an_upgrade_outlasts_the_limit_on_events() -> None:
    async with hand(retain_events=2) as client:
        await client.climb(1)
        socket = await client.bind(client.ids[1])
        gap = await frames(socket, b"upgrade-accepted")
        await client.post(climb(9, rungs=5))
        await socket.send(ack_of(gap))
        assert seqs_of(await frames(socket, b'"id":9')) == [4, 5, 6, 7, 8, 9]


async def test_a_reader_that_falls_below_the_floor_is_ended_and_not_moved() -> None:
    async with hand(retain_events=2) as client:
        await client.post(climb(1, rungs=1, kinds=["log"], pad=2**24))
        reader = await client.listen(f"{client.path}/events", {})
        await client.post(climb(2, rungs=5))
        assert (await client.events(None)).reason == "cursor-evicted"
        left = await rest(reader)
        assert b"id: 1." in left
        assert b"id: 8." not in left


async def test_the_newer_of_two_readers_of_a_stream_supersedes_the_older() -> None:
    async with hand() as client:
        await client.initialize()
        headers = client.standard_headers()
        reader = await client.listen("", headers)
        await client.send("GET", "", headers=headers)
        assert b"retry: 30000" in await rest(reader)


async def test_strays_go_to_the_stream_of_a_call_while_nobody_reads_the_standalone_one() -> None:
    async with hand() as client:
        await client.initialize()
        assert len((await client.standard(climb(1, kinds=["stray"]))).blocks) == 4
        await client.listen("", client.standard_headers())
        assert len((await client.standard(climb(2, kinds=["stray"]))).blocks) == 1


# The first report ----------------------------------------------------------------------------------


@both
async def test_forgets_the_gap(wrong: bool) -> None:
    async with hand(forgets_the_gap=wrong) as client:
        await client.climb()
        socket = await client.bind(client.ids[2])
        await client.post(climb(9))
        seen = await frames(socket, b"\n\nid: ")
        assert b'"cursor":5' in seen
        assert seqs_of(seen)[0] == (6 if wrong else 3)


@both
async def test_upgrades_past_eviction(wrong: bool) -> None:
    async with hand(upgrades_past_eviction=wrong, retain_events=2) as client:
        await client.climb(1)
        await client.climb(1)
        assert (await client.events(client.ids[0])).reason == "cursor-evicted"
        found = await client.knock(client.ids[0])
        if wrong:
            assert isinstance(found, ClientConnection)
            assert seqs_of(await frames(found, b"upgrade-accepted"))[0] > 1
        else:
            assert found == 409


@both
async def test_believes_echoes(wrong: bool) -> None:
    async with hand(believes_echoes=wrong) as client:
        await client.climb()
        assert (await client.events("3")).seqs == ([4] if wrong else [])
        assert (await client.negotiate("3", "n")).status == (200 if wrong else 400)
        assert isinstance(await client.knock("3"), ClientConnection) is wrong


# The second report ---------------------------------------------------------------------------------


@both
async def test_no_echo(wrong: bool) -> None:
    async with hand(no_echo=wrong) as client:
        await client.climb()
        socket = await client.bind(client.ids[2])
        assert socket.response is not None
        assert ("X-MCP-Resume-Cursor" in socket.response.headers) is not wrong
        await client.post(climb(9))
        seen = await frames(socket, b"id: ")
        assert (b"resume-cursor" in seen) is not wrong
        assert seqs_of(seen)[0] == (6 if wrong else 3)


@both
async def test_stale_echo(wrong: bool) -> None:
    async with hand(stale_echo=wrong) as client:
        await client.climb()
        socket = await client.bind(client.ids[-1])
        seen = await frames(socket, b"upgrade-accepted")
        assert (b'"cursor":4' in seen) is wrong
        assert (b'"cursor":5' in seen) is not wrong


@both
async def test_frames_before_ack(wrong: bool) -> None:
    async with hand(frames_before_ack=wrong) as client:
        await client.climb()
        socket = await client.bind(client.ids[-1])
        await client.post(climb(9))
        seen = await frames(socket, b"id: 6." if wrong else b"keepalive")
        assert seqs_of(seen)[0] == 5
        assert (6 in seqs_of(seen)) is wrong
        await socket.send(ack_of(seen))
        assert wrong or seqs_of(await frames(socket, b"id: "))[0] == 6


# The third report ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("fresh", [False, True])
async def test_idle_at_the_boundary(wrong: bool, fresh: bool) -> None:
    async with hand(idle_at_the_boundary=wrong) as client:
        await client.negotiate(client.ids[0], "one")
        accepted = str((await client.events(client.ids[0])).blocks[-1].id)
        got = await client.events(None if fresh else accepted)
        assert got.status == 200
        assert (b"session-superseded" in got.body) is not wrong
        assert got.body.endswith(SILENCE) is wrong


@both
async def test_second_acceptance(wrong: bool) -> None:
    async with hand(second_acceptance=wrong) as client:
        offers = [json.loads((await client.negotiate(client.ids[0], nonce)).body) for nonce in ("one", "two")]
        assert [offer["event"] for offer in offers] == ([1, 2] if wrong else [1, 1])
        fresh = await client.events(None)
        assert fresh.body.count(b"event: upgrade-accepted") == (3 if wrong else 0)


@both
async def test_bound_while_on_sse_never_finds_a_half_open_socket_out(wrong: bool) -> None:
    async with hand(bound_while_on_sse=wrong) as client:
        await client.bind(client.ids[0])  # it answers no probe
        got = await client.events(client.ids[0])
        assert got.status == (409 if wrong else 200)


@both
async def test_bound_while_on_sse_stays_bound_once_a_handshake_was_refused(wrong: bool) -> None:
    async with hand(bound_while_on_sse=wrong) as client:
        socket = await client.bind(client.ids[0])
        assert isinstance(await client.knock(client.ids[0]), int) is wrong
        await socket.close()
        got = await client.events(client.ids[0])
        assert got.status == (409 if wrong else 200)


# Others --------------------------------------------------------------------------------------------


async def resumed(client: Hand) -> list[int]:
    """The numbers of what a resume from the second event brings, while a climb goes on."""
    await client.climb()
    await client.post(climb(9, rungs=200, delay=0.001))
    return (await client.events(client.ids[2], b'"id":9')).seqs


@both
async def test_replays_then_registers(wrong: bool) -> None:
    async with hand(replays_then_registers=wrong) as client:
        seqs = await resumed(client)
        assert seqs[:2] == [3, 4]
        assert (seqs == list(range(3, 206))) is not wrong


@both
async def test_reorders(wrong: bool) -> None:
    async with hand(reorders=wrong) as client:
        seqs = await resumed(client)
        assert sorted(seqs) == list(range(3, 206))
        assert (seqs[0] == 3) is not wrong


@both
async def test_repeats(wrong: bool) -> None:
    async with hand(repeats=wrong) as client:
        await client.climb()
        assert (await client.events(client.ids[2])).seqs == ([2, 3, 4] if wrong else [3, 4])


@both
@pytest.mark.parametrize(
    ("cursor", "reason"),
    [
        ("junk", "malformed"),
        ("9.0.0123456789abcdef", "cursor-ahead"),
        ("1.0.0123456789abcdef", "cursor-foreign"),
    ],
)
async def test_silent_cursor(wrong: bool, cursor: str, reason: str) -> None:
    async with hand(silent_cursor=wrong) as client:
        await client.climb()
        await client.initialize()
        for got in (await client.events(cursor), await client.resume(cursor, SILENCE)):
            assert (got.status, got.body) == (200, SILENCE) if wrong else got.reason == reason


@both
async def test_runs_twice(wrong: bool) -> None:
    async with hand(runs_twice=wrong) as client:
        for _ in range(2):
            assert (await client.post(climb(1), 1)).status == 202
        await client.post(request(2, name="runs", arguments={"run": "run"}))
        got = await client.events(client.ids[0], b'"id":2')
        assert json.loads(got.blocks[-1].data or b"")["result"]["content"][0]["text"] == (
            "2" if wrong else "1"
        )


@both
async def test_runs_twice_in_the_stream_view(wrong: bool) -> None:
    async with hand(runs_twice=wrong) as client:
        await client.initialize()
        waiting = climb(1, kinds=["ask"])
        await client.standard(waiting, b"elicitation")
        assert (await client.standard(waiting, b"elicitation")).status == (200 if wrong else 409)


@both
async def test_forgets_the_result(wrong: bool) -> None:
    async with hand(forgets_the_result=wrong) as client:
        await client.post(climb(1))
        seen = await client.events(client.ids[0])
        assert seen.seqs == ([1, 2, 3] if wrong else [1, 2, 3, 4])


@both
async def test_ends_early(wrong: bool) -> None:
    async with hand(ends_early=wrong) as client:
        await client.initialize()
        asked = await client.standard(climb(1, rungs=2, kinds=["log", "ask"]), b"elicitation")
        first, question = asked.blocks
        resuming = asyncio.create_task(client.resume(str(first.id)))
        id = json.loads(question.data or b"")["id"]
        reply = {"jsonrpc": "2.0", "id": id, "result": {"action": "accept", "content": {"rung": 2}}}
        if wrong:
            await asyncio.wait_for(resuming, 10)
        assert (await client.standard(reply)).status == 202
        assert (b'"result"' in (await resuming).body) is not wrong
        again = await client.resume(str(first.id))
        assert (b'"result"' in again.body) is not wrong


@both
async def test_shares_cursors(wrong: bool) -> None:
    async with hand(shares_cursors=wrong) as client:
        await client.climb()
        foreign = client.ids[1]
        await client.open()
        got = await client.events(foreign)
        assert got.status == (200 if wrong else 409)
        assert got.seqs == ([2, 3, 4] if wrong else [])


@both
async def test_one_queue(wrong: bool) -> None:
    async with hand(one_queue=wrong) as client:
        await client.post(climb(1, rungs=1, kinds=["log"], pad=2**24))
        await client.listen(f"{client.path}/events", {})
        await client.open()
        other = asyncio.create_task(client.climb())
        done, _ = await asyncio.wait({other}, timeout=0.5 if wrong else 10)
        assert bool(done) is not wrong
        client.streams[0].transport.abort()
        await asyncio.wait_for(other, 10)
