"""The official conformance suite: its server scenarios, and its client scenarios."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.interop.installed import Packages, npm
from tests.interop.processes import run

__all__ = ["CLIENT", "SERVER", "Outcome", "Suite", "judge_client", "judge_server", "on_call", "worse"]

_PACKAGE: Final = "@modelcontextprotocol/conformance"
_CALL: Final = Path(__file__).parent / "clients" / "on_call.py"
_PATIENCE: Final = 240.0
"""Seconds that one run of a suite may take; it takes about 20."""
_CLIENT_PATIENCE: Final = 25.0
"""Seconds that our client may take; a suite gives it 30, and would then not get rid of it."""

# One directory a scenario: `server-` if that is what is judged, its name, and the time.
_RESULT: Final = re.compile(r"(?:server-)?(.*)-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-\d{3}Z")


@dataclass(frozen=True, slots=True)
class Suite:
    """One version of the suite, and which of its scenarios are meant."""

    version: str
    options: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.version} `{' '.join(self.options)}`"

    def installed(self) -> Packages:
        return npm(f"suite-{self.version[:3]}", f"{_PACKAGE}@{self.version}")


SERVER: Final = (
    Suite("0.1.16", ("--suite", "all")),
    Suite("0.2.0-alpha.12", ("--suite", "all", "--spec-version", "2025-11-25")),
)
CLIENT: Final = tuple(
    Suite(suite.version, ("--scenario", scenario))
    for suite in SERVER
    for scenario in ("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry")
) + tuple(Suite(suite.version, ("--suite", "auth")) for suite in SERVER)
"""All of `core`: its scenarios that are not about authorization, one by one, and those that are."""

Scripted = Callable[[str, str, dict[str, Any]], Awaitable[None]]
"""A client: it gets the URL to connect to, the scenario, and what the suite tells it beside that."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a suite says.

    Attributes:
        checks: how each check ended, by scenario and name; one that is made several times is numbered.
        complaint: what the suite wrote, if it did not come to an end.
    """

    checks: dict[tuple[str, str], str]
    complaint: str = ""

    def count(self, status: str) -> int:
        return Counter(self.checks.values())[status]

    @property
    def scenarios(self) -> dict[str, Outcome]:
        """The checks of each; what was complained of is not told apart."""
        return {
            name: Outcome({check: how for check, how in self.checks.items() if check[0] == name})
            for name, _ in self.checks
        }

    @property
    def failed(self) -> list[str]:
        """The scenarios in which something failed."""
        return sorted({scenario for (scenario, _), status in self.checks.items() if status == "FAILURE"})

    @property
    def good(self) -> bool:
        """Whether it came to an end, something passed, and nothing failed."""
        return not self.complaint and not self.failed and self.count("SUCCESS") > 0

    def __str__(self) -> str:
        return f"{self.count('SUCCESS')}/{self.count('FAILURE')}"


def worse(alone: Outcome, behind: Outcome) -> dict[tuple[str, str], str]:
    """What passes alone and not behind Gapless, and how it ended there: `ABSENT` if it was not judged."""
    return {
        check: behind.checks.get(check, "ABSENT")
        for check, status in alone.checks.items()
        if status == "SUCCESS" and behind.checks.get(check) != "SUCCESS"
    }


async def judge_server(suite: Suite, url: str) -> Outcome:
    """Run the server scenarios against what is at `url`."""
    return await _judge(suite, ["server", "--url", url, *suite.options])


async def judge_client(suite: Suite, client: Scripted) -> Outcome:
    """Run the client scenarios. That the client fails is a complaint, and so is a warning."""
    async with on_call(client) as (command, failures):
        outcome = await _judge(suite, ["client", "--command", command, *suite.options])
    warned = sorted({scenario for (scenario, _), how in outcome.checks.items() if how == "WARNING"})
    complaints = [outcome.complaint, *failures, f"there are warnings: {warned}" if warned else ""]
    return Outcome(outcome.checks, "; ".join(filter(None, complaints)))


async def _judge(suite: Suite, words: Sequence[str]) -> Outcome:
    installed = suite.installed()
    with tempfile.TemporaryDirectory() as results:
        command = [*installed.script(_PACKAGE), *words, "--output-dir", results]
        # In the suite's own directory, for it writes to the current one if it is not told where.
        ended = await run(command, _PATIENCE, cwd=installed.folder)
        checks = _checks(Path(results))
    if ended.status is None:
        return Outcome(checks, f"it did not end within {_PATIENCE:g} s")
    return Outcome(checks, "" if checks else (ended.stderr or ended.stdout)[-400:])


@asynccontextmanager
async def on_call(client: Scripted) -> AsyncGenerator[tuple[str, list[str]]]:
    """A command that has the client run here, where it is imported once; and what it failed at."""
    failures: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url, scenario, context = json.loads(await reader.readline())
        try:
            async with asyncio.timeout(_CLIENT_PATIENCE):
                await client(url, scenario, context)
        except Exception as error:
            failures.append(f"{scenario}: the client failed: {error!r}")
            writer.write(failures[-1].encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"{sys.executable} -I -S {_CALL} {server.sockets[0].getsockname()[1]}", failures


def _checks(results: Path) -> dict[tuple[str, str], str]:
    checks: dict[tuple[str, str], str] = {}
    for path in sorted(results.rglob("checks.json")):
        named = _RESULT.fullmatch(str(path.parent.relative_to(results)))
        scenario = named[1] if named else path.parent.name
        for check in json.loads(path.read_text()):
            if check["status"] != "INFO":
                checks[scenario, _numbered(checks, scenario, check["id"])] = check["status"]
    return checks


def _numbered(checks: dict[tuple[str, str], str], scenario: str, name: str) -> str:
    number, numbered = 1, name
    while (scenario, numbered) in checks:
        number += 1
        numbered = f"{name} {number}"
    return numbered
