"""`gapless sessions`: what a log knows, and how to end a session that somebody serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gapless.log.base import SessionKey
from gapless.log.sqlite import SqliteLog
from gapless.protocol.cursor import Link
from gapless.protocol.record import write_record
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits
from tests.cli.harness import Run, Serve, Start

KEYS = [SessionKey(bytes.fromhex(start).ljust(32, b"\7")) for start in ("3f9a", "3f9b", "c0de")]


async def fill(path: Path) -> None:
    """A log with a session under each of `KEYS`, none of them served by anybody."""
    log, link = SqliteLog(path), Link(b"linklink")
    await log.start()
    for key in KEYS:
        session = Session(View.SESSION, link, Limits(), "fsync", 0.0)
        session.door.ticket = "the-ticket"
        await log.create(key, write_record(session, "anonymous", None), link)
    await log.close()


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.db"
    asyncio.run(fill(path))
    return f"sqlite:///{path}"


def test_sessions_are_listed_by_their_hashes(run: Run, log: str) -> None:
    done = run("sessions", "list", "--log", log)
    assert (done.status, done.err) == (0, "")
    head, *rows = done.out.splitlines()
    assert head.split() == ["session", "view", "state", "committed", "floor", "received", "open", "age"]
    assert [row.split()[:7] for row in rows] == [
        [key.hex()[:8], "session", "sse_active", "0", "0", "0", "0"] for key in KEYS
    ]


def test_as_json_a_session_has_all_its_hash(run: Run, log: str) -> None:
    found = json.loads(run("sessions", "list", "--log", log, "--json").out)
    assert [one["session"] for one in found] == [key.hex() for key in KEYS]
    assert {one["durability"] for one in found} == {"fsync"}
    assert all(one["ended"] is None and one["age"] >= one["idle"] >= 0 for one in found)


def test_a_session_is_shown_without_its_secrets(run: Run, log: str) -> None:
    plain, as_json = (run("sessions", "show", "c0", "--log", log, *more) for more in ([], ["--json"]))
    assert KEYS[2].hex() in plain.out
    assert json.loads(as_json.out)["session"] == KEYS[2].hex()
    assert json.loads(as_json.out)["retained"] is None
    for done in (plain, as_json):
        assert done.status == 0
        assert "the-ticket" not in done.out


def test_a_session_that_nobody_serves_is_ended_in_the_log(run: Run, log: str) -> None:
    done = run("sessions", "end", "c0de", "--log", log)
    assert (done.status, done.err) == (0, f"gapless: session {KEYS[2].hex()[:8]} is ended\n")
    shown = json.loads(run("sessions", "show", "c0de", "--log", log, "--json").out)
    assert (shown["state"], shown["ended"], shown["committed"]) == ("terminated", "session-ended", 1)
    again = run("sessions", "end", "c0de", "--log", log)
    assert (again.status, "had ended before: session-ended" in again.err) == (0, True)


@pytest.mark.parametrize(
    ("args", "told"),
    [(["show", "beef"], "there is no session beef"), (["end", "3f9"], "2 sessions begin with 3f9")],
    ids=["unknown", "ambiguous"],
)
def test_a_hash_that_names_no_one_session_is_one_line(run: Run, log: str, args: list[str], told: str) -> None:
    done = run("sessions", *args, "--log", log)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert told in done.err


def test_looking_for_a_log_does_not_make_one(run: Run, tmp_path: Path) -> None:
    done = run("sessions", "list", cwd=tmp_path)
    assert done.status == 1
    assert "there is no log gapless.db" in done.err
    assert list(tmp_path.iterdir()) == []
    assert run("sessions", "list", "--log", "memory:").status == 2


def test_ending_a_session_tells_the_client_that_is_in_it(
    run: Run, start: Start, serve: Serve, tmp_path: Path
) -> None:
    log = f"sqlite:///{tmp_path}/log.db"
    serving = serve("--log", log, "examples.ladder_server:server")
    calling = start("call", serving.url, "climb", '{"steps": 100000, "delay": 0.01}')
    calling.says("step 5")

    (found,) = json.loads(run("sessions", "list", "--log", log, "--json").out)
    assert (found["state"], found["open"], found["ended"]) == ("websocket_bound", 1, None)
    assert found["committed"] >= 5

    assert run("sessions", "end", found["session"][:6], "--log", log).status == 0
    assert calling.ends() == 1
    assert "gapless: the session is over" in calling.err.splitlines()[-1]

    (ended,) = json.loads(run("sessions", "list", "--log", log, "--json").out)
    assert (ended["state"], ended["open"], ended["ended"]) == ("terminated", 0, "session-ended")
    again = run("call", serving.url, "climb", '{"steps": 1, "delay": 0}')
    assert (again.status, again.out) == (0, "climbed 1 steps\n")
