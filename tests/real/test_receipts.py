"""Receipts of a client whose connections are cut, audited against the log of its server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest

import gapless
from gapless.client.receipts import Line, Receipts, Turn, read_receipts
from gapless.client.state import Saved, StateFile
from gapless.errors import UsageError
from gapless.log.snapshot import snapshot
from gapless.protocol.cursor import EventId
from gapless.torture.audit import Report, audit
from tests.real.serving import proxied, served


def read(path: Path) -> list[Line]:
    with path.open("rb") as file:
        return list(read_receipts(file, path.stat().st_size))


async def judge(log: Path, lines: list[Line]) -> Report:
    with snapshot(log) as stored:
        (report,) = await audit(stored, lines)
    return report


async def climb(client: Client, steps: int, at: dict[int, Any]) -> None:
    """Climb; at some steps something is done."""

    async def progressed(progress: float, total: float | None, message: str | None) -> None:
        at.get(int(progress), lambda: None)()

    arguments = {"steps": steps, "delay": 0.01}
    await client.call_tool("climb", arguments, progress_callback=progressed)


@pytest.mark.rule("S1", "C7")
@pytest.mark.parametrize("steps", [1, 2])
async def test_receipts_prove_a_session_that_was_cut_and_moved_twice(tmp_path: Path, steps: Any) -> None:
    log, paper = tmp_path / "log.db", tmp_path / "r"
    async with served(f"sqlite:///{log}") as (url, _), proxied(url) as (via, proxy):

        def cut() -> None:
            for link in proxy.links:
                if link.carries_events and link.open:
                    link.reset()

        connection = gapless.connect(via, upgrade="never", steps=steps, receipts=paper)
        async with Client(connection) as client:
            await climb(client, 60, {10: cut, 20: connection.migrate, 40: cut})
            token = connection.session
        lines = read(paper)
        report = await judge(log, lines)
    assert [finding.text for finding in report.findings] == []
    assert report.processed is not None
    assert report.processed >= 61
    turns = [line.what for line in lines if isinstance(line.what, Turn)]
    assert [turn for turn in turns if turn is not Turn.SSE_FAILED] == [
        Turn.OPENED,
        Turn.SSE_OPENED,
        Turn.SSE_DROPPED,
        Turn.SSE_OPENED,
        *([Turn.UPGRADE_ASKED] if steps == 2 else []),
        Turn.HANDSHAKE,
        Turn.WEBSOCKET_OPENED,
        Turn.WEBSOCKET_DROPPED,
        Turn.SSE_OPENED,
        Turn.OVER,
    ]
    assert lines[-1].detail == "left"
    assert token is not None
    assert token.encode() not in paper.read_bytes()


@pytest.mark.rule("S1")
async def test_what_a_client_did_not_process_is_named_with_the_cut_it_fell_into(tmp_path: Path) -> None:
    log, paper = tmp_path / "log.db", tmp_path / "r"
    async with served(f"sqlite:///{log}") as (url, _), proxied(url) as (via, proxy):

        def cut() -> None:
            for link in proxy.links:
                link.reset()

        async with Client(gapless.connect(via, upgrade="never", receipts=paper)) as client:
            await climb(client, 20, {10: cut})
        lines = read(paper)
        (dropped,) = [at for at, line in enumerate(lines) if line.what is Turn.SSE_DROPPED]
        resumed = [at for at, line in enumerate(lines) if line.what is Turn.SSE_OPENED][-1]
        lost = lines.pop(resumed + 1)  # as a client that trusts a server's position would
        report = await judge(log, lines)
    assert dropped < resumed
    assert isinstance(lost.what, EventId)
    (violation,) = report.violations
    assert (violation.first, violation.last) == (lost.what.seq, lost.what.seq)
    assert violation.until == lines[resumed]
    assert violation.since in (lines[1], lines[dropped])


@pytest.mark.rule("C4")
async def test_no_cursor_is_saved_before_the_receipts_of_all_it_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper, saved = tmp_path / "r", []
    save = StateFile.save

    def spy(file: StateFile, state: Saved) -> None:
        written = [line.what for line in read(paper) if isinstance(line.what, EventId)]
        saved.append((state.cursor, [str(id) for id in written]))
        save(file, state)

    monkeypatch.setattr(StateFile, "save", spy)
    async with served() as (url, _):
        async with Client(gapless.connect(url, state=tmp_path / "s", receipts=paper)) as client:
            await climb(client, 200, {})
    assert len(saved) > 4
    for cursor, written in saved:
        assert cursor.startswith("0.") or cursor == written[-1]


async def test_receipts_that_cannot_be_opened_are_misuse_before_anything_is_sent(tmp_path: Path) -> None:
    async with served() as (url, app):
        with pytest.raises(UsageError, match="cannot write the receipts"):
            async with gapless.connect(url, receipts=tmp_path / "none" / "r"):
                pass
        assert list(app.sessions.all()) == []  # type: ignore[attr-defined]


async def test_receipts_that_can_no_longer_be_written_end_the_session_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(receipts: Receipts, id: EventId) -> None:
        raise UsageError("cannot write the receipts: No space left on device")

    async with served() as (url, _):
        connection = gapless.connect(url, receipts=tmp_path / "r")
        async with connection as (read, write):
            monkeypatch.setattr(Receipts, "processed", full)
            async with asyncio.timeout(10):
                await write.send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="ping")))
                async for _ in read:
                    pass  # until it ends
        assert isinstance(connection.error, UsageError)
