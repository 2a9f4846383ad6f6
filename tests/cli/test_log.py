"""`gapless log`: what it says of a log, whole or not, what it prints of it, and what it spares."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from gapless.log.snapshot import snapshot
from gapless.protocol.record import read_record
from tests.cli.harness import AtTerminal, Done, Run, Running, Serve, Serving, Start, environment
from tests.torture.logged import TOKEN, Written, damage, write_log


async def fill(session: Written) -> None:
    """Six events, three messages, all settled, and the end."""
    await session.ask(1, 2)
    await session.note(3)
    await session.answer(1, 2)
    await session.end()


async def knock(session: Written) -> None:
    """A ticket, a token in a URL, a placeholder, and a message on two lines."""
    await session.upgrade("the-nonce", steps=2, bind=False)
    await session.send(b"", b'{"jsonrpc": "2.0",\n"method": "n"}')


async def grow(session: Written) -> None:
    for _ in range(10):
        await session.note(2, size=20_000)
    await session.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.db", fill, knock)


def url(path: Path) -> str:
    return f"sqlite:///{path}"


def table(done: Done) -> list[list[str]]:
    """The rows of what was printed, each by its session, where, and what."""
    head, *rows = done.out.splitlines()
    assert head.split("  ")[0] == "session"
    at = [head.index(name) for name in ("session", "where", "what")]
    return [[row[at[0] : at[1]].strip(), row[at[1] : at[2]].strip(), row[at[2] :]] for row in rows]


def hashes(path: Path) -> list[str]:
    with snapshot(path) as log:
        return [key.hex() for (key,) in log.rows("SELECT key FROM session ORDER BY id")]


# check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--quick"]])
def test_a_log_that_is_whole_is_one_line_and_status_0(run: Run, tmp_path: Path, more: list[str]) -> None:
    path = write_log(tmp_path / "log.db", fill, fill)
    before = path.read_bytes()
    done = run("log", "check", url(path), *more)
    assert (done.status, done.out) == (0, "")
    size = f"{len(before) / 1024:.4g} KiB"
    assert done.err == f"gapless: whole: 2 sessions, 12 events, 4 messages, {size}\n"
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["log.db"])


def test_what_is_no_damage_is_a_note_and_status_0(run: Run, path: Path) -> None:
    done = run("log", "check", url(path))
    note = [hashes(path)[1][:8], "message 2", "a note: not the text that its digest is of"]
    assert (done.status, table(done)) == (0, [note])
    assert done.err.startswith("gapless: whole: 2 sessions, 7 events, 4 messages, ")

    told = json.loads(run("log", "check", url(path), "--json").out)
    assert (told["whole"], told["sessions"], told["events"], told["messages"]) == (True, 2, 7, 4)
    (finding,) = told["findings"]
    assert (finding["session"], finding["damage"]) == (hashes(path)[1], False)


def test_each_thing_that_is_wrong_is_a_row_and_status_1(run: Run, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", *[fill] * 6)
    names = [name[:8] for name in hashes(path)]
    damage(path, "DELETE FROM segment WHERE session = 1 AND first = 4")
    damage(path, "UPDATE session SET record = x'00' WHERE id = 2")
    damage(path, "UPDATE session SET dispatched = 3 WHERE id = 3")
    damage(path, "UPDATE segment SET first = 2 WHERE session = 4 AND first = 1")
    damage(path, "DELETE FROM inbox WHERE session IN (2, 5) AND number = 2")
    damage(path, "DELETE FROM session WHERE id = 6")
    damage(path, "INSERT INTO owner (address, losses) VALUES ('', -1)")
    text = "UPDATE segment SET data = CAST(replace(CAST(data AS TEXT), '\"n\": 2', '\"n\": 7') AS BLOB)"
    damage(path, f"{text} WHERE session = 4")
    damage(path, f"{text} WHERE session = 5")

    done = run("log", "check", url(path))
    assert done.status == 1
    assert done.err == "gapless: damaged: 10 findings in 5 of 5 sessions\n"
    assert table(done) == [
        ["-", "table segment", "rows of session 6, which is not there (3)"],
        ["-", "table inbox", "rows of session 6, which is not there (2)"],
        ["-", "owner 1", "has numbers that cannot be"],
        [names[0], "events 4 to 5", "missing from the log"],
        [names[1], "-", "the session's record is unreadable"],
        [names[1], "message 2", "missing from the inbox"],
        [names[2], "message 3", "noted as dispatched, and not as received"],
        [names[3], "event 2", "not what the link says"],
        [names[4], "event 2", "not what the link says"],
        [names[4], "message 2", "missing from the inbox"],
    ]

    quick = run("log", "check", url(path), "--quick")  # which reads no event, and goes by the segments' rows
    assert [row for row in table(quick) if row[0] in names] == [
        [names[0], "events 4 to 5", "in no segment"],
        [names[1], "-", "the session's record is unreadable"],
        [names[1], "message 2", "missing from the inbox"],
        [names[2], "message 3", "noted as dispatched, and not as received"],
        [names[3], "event 1", "in no segment"],
        [names[4], "message 2", "missing from the inbox"],
    ]


def test_a_session_that_cannot_be_read_does_not_hide_the_others(run: Run, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", grow, fill)
    names = [name[:8] for name in hashes(path)]
    damage(path, "UPDATE session SET dispatched = 9 WHERE id = 2")
    data = bytearray(path.read_bytes())
    pages = [at for at in range(0, len(data), 4096) if data[at : at + 4096].count(b"x") > 4000]
    for page in pages:
        data[page : page + 4] = b"\xff\xff\xff\xff"  # the next page of a value that needs several
    path.write_bytes(data)
    done = run("log", "check", url(path))
    assert done.status == 1
    assert [row[0] for row in table(done) if row[0] != "-"] == names
    assert [names[0], "-", "cannot be read: database disk image is malformed"] in table(done)
    assert any(row[:2] == ["-", "the file"] for row in table(done))


@pytest.mark.parametrize("name", ["session", "inbox_order"])
def test_what_stops_one_check_does_not_stop_the_next(run: Run, path: Path, name: str) -> None:
    with snapshot(path) as log:
        ((page,),) = log.rows("SELECT rootpage FROM sqlite_schema WHERE name = ?", name)
    names = [hash[:8] for hash in hashes(path)]
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096] ^= 0xFF
    path.write_bytes(data)
    done = run("log", "check", url(path))
    assert done.status == 1
    unreadable = [row[:2] for row in table(done) if row[2].startswith("cannot be read: ")]
    of = [["-", "the sessions"]] if name == "session" else [[name, "-"] for name in names]
    assert unreadable == [["-", "the file"], *of]


def clip(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def mark(path: Path, pragma: str) -> None:
    db = apsw.Connection(str(path))
    db.execute(f"PRAGMA {pragma}")
    db.close()


@pytest.mark.parametrize(
    ("harm", "status", "told"),
    [
        (clip, 1, "is truncated: it has "),
        (lambda path: path.write_bytes(b"no database" * 100), 1, "cannot be read: file is not a database"),
        (lambda path: mark(path, "user_version = 99"), 2, "is a log of version 99; this Gapless reads"),
        (lambda path: mark(path, "application_id = 7"), 2, "is no log of Gapless"),
    ],
    ids=["truncated", "no database", "newer", "another program's"],
)
def test_what_cannot_be_looked_at_is_one_line(
    run: Run, path: Path, harm: Callable[[Path], Any], status: int, told: str
) -> None:
    harm(path)
    done = run("log", "check", url(path))
    assert (done.status, done.out, done.err.count("\n")) == (status, "", 1), done.err
    assert told in done.err


def test_what_names_no_log_is_misuse_and_makes_no_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    asked = [
        (["check"], "there is no log gapless.db"),
        (["check", "memory:"], "a memory log cannot be looked into"),
        (["check", "a.db"], "a.db is a file, and a log is named by its URL (write sqlite:///a.db)"),
        (["check", "https://a"], "'https://a' names no log"),
    ]
    for args, told in asked:
        done = run("log", *args, cwd=tmp_path)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert told in done.err
    assert os.listdir(tmp_path) == ["a.db"]


def test_progress_is_shown_on_a_terminal(terminal: AtTerminal, path: Path) -> None:
    checking = terminal("log", "check", url(path))
    checking.reads("whole:")
    assert "the sessions" in checking.seen
    assert checking.ends() == 0


@pytest.fixture
def busy(start: Start, serve: Serve, tmp_path: Path) -> tuple[str, Serving, Running]:
    """A log, whose server is in the middle of a call, and the call."""
    log = url(tmp_path / "log.db")
    serving = serve("--log", log, "examples.ladder_server:server")
    calling = start("call", serving.url, "climb", '{"steps": 100000, "delay": 0.005}')
    calling.says("step 5")
    return log, serving, calling


def test_a_log_is_looked_at_beside_its_server_and_not_compacted(
    run: Run, busy: tuple[str, Serving, Running], tmp_path: Path
) -> None:
    log, _, calling = busy
    beside = sorted(os.listdir(tmp_path))
    done = run("log", "check", log)
    assert (done.status, done.out) == (0, "")
    assert "whole: 1 session, " in done.err
    assert len(run("log", "export", log).out.splitlines()) > 5
    refused = run("log", "compact", log)
    assert (refused.status, refused.out) == (2, "")
    told = f"the log {tmp_path / 'log.db'} is in use (stop the server, or whatever reads it)"
    assert refused.err == f"gapless: {told}\n"
    assert sorted(os.listdir(tmp_path)) == beside
    calling.says("step 100")  # nobody noticed


def test_what_a_killed_server_leaves_is_whole_and_can_be_compacted(
    run: Run, busy: tuple[str, Serving, Running], tmp_path: Path
) -> None:
    log, serving, _ = busy
    serving.process.kill()
    assert serving.ends() == -signal.SIGKILL
    beside = sorted(os.listdir(tmp_path))
    assert {"log.db-wal", "log.db-shm"} <= {*beside}
    done = run("log", "check", log)
    assert (done.status, done.out) == (0, "")
    assert "whole: 1 session, " in done.err
    assert sorted(os.listdir(tmp_path)) == beside
    compacted = run("log", "compact", log)
    assert compacted.status == 0, compacted.err
    assert not {"log.db-wal", "log.db-shm"} & {*os.listdir(tmp_path)}


# export ----------------------------------------------------------------------------------------------


def test_an_export_is_all_there_is_in_order_and_no_secret(run: Run, path: Path) -> None:
    done = run("log", "export", url(path))
    assert (done.status, done.err) == (0, "")
    lines = [json.loads(line) for line in done.out.splitlines()]
    first, second = hashes(path)
    shown = json.loads(run("sessions", "show", first, "--log", url(path), "--json").out)
    moving = ("age", "idle")
    assert {k: v for k, v in lines[0].items() if k not in moving} == {
        k: v for k, v in shown.items() if k not in moving
    }
    assert [line["session"] for line in lines] == [first] * 9 + [second] * 4
    assert [line["seq"] for line in lines if "seq" in line] == [1, 2, 3, 4, 5, 6, 1]
    assert [line["number"] for line in lines if "number" in line] == [1, 2, 1, 2]
    assert lines[1].keys() == {"session", "seq", "stream", "event", "link", "data"}
    assert (lines[1]["stream"], lines[1]["event"], lines[1]["data"]["method"]) == (0, "message", "n")
    assert lines[7].keys() == {"session", "number", "digest", "data"}
    assert lines[7]["data"] == {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}
    assert [line["data"] for line in lines[-2:]] == [None, {"jsonrpc": "2.0", "method": "n"}]
    assert lines[-3]["event"] == "upgrade-accepted"
    assert lines[-3]["data"] == {"negotiation": "the-nonce", "ticket": "redacted", "url": "redacted"}
    assert "ticket-the-nonce" not in done.out
    assert TOKEN not in done.out

    one = run("log", "export", url(path), "--session", second[:5].upper())
    assert {json.loads(line)["session"] for line in one.out.splitlines()} == {second}
    none = run("log", "export", url(path), "--session", "beef")
    assert (none.status, none.out) == (2, "")
    assert "there is no session beef" in none.err


def test_what_is_no_json_is_exported_as_text_and_what_is_no_one_line_on_one(run: Run, path: Path) -> None:
    damage(path, "UPDATE inbox SET data = CAST('{\"no' || x'ff0a' AS BLOB) WHERE session = 1 AND number = 1")
    damage(
        path, "UPDATE inbox SET data = CAST('[1,' || x'0a' || '2]' AS BLOB) WHERE session = 1 AND number = 2"
    )
    lines = [json.loads(line) for line in run("log", "export", url(path)).out.splitlines()]
    assert [line["data"] for line in lines[7:9]] == ['{"no\\xff\n', [1, 2]]


def test_what_is_evicted_and_not_swept_yet_is_not_exported(run: Run, path: Path) -> None:
    damage(path, "UPDATE session SET floor = 2 WHERE id = 1")  # within a segment
    done = run("log", "export", url(path))
    assert (done.status, done.err) == (0, "")
    assert [line["seq"] for line in map(json.loads, done.out.splitlines()) if "seq" in line] == [
        3,
        4,
        5,
        6,
        1,
    ]


def test_an_acceptance_that_cannot_be_read_is_redacted_whole(run: Run, path: Path) -> None:
    damage(
        path,
        "UPDATE segment SET data = CAST(replace(CAST(data AS TEXT), 'data: {', 'data: ') AS BLOB) "
        "WHERE session = 2",
    )
    done = run("log", "export", url(path))
    assert json.loads(done.out.splitlines()[-3])["data"] == "redacted"
    assert "ticket-the-nonce" not in done.out


def test_an_export_into_a_file_is_its_owners_and_replaces_nothing(
    run: Run, path: Path, tmp_path: Path
) -> None:
    into = tmp_path / "log.jsonl"
    done = run("log", "export", url(path), "--out", str(into))
    assert (done.status, done.out, done.err) == (0, "", "")
    assert stat.S_IMODE(into.stat().st_mode) == 0o600
    assert len(into.read_text(encoding="utf-8").splitlines()) == 13
    before = path.read_bytes()
    for there in (into, path):
        again = run("log", "export", url(path), "--out", str(there))
        assert (again.status, again.err) == (1, f"gapless: cannot write {there}: File exists\n")
    assert path.read_bytes() == before
    wrong = tmp_path / "none.jsonl"
    assert run("log", "export", url(path), "--session", "beef", "--out", str(wrong)).status == 2
    assert not wrong.exists()


def test_who_has_read_enough_of_an_export_ends_it_without_a_word(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", grow)  # more than a pipe holds
    command = [sys.executable, "-W", "error", "-m", "gapless", "log", "export", url(path)]
    exporting = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=Path.cwd()
    )
    assert exporting.stdout is not None
    assert exporting.stderr is not None
    assert exporting.stdout.readline().startswith(b'{"session":')
    exporting.stdout.close()
    assert exporting.stderr.read() == b""
    exporting.stderr.close()
    assert exporting.wait(30) == 1


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM segment WHERE session = 1 AND first = 4",
        "DELETE FROM inbox WHERE session = 1 AND number = 1",
        "UPDATE session SET record = x'00' WHERE id = 1",
    ],
)
def test_an_export_that_lacks_something_says_so(run: Run, path: Path, sql: str) -> None:
    damage(path, sql)
    name = hashes(path)[0][:8]
    done = run("log", "export", url(path))
    assert done.status == 1
    assert done.err == f"gapless: not exported whole: {name} (gapless log check says what is wrong)\n"
    assert json.loads(done.out.splitlines()[-1])["number"] == 2  # the rest is there


# compact ---------------------------------------------------------------------------------------------


def test_what_nobody_can_ask_for_any_more_is_removed_and_its_space_given_back(
    run: Run, tmp_path: Path
) -> None:
    path = write_log(tmp_path / "log.db", grow, knock)  # `grow` ended at the beginning of time
    before = path.stat().st_size
    done = run("log", "compact", url(path))
    assert (done.status, done.out) == (0, "")
    after = path.stat().st_size
    told = f"{before / 1024:.4g} KiB before, {after / 1024:.4g} KiB after; 1 session removed"
    assert done.err == f"gapless: {path}: {told}\n"
    assert after < before - 400_000

    again = run("log", "compact", url(path), "--json")
    assert json.loads(again.out) == {"before": after, "after": after, "removed": 0}


def ended(path: Path, at: float) -> None:
    """Let the first session have ended at a time."""
    with snapshot(path) as log:
        ((data,),) = log.rows("SELECT record FROM session WHERE id = 1")
    record = msgspec.structs.replace(read_record(data), ended_at=at)
    damage(path, "UPDATE session SET record = ? WHERE id = 1", msgspec.msgpack.encode(record))


def test_a_session_stays_until_its_time_is_over(run: Run, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.db", fill, fill, knock, knock)
    now = time.time()
    ended(path, now - 900)
    damage(path, "UPDATE session SET updated = ? WHERE id = 3", now - 900)
    damage(path, "UPDATE session SET record = x'00' WHERE id = 2")
    names = hashes(path)

    def left(*options: str) -> list[str]:
        copy = tmp_path / "copy.db"
        shutil.copy(path, copy)
        assert run("log", "compact", url(copy), *options).status == 0
        return hashes(copy)

    assert left() == names  # a record that cannot be read is not judged
    assert left("--tombstone", "850", "--session-expiry", "100") == names[1:]
    assert left("--tombstone", "850", "--session-expiry", "40") == [names[1], names[3]]
    assert left("--tombstone", "950", "--session-expiry", "1") == names
