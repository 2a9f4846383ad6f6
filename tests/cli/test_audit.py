"""`gapless audit`: what it says of a log and a client's receipts, and what it leaves alone."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest

from tests.cli.harness import Run, Serve, Start
from tests.torture.logged import TOKEN, Paper, Written, damage, ids, write_log


async def fill(session: Written) -> None:
    await session.ask(1, 2)
    await session.note(3)
    await session.answer(1, 2)
    await session.end()


async def open_still(session: Written) -> None:
    await session.ask(1)
    await session.note(2)


@pytest.fixture
def log(tmp_path: Path) -> str:
    return f"sqlite:///{write_log(tmp_path / 'log.db', fill, open_still)}"


def receipts(log: str, *, without: int) -> Path:
    """A client's receipts of the first session, less those of one event."""
    path = Path(log.removeprefix("sqlite:///"))
    paper = Paper()
    known = ids(path)
    paper.add(f"session opened {known[0]}")
    paper.take(*(id for seq, id in enumerate(known) if seq not in (0, without)))
    path.with_name("r").write_bytes(paper.text)
    return path.with_name("r")


def test_a_sound_log_is_a_table_and_status_0(run: Run, log: str) -> None:
    done = run("audit", "--log", log)
    assert (done.status, done.err) == (0, "gapless: 2 sessions, no violation\n")
    head, ended, going = done.out.splitlines()
    numbers = ["events", "requests", "open", "receipts", "violations"]
    assert head.split() == ["session", "view", "state", *numbers]
    assert ended.split()[1:] == ["session", "session-ended", "1", "to", "6", "2", "0", "-", "none"]
    assert going.split()[1:] == ["session", "sse_active", "1", "to", "2", "1", "1", "-", "none"]


def test_a_violation_is_named_where_it_is_and_status_1(run: Run, log: str) -> None:
    paper = str(receipts(log, without=2))
    damage(Path(log.removeprefix("sqlite:///")), "DELETE FROM segment WHERE first = 4")
    done = run("audit", "--log", log, "--receipts", paper)
    assert (done.status, done.err) == (1, "gapless: 2 violations in 1 of 2 sessions\n")
    table, _, found = done.out.partition("\n\n")
    assert [row.split()[-1] for row in table.splitlines()] == ["violations", "2", "none"]
    head, *rows = found.splitlines()
    assert head.split() == ["session", "rule", "what", "was", "found"]
    assert [row.split(maxsplit=2)[1:] for row in rows] == [
        ["L1", "events 4 to 5: missing from the log"],
        ["§11.1", "event 2: never processed, after `session opened at 10:00:00.000Z`"],
        ["L7", "messages 1 to 2: settled in what is not there, if at all (2 requests)"],
    ]

    (said,) = json.loads(run("audit", "--log", log, "--session", rows[0][:6], "--json").out)
    assert [violation["kind"] for violation in said["violations"]] == ["events-missing"]
    assert said["requests"]["requests"] == 2


def test_what_cannot_be_audited_is_misuse_and_makes_no_file(run: Run, log: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    asked = [
        (["--log", "sqlite:///none.db"], "there is no log none.db"),
        (["--log", log, "--receipts", log.removeprefix("sqlite:///")], "is no receipts file"),
        (["--log", log, "--session", "beef"], "there is no session beef"),
    ]
    for args, told in asked:
        done = run("audit", *args, cwd=empty)
        assert (done.status, done.out) == (2, ""), args
        assert told in done.err
        assert done.err.count("\n") == 1
    assert list(empty.iterdir()) == []


@pytest.mark.rule("S1", "C4")
def test_a_call_that_was_killed_and_gone_on_with_is_proven_while_it_is_served(
    start: Start, run: Run, serve: Serve, tmp_path: Path
) -> None:
    log, paper = f"sqlite:///{tmp_path}/log.db", tmp_path / "r"
    url = serve("--log", log, "examples.ladder_server:server").url
    kept = ["--state", str(tmp_path / "state"), "--receipts", str(paper)]
    first = start("call", url, "climb", '{"steps": 20, "delay": 0.02}', *kept)
    first.says("step 5")
    first.process.kill()
    assert first.ends() == -signal.SIGKILL
    assert stat.S_IMODE(paper.stat().st_mode) == 0o600

    done = run("call", url, "climb", '{"steps": 3, "delay": 0}', *kept)
    assert (done.status, done.out) == (0, "climbed 3 steps\n"), done.err
    beside = sorted(file.name for file in tmp_path.iterdir())
    audited = run("audit", "--log", log, "--receipts", str(paper), "--json")
    assert audited.status == 0, audited.out
    (said,) = json.loads(audited.out)
    assert said["processed"] > 8
    assert {note["kind"] for note in said["notes"]} <= {"seen-again"}
    assert sorted(file.name for file in tmp_path.iterdir()) == beside
    assert paper.read_text(encoding="ascii").count("session continued") == 1
    assert TOKEN not in audited.out
