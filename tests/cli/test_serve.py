"""`gapless serve`: what it serves, what it refuses to, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from gapless.protocol.settings import Limits
from tests.cli.harness import LADDER, Run, Serve, Start

IN_PROCESS = ["examples.ladder_server:server"]
ANY = ["--", sys.executable]
"""What can be served as long as nobody calls it."""
STDIO = ["--", sys.executable, str(LADDER)]
FLAGS = [field.name for field in fields(Limits) if field.name not in ("retry", "on_backend_loss")]
STOPS_WITHIN = 5.0
"""Seconds that the command promises to end in."""


def opened(url: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """POST a session; the status and the body."""
    request = Request(f"{url}/session", data=b"", headers=headers, method="POST")
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


@pytest.mark.parametrize(
    ("target", "name", "number"),
    [(STDIO, "python", signal.SIGTERM), (IN_PROCESS, IN_PROCESS[0], signal.SIGINT)],
    ids=["stdio, SIGTERM", "in process, SIGINT"],
)
def test_it_says_what_it_serves_and_stops_cleanly_while_a_call_streams(
    serve: Serve, start: Start, tmp_path: Path, target: list[str], name: str, number: signal.Signals
) -> None:
    log = f"sqlite:///{tmp_path}/log.db"
    serving = serve("--log", log, *target)
    first = serving.err.splitlines()[0]
    assert name in first
    assert f" is served at {serving.url}, log {log}, durability fsync; Ctrl-C stops it" in first
    assert str(LADDER) not in first  # arguments may hold secrets

    start("call", serving.url, "climb", '{"steps": 100000, "delay": 0.01}').says("step 5")
    asked = time.monotonic()
    serving.process.send_signal(number)
    assert serving.ends() == 0, serving.err
    assert time.monotonic() - asked < STOPS_WITHIN
    assert "gapless: " not in serving.err.partition("Ctrl-C stops it")[2], serving.err


STUBBORN = """
import sys, threading
from mcp.server import MCPServer
server = MCPServer("stubborn")

@server.tool()
def hang() -> str:
    "Never return."
    print("hanging", file=sys.stderr, flush=True)
    threading.Event().wait()
    return "never"
