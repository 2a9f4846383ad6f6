"""Clients that people have, unchanged, against a server behind Gapless."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.interop.installed import Packages, npm, python
from tests.interop.processes import gapless, run, serving, through

__all__ = ["CLIENTS", "STEPS", "Client", "try_client"]

STEPS: Final = ("initialize", "list", "progress", "question", "cancellation", "resume")

_PROGRAMS: Final = Path(__file__).parent / "clients"
_SERVED: Final = gapless("tests.interop.desk_server:server")
_PATIENCE: Final = 120.0
"""Seconds that all the steps of one client may take together."""

_LATER: Final = b'"step 5"'
"""Passes in the middle of the call that is to be cut, and in no other."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client: what to install, and its program in `clients`; the Inspector is a program itself."""

    title: str
    install: Callable[[], Packages]
    program: str = ""


CLIENTS: Final = (
    Client("Python SDK 1", lambda: python("python-1", "mcp==1.30.*"), "mcp_1.py"),
    Client("Python SDK 2", lambda: python("python-2", "mcp==2.3.*"), "mcp_2.py"),
    Client("TypeScript SDK 1", lambda: npm("typescript", "@modelcontextprotocol/sdk@1"), "typescript.mjs"),
    Client("FastMCP 4", lambda: python("fastmcp", "fastmcp==4.*"), "fastmcp_4.py"),
    Client("MCP Inspector CLI", lambda: npm("inspector", "@modelcontextprotocol/inspector")),
)


async def try_client(client: Client) -> tuple[dict[str, str], dict[str, str]]:
    """What was installed, and how each step went: `ok`, what was wrong, or nothing if it cannot do that."""
    installed = client.install()
    if not client.program:
        return installed.versions, await _inspect(installed)
    program = _PROGRAMS / client.program
    if program.suffix == ".mjs":  # node looks for packages beside the program
        program = Path(shutil.copy(program, installed.folder))
    async with serving(_SERVED) as url, through(url) as cut:
        cut.aim(_LATER)
        ended = await run([installed.program, str(program), cut.url], _PATIENCE)
        try:
            steps: dict[str, str] = json.loads(ended.stdout)
        except ValueError:
            told = f"it ended with status {ended.status}: {ended.stderr[-400:]}"
            return installed.versions, dict.fromkeys(STEPS, told)
    return installed.versions, _resumed(steps, cut.struck, cut.resumed)


async def _inspect(installed: Packages) -> dict[str, str]:
    """The Inspector's command makes one request. It asks for no progress, and answers and cancels nothing."""
    command = [*installed.script("@modelcontextprotocol/inspector"), "--cli"]
    call = ["--method", "tools/call", "--tool-name", "climb", "--tool-arg", "steps=3", "delay=0.05"]
    # It starts a `node` of its own, by name.
    node = {"PATH": os.pathsep.join([f"{installed.folder}/node_modules/.bin", os.environ["PATH"]])}
    async with serving(_SERVED) as url, through(url) as cut:
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
    return _resumed(steps, cut.struck, cut.resumed)


def _resumed(steps: dict[str, str], struck: bool, resumed: bool) -> dict[str, str]:
    if steps.get("resume") == "ok" and not (struck and resumed):
        return {**steps, "resume": "it was not cut" if not struck else "it did not say where it was"}
    return steps
