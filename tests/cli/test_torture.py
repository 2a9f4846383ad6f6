"""`gapless torture`: what it is aimed at, what it says of it, and with what status."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
import pytest

from gapless.cli import main
from gapless.cli.target import Aim, Mortal, aim, aimed, mortal
from gapless.cli.torture import _Run
from gapless.errors import TargetError
from gapless.torture.experiments import EXPERIMENTS
from gapless.torture.experiments.kill import Kill
from gapless.torture.trial import Trial, Violation
from gapless.torture.trials import Result
from tests.cli.harness import LADDER, Run
from tests.torture.naive import naive_server
from tests.torture.naive_switches import NaiveSwitches

Misuse = Callable[..., str]


@pytest.fixture
def misuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Misuse:
    """Misuse the command, in this process; the one line it says."""

    def misuse(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gapless", "torture", *args])
        with pytest.raises(SystemExit) as raised:
            main()
        said = capsys.readouterr()
        assert (raised.value.code, said.out) == (2, ""), said
        assert said.err.count("\n") == 1, said.err
        return said.err

    return misuse


# Misuse -----------------------------------------------------------------------------------------------------

URL = "http://127.0.0.1:9/mcp"
WAYS = "(gapless torture URL, gapless torture --app module:attr, or gapless torture -- CMD ARGS)"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], f"nothing to torture {WAYS}"),
        (["--app", "server:mcp", URL], f"both --app and another target are given {WAYS}"),
        (
            ["--app", "server:mcp", "--", "python", "server.py"],
            f"both --app and another target are given {WAYS}",
        ),
        ([URL, "http://127.0.0.1:10/mcp"], f"'http://127.0.0.1:10/mcp' follows the URL {WAYS}"),
        (["http://127.0.0.1:x/mcp"], f"'http://127.0.0.1:x/mcp' is no address of a server {WAYS}"),
        (["http://127.0.0.1:99999"], f"'http://127.0.0.1:99999' is no address of a server {WAYS}"),
        (["http://"], f"'http://' is no address of a server {WAYS}"),
        (["http://[::1/mcp"], f"'http://[::1/mcp' is no address of a server {WAYS}"),
        (["https://127.0.0.1/mcp"], "(use the http:// address behind the TLS proxy)"),
        (
            [URL, "-e", "resumes"],
            "no experiment 'resumes' (there are resume, migration, failover, boundary, crowd, storm, kill)",
        ),
        (
            [URL, "-e", "resume", "-e", "kill"],
            "kill: it kills the server, and one that we did not start is not ours to kill (name it by --app",
        ),
        (
            [URL, "--schedule", "12:rest"],
            "'12:rest' is no step of a schedule (write a count of messages, a colon",
        ),
        ([URL], f"no MCP server can be judged at {URL}: initialize at {URL}: "),
    ],
)
def test_misuse_is_one_line_that_says_what_to_do(misuse: Misuse, args: list[str], told: str) -> None:
    assert told in misuse(*args)


def test_misuse_through_the_command_has_status_2_and_no_traceback(run: Run) -> None:
    done = run("torture", "--app", "no_such_module:server", "-e", "resume")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("gapless: gapless serve ended: ")
    assert "no_such_module" in done.err
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1


# Targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "app", "target", "command", "told"),
    [
        ([URL], None, Aim(URL, ()), False, URL),
        ([f"{URL}/"], None, Aim(f"{URL}/", ()), False, f"{URL}/"),
        ([], "server:mcp", Aim(None, ("server:mcp",)), False, "gapless serve server:mcp"),
        (["server"], None, Aim(None, ("--", "server")), True, "gapless serve -- server"),
        (
            ["my server", "-x"],
            None,
            Aim(None, ("--", "my server", "-x")),
            True,
            "gapless serve -- 'my server' -x",
        ),
    ],
)
def test_a_target_is_a_url_an_app_or_a_command(
    words: list[str], app: str | None, target: Aim, command: bool, told: str
) -> None:
    assert aim(words, app) == target
    assert (target.command, str(target)) == (command, told)


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_what_is_served_for_as_long_ends_with_whatever_happens_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gapless.cli.target._STOPPING", 3600)  # it need not be killed
    pids: list[int | None] = []

    async def judged() -> None:
        async with aimed(Aim(None, ("examples.ladder_server:server",)), ("--keepalive", "0.5")) as (url, pid):
            assert url.startswith("http://127.0.0.1:")
            assert not gone(pid)
            pids.append(pid)
            raise TimeoutError("of the experiment's own")

    with pytest.raises(TimeoutError, match="of the experiment's own"):
        await judged()
    assert gone(pids[0])


async def test_sigterm_ends_what_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def served(*_: object) -> AsyncGenerator[tuple[str, int]]:
        try:
            yield URL, 1
        finally:
            ended.set()

    async def discover(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("gapless.cli.target.aimed", served)
    monkeypatch.setattr("gapless.torture.trials.discover", discover)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody else's business, should it not be heard
    try:
        run = _Run(Aim(URL, ()), [EXPERIMENTS["storm"]], True, False, 1, None, 0, None, None, None, False)
        running = asyncio.create_task(run.run())
        await begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 10)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
    assert ended.is_set()


LADDERS = Aim(None, ("examples.ladder_server:server",))


async def test_a_mortal_server_is_at_one_address_and_on_one_log_however_often_it_is_killed() -> None:
    pids: list[int] = []
    async with mortal(LADDERS, ()) as server:
        for _ in range(2):
            await server.start()
            await server.listens()
            assert server._process is not None
            pids.append(server._process.pid)
            assert not gone(pids[-1])
            async with httpx2.AsyncClient(trust_env=False) as client:
                opened = await client.post(f"{server.url}/session")
            assert opened.status_code == 201
            await server.kill()
            assert gone(pids[-1])
        with server.log() as log:
            assert len(await log.sessions()) == 2
        await server.start()
        assert server._process is not None
        pids.append(server._process.pid)
    assert len(set(pids)) == 3
    assert gone(pids[-1])
    assert not server.folder.exists()


async def test_a_mortal_server_whose_port_is_still_taken_is_started_again() -> None:
    async with mortal(LADDERS, ()) as server:
        with socket.create_server(("127.0.0.1", int(server.url.split(":")[2].split("/")[0]))):
            await server.start()
            assert server._process is not None
            await server._process.wait()
        await server.listens()


async def test_a_mortal_server_whose_port_stays_taken_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.cli.target._BINDINGS", 1)
    async with mortal(LADDERS, ()) as server:
        with socket.create_server(("127.0.0.1", int(server.url.split(":")[2].split("/")[0]))):
            await server.start()
            with pytest.raises(TargetError, match="is in use"):
                await server.listens()


async def test_a_server_that_does_not_listen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.cli.target._STARTING", 0.0)
    with pytest.raises(TargetError, match="does not listen"):
        async with aimed(Aim(None, ("examples.ladder_server:server",)), ()):
            pass


async def test_a_url_is_left_as_it_is() -> None:
    async with aimed(Aim(URL, ()), ("--keepalive", "0.5")) as target:
        assert target == (URL, None)


# Verdicts ---------------------------------------------------------------------------------------------------


def test_an_app_is_served_and_judged_and_the_report_is_json(run: Run) -> None:
    target = ["--app", "examples.ladder_server:server"]
    done = run("torture", *target, "-e", "resume", "--trials", "2", "--seed", "3", "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert (told["target"], told["violations"]) == ("gapless serve examples.ladder_server:server", 0)
    (experiment,) = told["experiments"]
    assert (experiment["name"], experiment["trials"], experiment["failures"]) == ("resume", 2, [])
    assert experiment["counts"]["events"] == 120
    assert experiment["counts"]["runs checked"] == 2
    assert "gapless: resume, 2 of 2 trials\n" in done.err
    assert "Traceback" not in done.err


def test_a_command_is_served_and_judged_and_the_report_is_a_table(run: Run) -> None:
    done = run("torture", "-e", "resume", "--trials", "1", "--seed", "4", "--", sys.executable, str(LADDER))
    assert done.status == 0, done.err
    assert done.out.splitlines()[0].split() == ["experiment", "trials", "failed", "violations", "time"]
    assert done.out.splitlines()[1].split()[:4] == ["resume", "1", "0", "none"]
    assert done.out.endswith("\nnothing was lost\n")


def test_a_server_without_a_ladder_is_told_how_to_get_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text('from mcp.server import MCPServer\n\nserver = MCPServer("plain")\n')
    done = run("torture", "--app", "plain:server", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "has no tool called ladder" in done.err
    assert "docs/how-to/test-your-own-server.md" in done.err
    assert "Traceback" not in done.err


@contextmanager
def lossy() -> Iterator[str]:
    """A server that repeats what the client has, in a thread of its own."""
    url: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with naive_server(NaiveSwitches(repeats=True)) as address:
            url.append(address)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert ready.wait(10)
        yield url[0]
    finally:
        over.set()
        thread.join(10)


def test_a_violation_is_status_1_with_a_page_and_a_command_line_that_shows_it_again(
    run: Run, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    with lossy() as url:
        trial = ["-e", "resume", "--trials", "1", "--schedule", "20:reset 59:split"]
        done = run("torture", url, *trial, "--html", str(page))
        assert done.status == 1, done.err
        assert "gapless: resume: 1 failed, 1 of 1 trials\n" in done.err
        assert f"gapless: the page is {page}\n" in done.err
        assert "  repeated: rungs " in done.out
        assert done.out.endswith(" violations\n")
        (again,) = [line.strip() for line in done.out.splitlines() if "again: " in line]
        assert again == f"again: gapless torture -e resume --seed 0 --trials 1 --schedule 20:reset {url}"
        html = page.read_text(encoding="utf-8")
        assert "resume, seed 0" in html
        assert html.count("<svg") == 1

        once_more = run(*shlex.split(again)[2:], "--no-shrink", "--json")
        assert once_more.status == 1, once_more.err
        (experiment,) = json.loads(once_more.out)["experiments"]
        assert set(experiment["violations"]) == {"repeated"}
        (failure,) = experiment["failures"]
        assert (failure["schedule"], failure["shrunk"]) == ("20:reset", None)


def test_where_nothing_can_be_written_the_verdict_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = str(tmp_path / "none" / "page.html")
    trial = ["-e", "resume", "--trials", "1", "--schedule", "", "--html", page]
    with lossy() as url:
        monkeypatch.setattr(sys, "argv", ["gapless", "torture", url, *trial])
        with pytest.raises(SystemExit) as raised:
            main()
    said = capsys.readouterr()
    assert raised.value.code == 2
    assert "nothing was lost" in said.out
    assert f"gapless: cannot write {page}: " in said.err


async def test_a_server_at_a_url_is_not_killed_unless_that_is_asked_for() -> None:
    run = _Run(Aim(URL, ()), [], False, True, 1, None, 0, None, None, None, True)
    results, left_out = await run.run()
    assert (results, list(left_out)) == ([], ["kill"])


@pytest.mark.parametrize("failed", [False, True])
async def test_what_a_server_that_was_killed_leaves_behind_is_kept_if_something_was_lost(
    failed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[int], float | None]] = []
    folders: list[Path] = []

    async def kills(
        self: Kill,
        server: Mortal,
        seeds: Iterator[int],
        *,
        seconds: float | None,
        done: Callable[[Trial], None],
    ) -> Result:
        asked.append((list(seeds), seconds))
        folders.append(server.folder)
        trial, result = Trial("kill", 5, ()), Result(Kill)
        if failed:
            trial.find(Violation.MISSING, "all of it")
        result.add(trial)
        done(trial)
        return result

    monkeypatch.setattr(Kill, "run", kills)
    (result,), left_out = await _Run(LADDERS, [], True, True, 3, 60.0, 5, None, None, None, True).run()
    assert (result.failed, left_out) == (failed, {})
    assert asked == [([5, 6, 7], 60.0)]
    (folder,) = folders
    assert folder.exists() is failed
    assert (f"the journal are kept in {folder}" in capsys.readouterr().err) is failed
    shutil.rmtree(folder, ignore_errors=True)


async def test_a_command_is_spared_a_crowd_unless_that_is_asked_for() -> None:
    command = Aim(None, ("--", "no-such-command"))
    run = _Run(command, [EXPERIMENTS["crowd"]], False, False, 1, None, 0, None, None, None, True)
    results, left_out = await run.run()
    assert (results, list(left_out)) == ([], ["crowd"])