"""


def test_a_thread_that_nobody_can_stop_does_not_hold_up_the_end(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    serving = serve("--log", "memory:", "stubborn:server", cwd=tmp_path)
    start("call", serving.url, "hang")
    serving.says("hanging")
    asked = time.monotonic()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.ends() == 0
    assert time.monotonic() - asked < STOPS_WITHIN
    assert "left behind" in serving.err


def test_a_second_signal_ends_it_at_once(serve: Serve, start: Start, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    serving = serve("--log", "memory:", "stubborn:server", cwd=tmp_path)
    start("call", serving.url, "hang")
    serving.says("hanging")
    serving.process.send_signal(signal.SIGINT)
    serving.says("a closed session's handler still runs")  # else two signals may be one
    serving.process.send_signal(signal.SIGINT)
    assert serving.ends() == 128 + signal.SIGINT
    assert "left behind" not in serving.err


def test_a_port_in_use_is_one_line_with_a_way_out(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", "--log", "memory:", "--port", port, *ANY)
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert f"port {port} of 127.0.0.1 is in use" in done.err
    assert "--port" in done.err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "gapless serve -- CMD ARGS"),
        (["--", "no-such-program"], "there is no program 'no-such-program'"),
        (["examples/ladder_server.py"], "gapless serve -- python examples/ladder_server.py"),
        (["no_such_module:server"], "no module named 'no_such_module'"),
        (["examples.ladder_server:servant"], "has no attribute 'servant'"),
        (["examples.ladder_server:asyncio"], "module is no MCP server"),
        (["--log", "postgres://x", *ANY], "names no log (accepted: memory:, sqlite:"),
        (["--path", "mcp", *ANY], "--path /mcp"),
        (["--host", "nosuch.invalid", *ANY], "there is no such host"),
        (["http://127.0.0.1/mcp"], "gapless serve --upstream http://127.0.0.1/mcp"),
        (["--upstream", "http://127.0.0.1/mcp", *ANY], "both --upstream and another server are given"),
        (["--upstream", "127.0.0.1/mcp"], "write https://host/mcp"),
        (["--upstream", "http://u:p@127.0.0.1/mcp"], "with a user or password in it"),
        (["--upstream-header", "A: b", *ANY], "--upstream-header without --upstream"),
        (
            ["--upstream", "http://127.0.0.1/mcp", "--upstream-header", "A: ${NO_SUCH_SECRET}"],
            "set NO_SUCH_SECRET",
        ),
        (["--upstream", "http://127.0.0.1/mcp", "--upstream-header", "Host: b"], "Host is not yours to set"),
    ],
)
def test_misuse_is_one_line_that_says_what_to_do(run: Run, args: list[str], told: str) -> None:
    done = run("serve", "--port", "0", *args)
    assert done.status == 2, done.err
    assert done.err.count("\n") == 1
    assert told in done.err


@pytest.mark.parametrize("value", ["0", "inf", "nan"])
def test_a_timer_that_is_no_time_is_refused(run: Run, value: str) -> None:
    done = run("serve", "--keepalive", value, *ANY)
    assert done.status == 2
    assert "--keepalive" in done.err


def test_a_module_that_fails_to_import_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    done = run("serve", "broken:server", cwd=tmp_path)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert "broken:server cannot be imported: ZeroDivisionError" in done.err


def test_a_log_that_cannot_be_opened_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("not a database, however long one looks at it\n" * 50)
    done = run("serve", "--port", "0", "--log", f"sqlite:///{tmp_path}/notes.db", *ANY)
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert "notes.db" in done.err


def test_every_setting_is_a_flag_with_its_default_and_unit(run: Run) -> None:
    shown = " ".join(run("serve", "--help").out.replace("│", " ").split())
    defaults = {field.name: field.default for field in fields(Limits)}
    for name in FLAGS:
        unit = "seconds" if isinstance(defaults[name], float) else r"\w+"
        pattern = rf"--{name.replace('_', '-')} +<{unit}> [^<]*\[default: {defaults[name]:.10g}[ \]]"
        assert re.search(pattern, shown), name
    for flag in (
        "--allowed-host",
        "--allowed-origin",
        "--on-backend-loss",
        "--host",
        "--port",
        "--path",
        "--log",
        "--upstream",
        "--upstream-header",
    ):
        assert f" {flag} " in shown


def test_limits_and_names_reach_the_server(serve: Serve) -> None:
    serving = serve(
        *("--log", "memory:", "--keepalive", "3.5", "--max-message-bytes", "1000", "--retain-events", "7"),
        *("--allowed-host", "Gapless.Example", "--allowed-host", "127.0.0.1", *ANY),
    )
    status, body = opened(serving.url)
    assert status == 201
    assert body["durability"] == "memory"
    assert body["timers"]["keepalive"] == 3.5
    assert (body["limits"]["message"], body["limits"]["retain_events"]) == (1000, 7)
    assert opened(serving.url, Host="gapless.example")[0] == 201
    assert opened(serving.url, Host="evil.example")[0] == 421


def test_an_upstream_server_gets_the_headers_with_secrets_of_the_environment_and_none_is_shown(
    serve: Serve, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"], self.headers["X-Price"]))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    asked: list[tuple[str, str | None, str | None]] = []
    monkeypatch.setenv("TOKEN", "open sesame")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{upstream.server_port}/mcp"
        headers = ["Authorization: Bearer ${TOKEN}", "X-Price: 5 $$"]
        serving = serve(
            *("--log", "memory:", "--upstream", f"{base}?key=mellon"),
            *(word for header in headers for word in ("--upstream-header", header)),
        )
        assert f"127.0.0.1:{upstream.server_port}/mcp is served at {serving.url}, log" in serving.err
        calling = start("call", serving.url, "climb")
        assert calling.ends() != 0
        assert f"the MCP server at {base} answered 403 Forbidden" in calling.err
        assert "--upstream-header" in calling.err
        serving.process.send_signal(signal.SIGTERM)
        assert serving.ends() == 0
        upstream.shutdown()
    assert asked[0] == ("/mcp?key=mellon", "Bearer open sesame", "5 $")
    assert "sesame" not in serving.err + calling.err
    assert "mellon" not in serving.err + calling.err


def test_on_every_network_it_says_who_is_answered(serve: Serve) -> None:
    serving = serve("--log", "memory:", "--host", "0.0.0.0", "--allow-anonymous", *ANY)
    assert "--allowed-host" in serving.says("only requests to localhost are answered")
