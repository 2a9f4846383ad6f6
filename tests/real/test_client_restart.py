"""A session carried on after its client process was killed (C4, L6, N3)."""

from __future__ import annotations

import asyncio
import errno
import json
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from mcp import Client, MCPError
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

import gapless
from gapless.client.driver import Observation
from gapless.client.state import Saved, StateFile
from gapless.errors import UsageError
from gapless.protocol.refusal import Reason
from tests.real.serving import served

SCRIPT = Path(__file__).with_name("client_process.py")


async def start(url: str, state: Path, act: str, mode: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), url, str(state), act, mode, stdout=asyncio.subprocess.PIPE
    )


async def told(process: asyncio.subprocess.Process, key: str) -> dict[str, Any]:
    """The next line that has this key."""
    assert process.stdout is not None
    while line := await asyncio.wait_for(process.stdout.readline(), 30):
        said: dict[str, Any] = json.loads(line)
        if key in said:
            return said
    raise AssertionError(f"the client ended without saying {key}")


@pytest.mark.rule("C4", "L6", "N3")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_killed_client_is_restarted_and_goes_on_from_its_cursor(tmp_path: Path, mode: str) -> None:
    state = tmp_path / "state.json"
    async with served() as (url, _):
        first = await start(url, state, "die", mode)
        session = (await told(first, "connected"))["connected"]
        while (await told(first, "step"))["step"] < 5:
            pass
        first.kill()
        await first.wait()
        assert stat.S_IMODE(state.stat().st_mode) == 0o600

        second = await start(url, state, "go", mode)
        assert (await told(second, "connected"))["connected"] == session
        assert (await told(second, "result"))["result"] == "climbed 3 steps"
        recovered = (await told(second, "recovered"))["recovered"]
        assert [r["result"]["content"][0]["text"] for r in recovered] == ["climbed 40 steps"]
        assert await asyncio.wait_for(second.wait(), 30) == 0
        assert not state.exists(), "a session that was left is not gone on with"


def save(path: Path, url: str, session: str, cursor: str, **more: Any) -> None:
    StateFile(path).save(Saved(url, session, cursor, **more))


async def leave_behind(url: str, app: Any, path: Path, **more: Any) -> None:
    """A session as a dead process leaves it: opened, initialised by `more`, its state saved."""
    token, live = await app.sessions.open(gapless.protocol.session.View.SESSION, "anonymous")  # type: ignore[attr-defined]
    cursor = f"0.0.{live.machine.outbox.floor_link.hex()}"
    save(path, url, token, cursor, limits={"message": 1 << 20}, **more)


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    },
}
INITIALIZED = {
    "jsonrpc": "2.0",
    "id": 1,
    "result": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "serverInfo": {"name": "recorded", "version": "1"},
    },
}


@pytest.mark.rule("N3")
async def test_the_recorded_handshake_is_answered_without_the_server(tmp_path: Path) -> None:
    async with served() as (url, app):
        await leave_behind(url, app, tmp_path / "s", initialize=INITIALIZE, initialized=INITIALIZED)
        async with Client(gapless.connect(url, state=tmp_path / "s"), mode="legacy") as client:
            assert client.server_info is not None
            assert client.server_info.name == "recorded"


@pytest.mark.rule("N3")
async def test_other_client_capabilities_than_the_recorded_ones_are_refused(tmp_path: Path) -> None:
    recorded = msgspec.json.decode(msgspec.json.encode(INITIALIZE))
    recorded["params"]["capabilities"] = {"roots": {}}
    async with served() as (url, app):
        await leave_behind(url, app, tmp_path / "s", initialize=recorded, initialized=INITIALIZED)
        with pytest.raises((MCPError, ExceptionGroup)) as raised:
            async with Client(gapless.connect(url, state=tmp_path / "s"), mode="legacy"):
                pass
        group = raised.value
        errors = group.exceptions if isinstance(group, ExceptionGroup) else (group,)
        assert any("other client capabilities" in str(error) for error in errors)


@pytest.mark.rule("N3")
async def test_a_question_the_dead_process_did_not_answer_is_put_to_its_successor(tmp_path: Path) -> None:
    question = {"jsonrpc": "2.0", "id": 9, "method": "roots/list"}
    async with served() as (url, app):
        await leave_behind(url, app, tmp_path / "s", asked={"9": question})
        async with gapless.connect(url, state=tmp_path / "s") as (read, _):
            message = await asyncio.wait_for(read.receive(), 10)
            assert not isinstance(message, Exception)
            assert message.message.model_dump(exclude_unset=True)["id"] == 9


