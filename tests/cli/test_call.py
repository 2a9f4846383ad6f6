"""`gapless call`: results on stdout, everything else on stderr, and no waiting for ever."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from gapless.torture.faults import Direction, Link
from tests.cli.harness import ROOT, AtTerminal, Run, Serve, Start, environment
from tests.cli.host import World, soon
from tests.real.serving import served

SOON = 15.0
"""Seconds that giving up may take: three to five without progress, and what a busy machine adds."""


def test_without_a_tool_the_tools_are_listed(run: Run, ladder: str) -> None:
    done = run("call", ladder)
    assert (done.status, done.err) == (0, "")
    first, *tools = done.out.splitlines()
    assert first.split() == ["tool", "description"]
    assert [line.split()[0] for line in tools] == ["climb", "ladder", "runs", "grow", "ask"]
    assert tools[0].endswith("Climb, and say so at every step: a step lost or told twice would show.")


def test_the_list_as_json_has_the_schemas(run: Run, ladder: str) -> None:
    tools = json.loads(run("call", ladder, "--json").out)
    assert {tool["name"]: sorted(tool["inputSchema"].get("properties", {})) for tool in tools} == {
        "climb": ["delay", "steps"],
        "ladder": ["delay", "kinds", "pad", "run", "rungs"],
        "runs": ["run"],
        "grow": ["name"],
        "ask": [],
    }


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_progress_goes_to_stderr_and_the_result_to_stdout(run: Run, ladder: str, mode: str) -> None:
    done = run("call", ladder, "climb", '{"steps": 3, "delay": 0}', "--mode", mode)
    assert (done.status, done.out) == (0, "climbed 3 steps\n")
    assert done.err.splitlines() == ["1/3 step 1", "2/3 step 2", "3/3 step 3"]


def test_json_is_the_whole_result_and_who_never_upgrades_stays_on_sse(run: Run, ladder: str) -> None:
    args = ["--json", "--watch", "--upgrade", "never"]
    done = run("call", ladder, "climb", '{"steps": 1, "delay": 0}', *args)
    result = json.loads(done.out)
    assert result["content"] == [{"type": "text", "text": "climbed 1 steps"}]
    assert result["structuredContent"] == {"result": "climbed 1 steps"}
    assert result["isError"] is False
    assert " sse " in done.err
    assert "websocket" not in done.err


def test_watching_shows_the_cursor_cross_the_door(run: Run, ladder: str) -> None:
    done = run("call", ladder, "climb", '{"steps": 8}', "--watch")
    assert (done.status, done.out) == (0, "climbed 8 steps\n")
    seen = re.findall(r"^(.+?)  +(none|sse|websocket) +cursor (\d+)  committed (\d+)", done.err, re.MULTILINE)
    assert ("streaming → knocking", "sse") in [row[:2] for row in seen]
    assert ("bridging → bound", "websocket") in [row[:2] for row in seen]
    cursors = [int(row[2]) for row in seen]
    assert cursors == sorted(cursors)
    assert cursors[-1] >= 8
    assert all(int(cursor) <= int(committed) for _, _, cursor, committed in seen)


def test_a_tool_that_fails_has_its_text_on_stderr(run: Run, ladder: str) -> None:
    done = run("call", ladder, "climb", '{"steps": "many"}')
    assert (done.status, done.out) == (1, "")
    assert "valid integer" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", ["{steps: 3}", "[1]", "3", ""])
def test_arguments_that_are_no_json_object_are_misuse_with_an_example(run: Run, arguments: str) -> None:
    done = run("call", "http://127.0.0.1:9/mcp", "climb", arguments)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert """gapless call URL climb '{"steps": 5}'""" in done.err


def test_an_unreachable_server_is_given_up_soon(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}/mcp"
    done = run("call", url, "climb")
    assert done.status == 1
    assert done.seconds < SOON
    assert done.err.count("\n") == 1
    assert url in done.err
    assert "check that the server is reachable" in done.err


def test_a_server_that_never_answers_is_waited_for_no_longer_than_asked(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        done = run("call", f"http://127.0.0.1:{mute.getsockname()[1]}/mcp", "--timeout", "0.5")
    assert done.status == 1
    assert done.seconds < SOON
    assert done.err == "gapless: no result in 0.5 seconds (--timeout allows more)\n"


def test_another_url_of_the_server_is_told_apart(run: Run, ladder: str) -> None:
    done = run("call", ladder + "-not", "climb")
    assert done.status == 1
    assert "is this the URL of a Gapless server?" in done.err
    assert run("call", "gapless://here").status == 2


def test_a_question_is_declined_where_nobody_can_be_asked(run: Run, ladder: str) -> None:
    done = run("call", ladder, "ask")
    assert (done.status, done.out) == (0, "no ladder\n")
    assert "How high shall the ladder be, in metres?" in done.err
    assert "declined" in done.err


def test_a_question_is_asked_at_the_terminal_until_the_answer_fits(terminal: AtTerminal, ladder: str) -> None:
    asked = terminal("call", ladder, "ask")
    asked.reads("How high shall the ladder be, in metres?")
    asked.types("tall\n")
    asked.reads("'tall' is no integer")
    asked.types("7\n")
    asked.reads("a ladder of 7 m")
    assert asked.ends() == 0


def test_end_of_file_declines_a_question_of_a_server_of_the_older_kind(
    terminal: AtTerminal, ladder: str
) -> None:
    asked = terminal("call", ladder, "ask", "--mode", "legacy")
    asked.reads("Ctrl-D declines")
    asked.types("\x04")
    asked.reads("no ladder")
    assert asked.ends() == 0


def test_on_a_terminal_progress_and_cursor_are_drawn_in_place(terminal: AtTerminal, ladder: str) -> None:
    drawn = terminal("call", ladder, "climb", '{"steps": 30}', "--watch")
    drawn.reads("climbed 30 steps")
    assert drawn.ends() == 0
    assert re.search(r"\d+/30 step \d+", drawn.seen)
    assert "bridging → bound" in drawn.seen
    assert drawn.seen.rstrip().endswith("climbed 30 steps")


def test_an_interrupted_call_leaves_without_a_traceback(start: Start, ladder: str) -> None:
    calling = start("call", ladder, "climb", '{"steps": 1000}')
    calling.says("step 3")
    calling.process.send_signal(signal.SIGINT)
    assert calling.ends() == 130
    assert "Traceback" not in calling.err


@pytest.mark.parametrize(
    ("number", "opened"), [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, False)]
)
@pytest.mark.rule("L7")
async def test_a_signal_ends_the_session_of_a_call_even_if_it_is_only_being_opened(
    number: signal.Signals, opened: bool
) -> None:
    def hold(link: Link) -> None:
        world.asked.append(link.request)
        if link.request == "POST /mcp/session" and not opened:
            link.hold(Direction.TO_CLIENT)
            held.set_result(link)

    held: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    async with served() as (url, _), World.before(url) as world:
        world.proxy.on_request = hold
        command = ["-m", "gapless", "call", world.url, "climb", '{"steps": 1000}', "--watch"]
        calling = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, env=environment(), stderr=asyncio.subprocess.PIPE
        )
        assert calling.stderr is not None
        if opened:
            await soon(calling.stderr.readuntil(b"step 3"))
            calling.send_signal(number)
        else:
            link = await soon(held)
            calling.send_signal(number)
            await soon(calling.stderr.readuntil("→ over".encode()))
            link.release(Direction.TO_CLIENT)
        rest = await soon(calling.stderr.read())
        assert await soon(calling.wait()) == 128 + number
        assert b"Traceback" not in rest
        assert world.deleted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_call_is_gone_on_with_from_its_state_file(
    start: Start, run: Run, serve: Serve, tmp_path: Path, number: signal.Signals
) -> None:
    url = serve("--log", "memory:", "examples.ladder_server:server").url
    state = tmp_path / "state.json"
    first = start("call", url, "climb", '{"steps": 30, "delay": 0.02}', "--state", str(state))
    first.says("step 2")
    first.process.send_signal(number)
    assert first.ends() == -number
    assert stat.S_IMODE(state.stat().st_mode) == 0o600

    done = run("call", url, "climb", '{"steps": 2, "delay": 0.5}', "--state", str(state))
    assert (done.status, done.out) == (0, "climbed 2 steps\n"), done.err
    assert "a call of the process before this one was answered" in done.err
    assert "climbed 30 steps" in done.err
    assert not state.exists()  # the session is over
