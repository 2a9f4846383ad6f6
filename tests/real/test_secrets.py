"""Logs of every level in either form, spans, metrics, refusals: nothing a busy server writes has a secret."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tests.real.nodes import COUNTING, Journal
from tests.server.harness import BLOCKS, Answer, Server, Session, block_of, note, request, soon
from tests.server.restarts import HELLO, key_of


class Written:
    """All that a server has written: its stderr, its spans, and what it answers to those who are refused."""

    def __init__(self) -> None:
        self.err = b""
        self.spans = b""
        self.bodies = b""

    def told(self, answer: Answer) -> Answer:
        """Keep a refusal, headers and all."""
        assert answer.status >= 400, answer
        self.bodies += repr((answer.headers, answer.body)).encode()
        return answer


@asynccontextmanager
async def serving(folder: Path, written: Written, *options: str) -> AsyncGenerator[Server]:
    """A traced server on the folder's log; ended in order, all that it wrote is in `written`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "tests.real.traced", "serve", "--port", "0"),
        *("--log", f"sqlite:///{folder / 'log.db'}", "--tokens", str(folder / "tokens"), *options),
        *("--", sys.executable, "-I", "-S", str(COUNTING), str(folder / "journal")),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    said, err, out = asyncio.Event(), process.stderr, process.stdout
    assert err is not None
    assert out is not None

    async def hear() -> None:
        while line := await err.readline():
            written.err += line
            if b"is served at" in line:
                said.set()
        said.set()

    async def see() -> None:
        written.spans += await out.read()

    try:
        async with asyncio.TaskGroup() as reading:
            reading.create_task(hear())
            reading.create_task(see())
            await soon(said.wait(), 30)
            *_, port = re.findall(rb"is served at http://127\.0\.0\.1:(\d+)/mcp", written.err)
            server = Server(cast(Any, None), cast(Any, None), cast(Any, None), int(port))
            yield server
            for drop in server.drops:
                drop()
            process.send_signal(signal.SIGTERM)
            assert await soon(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def begun(server: Server) -> Session:
    """A session whose MCP server has answered a handshake and a call."""
    session = await server.open()
    assert (await session.post(1, HELLO)).status == 202
    assert (await session.post(2, note("notifications/initialized"))).status == 202
    assert (await session.post(3, request(1, name="count", arguments={"run": "one"}))).status == 202
    stream = await session.events(session.start)
    await stream.events(2)
    stream.drop()
    return session


async def busy(server: Server, written: Written, journal: Journal) -> tuple[Session, str, list[str]]:
    """Go through the doors, and run against them: a session that goes on, its cursor, and what is secret."""
    known = server.headers["Authorization"]
    session, over = await begun(server), await begun(server)
    first, second = await session.ids()
    for wrong in ("Bearer someone-elses-token", "Basic dXNlcjpwYXNzd29yZA=="):
        server.headers["Authorization"] = wrong
        written.told(await session.get(first))
        written.told(await server.ask("GET", "/metrics"))
    server.headers.clear()
    written.told(await session.delete())
    server.headers["Authorization"] = known
    unknown = secrets.token_urlsafe(32)
    written.told(await server.ask("GET", f"/mcp/session/{unknown}/events"))
    for cursor in ("junk", "1.0.0000000000000000", "99.0.0000000000000000"):
        written.told(await session.get(cursor))
        written.told(await session.denied(cursor))
    written.told(await session.post(9, request(2)))
    written.told(await session.post(4, b'{"jsonrpc":'))
    written.told(await session.post_blocks(b"id: x\n" + block_of(note(), 9)))
    written.told(await server.ask("POST", f"{session.base}/ack", BLOCKS, b"x"))
    written.told(await server.ask("GET", f"{session.base}/messages"))
    written.told(await server.ask("GET", f"{session.base}/events?x=" + "y" * 20_000))
    for garbage in (b"GET %s/events HTTP/1.1\r\nHost\x00: x\r\n\r\n", b"\x16\x03\x01%s\r\n\r\n"):
        wire = await server.wire()
        await wire.write(garbage % session.base.encode())
        written.bodies += await wire.rest()
    offer = await session.pend(first)
    written.told(await session.denied(first, "a-ticket-that-never-was"))
    socket = await session.bind(first, offer["ticket"])
    await socket.cross()
    written.told(await session.denied(first, offer["ticket"]))
    await socket.say(5, request(3, "no/such/method"))
    await socket.say(5, note("another"))
    while (await socket.block()).event != "refused":
        pass
    streams = await server.stream("POST", "/mcp", {"Content-Type": "application/json"}, HELLO)
    token = streams.head.header("mcp-session-id")
    await streams.end()
    listening = {"Mcp-Session-Id": token, "Accept": "text/event-stream"}
    written.told(await server.ask("GET", "/mcp", listening | {"Last-Event-ID": "9.9.0000000000000000"}))
    assert (await server.ask("DELETE", "/mcp", {"Mcp-Session-Id": token})).status == 204
    written.told(await server.ask("GET", "/mcp", listening))
    pid = next(pid for pid, _ in journal.lines())
    os.kill(pid, signal.SIGKILL)  # the MCP server of the first session, which begins anew
    await socket.say(6, request(4, name="count", arguments={"run": "two"}))
    while (await socket.message()).get("id") != 4:
        pass
    assert (await over.delete()).status == 204
    written.told(await over.get())
    written.bodies += (await server.ask("GET", "/metrics")).body
    shown = [session.token, over.token, token, unknown, offer["ticket"]]
    tried = ["someone-elses-token", "dXNlcjpwYXNzd29yZA", "a-ticket-that-never-was"]
    links = [cursor.rpartition(".")[2] for cursor in (session.start, first, second)]
    return session, second, shown + tried + links


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("level", ["error", "warning", "info"])
async def test_nothing_that_a_busy_server_writes_has_a_secret_in_it(
    tmp_path: Path, level: str, form: str
) -> None:
    bearer, written, journal = secrets.token_urlsafe(32), Written(), Journal(tmp_path / "journal")
    hashed = hashlib.sha256(bearer.encode()).hexdigest()
    (tmp_path / "tokens").write_text(f"alice:{hashed}\n")
    options = ("--log-level", level, "--log-format", form)
    async with serving(tmp_path, written, *options) as server:
        server.headers["Authorization"] = f"Bearer {bearer}"
        session, cursor, found = await busy(server, written, journal)
    async with serving(tmp_path, written, *options) as server:
        server.headers["Authorization"] = f"Bearer {bearer}"
        session.server = server
        stream = await session.events(cursor)
        await stream.event()
        written.bodies += (await server.ask("GET", "/metrics")).body
    found += [bearer, hashed]
    assert len({*found}) == len(found)
    for secret in found:
        for name, text in vars(written).items():
            assert secret.encode() not in text, name
    # Or all that would show little.
    name = key_of(session.token).hex()[:8]
    assert written.spans.count(b'"name": "tools/call count"') == 3
    assert written.spans.count(b'"mcp.session.id": "%s"' % name.encode()) >= 3
    assert b'"gapless.outcome": "crossed"' in written.spans
    assert b"gapless_resumes_total" in written.bodies
    assert len(set(re.findall(rb'"reason":"([a-z-]+)"', written.bodies))) >= 10
    lines = [line for line in written.err.decode().splitlines() if "is served at" not in line]
    turned = [line for line in lines if f"session {name}: websocket-bound" in line]
    assert len(turned) == (1 if level == "info" else 0), lines
    assert (len(lines) == 0) == (level == "error"), lines
    if form == "json":
        assert {json.loads(line)["level"] for line in lines} <= {"info", "warning", "error"}