@pytest.mark.rule("N3")
async def test_a_question_is_put_to_the_successor_until_the_server_has_the_answer(tmp_path: Path) -> None:
    question = {"jsonrpc": "2.0", "id": 9, "method": "roots/list"}
    state, received = tmp_path / "s", asyncio.Event()

    def observe(one: Observation) -> None:
        if one.what == "received":
            received.set()

    def asked() -> dict[str, Any]:
        connection._save(True)
        saved = StateFile(state).load(url)
        assert saved is not None
        return saved.asked

    async with served() as (url, app):
        await leave_behind(url, app, state, asked={"9": question})
        connection = gapless.connect(url, state=state, observe=observe)
        async with connection as (read, write):
            assert not isinstance(await read.receive(), Exception)
            answer = JSONRPCResponse(jsonrpc="2.0", id=9, result={"roots": []})
            await write.send(SessionMessage(answer))
            assert asked() == {"9": question}, "it has been answered, and nobody knows"
            await asyncio.wait_for(received.wait(), 10)
            assert asked() == {}


@pytest.mark.rule("N3", "L7")
async def test_what_died_unsent_is_told_by_the_second_process_after_it_too(tmp_path: Path) -> None:
    state, received = tmp_path / "s", asyncio.Event()

    def observe(one: Observation) -> None:
        if one.what == "received":
            received.set()

    async with served() as (url, app):
        await leave_behind(url, app, state, waiting={"7": 1})
        second = gapless.connect(url, state=state, observe=observe)
        async with second as (_, write):
            note = JSONRPCNotification(jsonrpc="2.0", method="notifications/roots/list_changed")
            await write.send(SessionMessage(note))
            await asyncio.wait_for(received.wait(), 10)  # number 1 is used, by another message
            second._save(True)
            third = tmp_path / "t"
            third.write_bytes(state.read_bytes())  # as it is when the second is killed
            connection = gapless.connect(url, state=third)
            async with Client(connection):
                assert [told["id"] for told in connection.recovered] == [7]


async def test_a_state_file_that_cannot_be_removed_keeps_nobody_from_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    async with served() as (url, app):
        connection = gapless.connect(url, state=tmp_path / "s")
        async with Client(connection):
            monkeypatch.setattr(Path, "unlink", unlink)
        monkeypatch.undo()
        assert connection.error is None
        assert [live.machine.reason for live in app.sessions.all()] in ([], [Reason.SESSION_ENDED])


@pytest.mark.rule("L7")
async def test_a_request_that_died_before_the_server_had_it_is_answered_not_sent(tmp_path: Path) -> None:
    async with served() as (url, app):
        await leave_behind(url, app, tmp_path / "s", waiting={"5": 1})
        connection = gapless.connect(url, state=tmp_path / "s")
        async with Client(connection):
            (answer,) = connection.recovered
        assert answer["id"] == 5
        assert answer["error"]["data"]["reason"] == "not-sent"


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"url":1}'])
async def test_a_file_that_is_no_state_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        async with gapless.connect("http://127.0.0.1:9/mcp", state=path):
            pass
    assert path.read_bytes() == content


async def test_a_state_file_is_good_for_its_own_server_only(tmp_path: Path) -> None:
    save(tmp_path / "s", "http://127.0.0.1:8/mcp", "token", "0.0.0001020304050607")
    with pytest.raises(UsageError, match="belongs to"):
        async with gapless.connect("http://127.0.0.1:9/mcp", state=tmp_path / "s"):
            pass


@pytest.mark.rule("L7")
async def test_what_an_ended_session_has_left_to_hand_over_does_not_bring_its_state_file_back(
    tmp_path: Path,
) -> None:
    state = tmp_path / "s"
    seen: Counter[str] = Counter()
    changed = asyncio.Event()

    def observe(one: Observation) -> None:
        seen[one.what] += 1
        changed.set()

    async def until(what: str, times: int) -> None:
        while seen[what] < times:
            changed.clear()
            await changed.wait()

    async with served() as (url, app):
        connection = gapless.connect(url, state=state, upgrade="never", observe=observe)
        async with connection as (read, write):
            await write.send(SessionMessage(jsonrpc_message_adapter.validate_python(INITIALIZE)))
            assert not isinstance(await read.receive(), Exception)
            call = {"name": "climb", "arguments": {"steps": 5, "delay": 0.0}, "_meta": {"progressToken": 1}}
            await write.send(
                SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=2, method="tools/call", params=call))
            )
            await until("arrived", 8)  # all of it is here, and nothing of it has been read
            assert state.exists()
            (live,) = app.sessions.all()
            await live.end(Reason.SESSION_ENDED)
            await until("streaming → over", 1)
            assert not state.exists()
            cancelled = {"requestId": 2}
            notification = JSONRPCNotification(
                jsonrpc="2.0", method="notifications/cancelled", params=cancelled
            )
            with pytest.raises(anyio.BrokenResourceError):
                await write.send(SessionMessage(notification))
            *reports, answer = [item.message async for item in read if isinstance(item, SessionMessage)]
            assert len(reports) == 5
            assert isinstance(answer, JSONRPCResponse)
            assert not state.exists()
        assert connection.error is not None
        assert not state.exists()
