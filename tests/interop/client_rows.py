"""Clients that people have, unchanged, against a server behind Gapless."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.interop.installed import Packages, chromium, npm, python
from tests.interop.processes import PORT, Cut, Ended, gapless, run, serving, through

__all__ = ["CLIENTS", "STEPS", "Client", "try_client"]

STEPS: Final[tuple[str, ...]] = ("initialize", "list", "progress", "question", "cancellation", "resume")

_PROGRAMS: Final = Path(__file__).parent / "clients"
_DESK: Final = gapless("tests.interop.desk_server:server")
_WITH_A_PAGE: Final = (sys.executable, "-m", "uvicorn", "--port", PORT, "tests.interop.browser_app:app")
_PATIENCE: Final = 120.0
"""Seconds that all the steps of one client may take together."""

_FOUND: Final = re.compile(r'<pre id="found">(.+?)</pre>')

_LATER: Final = b'"step 5"'
"""Passes in the middle of the call that is to be cut, and in no other."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client: what to install, and its program in `clients`; the Inspector is a program itself.

    A browser's program is a page, and comes from where the server is.
    """

    title: str
    install: Callable[[], Packages]
    program: str = ""


CLIENTS: Final = (
    Client("Python SDK 1", lambda: python("python-1", "mcp==1.30.*"), "mcp_1.py"),
    Client("Python SDK 2", lambda: python("python-2", "mcp==2.3.*"), "mcp_2.py"),
    Client("TypeScript SDK 1", lambda: npm("typescript", "@modelcontextprotocol/sdk@1"), "typescript.mjs"),
    Client("FastMCP 4", lambda: python("fastmcp", "fastmcp==4.*"), "fastmcp_4.py"),
    Client("Chromium", chromium, "browser.html"),
    Client("MCP Inspector CLI", lambda: npm("inspector", "@modelcontextprotocol/inspector")),
)


async def try_client(client: Client) -> tuple[dict[str, str], dict[str, str]]:
    """What was installed, and how each step went: `ok`, what was wrong, or nothing if it cannot do that."""
    installed = client.install()
    if not client.program:
        return installed.versions, await _inspect(installed)
    if client.program.endswith(".html"):
        return installed.versions, await _browse(installed)
    program = _PROGRAMS / client.program
    if program.suffix == ".mjs":  # node looks for packages beside the program
        program = Path(shutil.copy(program, installed.folder))
    async with serving(_DESK) as url, through(url) as cut:
        cut.aim(_LATER)
        ended = await run([installed.program, str(program), cut.url], _PATIENCE)
    return installed.versions, _steps(ended.stdout, ended, cut)


async def _browse(installed: Packages) -> dict[str, str]:
    """A page makes all steps: with the browser's `EventSource`, through the door, with its `WebSocket`."""
    with tempfile.TemporaryDirectory() as profile:
        words = [installed.program, "--headless", "--no-sandbox", f"--user-data-dir={profile}", "--dump-dom"]
        async with serving(_WITH_A_PAGE) as url, through(url) as cut:
            cut.aim(_LATER)
            ended = await run([*words, cut.url.removesuffix("/mcp")], _PATIENCE)
    found = _FOUND.search(ended.stdout)
    return _steps(html.unescape(found[1]) if found else "", ended, cut)


async def _inspect(installed: Packages) -> dict[str, str]:
    """The Inspector's command makes one request. It asks for no progress, and answers and cancels nothing."""
    command = [*installed.script("@modelcontextprotocol/inspector"), "--cli"]
    call = ["--method", "tools/call", "--tool-name", "climb", "--tool-arg", "steps=3", "delay=0.05"]
    # It starts a `node` of its own, by name.
    node = {"PATH": os.pathsep.join([f"{installed.folder}/node_modules/.bin", os.environ["PATH"]])}
    async with serving(_DESK) as url, through(url) as cut:
        words = [*command, cut.url, "--transport", "http"]
        listed = await run([*words, "--method", "tools/list"], _PATIENCE, env=node)
        cut.aim(b"climbed 3 steps")
        called = await run([*words, *call], _PATIENCE, env=node)
    found = listed.status == 0 and '"climb"' in listed.stdout
    ended = called.status == 0 and "climbed 3 steps" in called.stdout
    steps = {
        "initialize": "ok" if found else listed.stderr[-200:],
        "list": "ok" if found else "climb is not listed",
        "resume": "ok" if ended else called.stderr[-200:],
    }
    return _resumed(steps, cut)


def _steps(told: str, ended: Ended, cut: Cut) -> dict[str, str]:
    """The steps as a program tells them."""
    try:
        return _resumed(json.loads(told), cut)
    except ValueError:
        return dict.fromkeys(STEPS, f"it ended with status {ended.status}: {ended.stderr[-400:]}")


def _resumed(steps: dict[str, str], cut: Cut) -> dict[str, str]:
    if steps.get("resume") == "ok" and not (cut.struck and cut.resumed):
        return {**steps, "resume": "it was not cut" if not cut.struck else "it did not say where it was"}
    return steps
