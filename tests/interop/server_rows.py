"""Servers that people have, unchanged, behind Gapless over stdio."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mcp import Client

import gapless
from tests.interop import processes
from tests.interop.installed import Packages, npm, python
from tests.interop.processes import Cut, serving, through

__all__ = ["SERVERS", "SERVER_STEPS", "Server", "try_server"]

SERVER_STEPS: Final = ("initialize", "list", "call", "resume", "resume, our client")

_PATIENCE: Final = 30.0
"""Seconds that one step may take."""

_NPM: Final = tuple(
    f"@modelcontextprotocol/server-{name}"
    for name in ("everything", "filesystem", "memory", "sequential-thinking")
)
_PYPI: Final = ("mcp-server-time", "mcp-server-git")


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and a call that is made of it. `{here}` stands for a directory with a git repository in it.

    Attributes:
        words: arguments of its command.
        tool, arguments: the call.
        answer: something that its result says.
        middle: what passes to the client while the call is running, or else its result.
    """

    package: str
    tool: str
    answer: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    words: tuple[str, ...] = ()
    middle: bytes = b'"result":'

    def install(self) -> Packages:
        if self.package in _NPM:
            return npm("servers", *_NPM)
        return python("servers-python", *_PYPI)

    def command(self, installed: Packages, here: str) -> list[str]:
        if self.package in _NPM:
            script = installed.script(self.package)
        else:
            script = [installed.program, "-m", self.package.replace("-", "_")]
        return [*script, *(word.replace("{here}", here) for word in self.words)]


SERVERS: Final = (
    Server(
        _NPM[0],
        "trigger-long-running-operation",
        "completed",
        {"duration": 1, "steps": 5},
        middle=b'"notifications/progress"',
    ),
    Server(_NPM[1], "list_directory", "[DIR] .git", {"path": "{here}"}, ("{here}",)),
    Server(
        _NPM[2],
        "read_graph",
        "entities",
    ),
    Server(
        _NPM[3],
        "sequentialthinking",
        "thoughtHistoryLength",
        {"thought": "one rung", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
    ),
    Server(_PYPI[0], "get_current_time", "UTC", {"timezone": "UTC"}),
    Server(_PYPI[1], "git_status", "No commits yet", {"repo_path": "{here}"}),
)


async def try_server(server: Server) -> tuple[str, dict[str, str]]:
    """Its version, and what became of each step: `ok`, or what was wrong."""
    installed = server.install()
    steps: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as here:
        await processes.run(["git", "init", "-q", here], 30)
        memory = {"MEMORY_FILE_PATH": str(Path(here) / "memory.json")}
        command = ["env", *(f"{name}={value}" for name, value in memory.items())]
        served = processes.gapless("--", *command, *server.command(installed, here))
        async with serving(served) as url:
            async with through(url) as cut:
                await _use(server, here, cut, Client(cut.url), "resume", steps)
            async with through(url) as cut:
                ours = Client(gapless.connect(cut.url, upgrade="never"), mode="legacy")
                await _use(server, here, cut, ours, "resume, our client", steps)
    return installed.versions[server.package], steps


async def _use(
    server: Server, here: str, cut: Cut, opened: Client, resume: str, steps: dict[str, str]
) -> None:
    def note(step: str, good: bool, otherwise: str) -> None:
        if not good or step not in steps:
            steps[step] = "ok" if good else otherwise

    arguments = _filled(server.arguments, here)

    async def told(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async def call() -> str:
        result = await client.call_tool(server.tool, arguments, progress_callback=told)
        return " ".join(getattr(block, "text", "") for block in result.content)

    at = "initialize"
    try:
        async with asyncio.timeout(2 * _PATIENCE), opened as client:
            note("initialize", True, "")
            at = "list"
            names = [tool.name for tool in (await client.list_tools()).tools]
            note(at, server.tool in names, f"{server.tool} is not listed")
            for at in ("call", resume):
                if at == resume:
                    cut.aim(server.middle)
                seen: list[float] = []
                answer = await call()
                note(at, server.answer in answer, f"it answered {answer[:200]!r}")
                note(at, seen == sorted(set(seen)), f"it reported {seen}")
            note(resume, cut.struck and cut.resumed, "it was not cut, or the client did not come back")
    except Exception as error:
        note(at, False, f"{type(error).__name__}: {error}")


def _filled(value: Any, here: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, here) for key, inner in value.items()}
    return value.replace("{here}", here) if isinstance(value, str) else value
