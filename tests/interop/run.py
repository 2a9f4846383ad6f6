"""Judges that nobody here wrote: `make interop`.

Runs the official conformance suite, and clients and servers that people have, with Gapless in
between, and writes docs/reference/interop.md. What it needs is installed under build/interop.

    python -m tests.interop.run --only suites servers
    python -m tests.interop.run --check      # write nothing; exit 1 if the page is not what was found

Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests.interop import fixture_client
from tests.interop.client_rows import CLIENTS, STEPS, try_client
from tests.interop.installed import ROOT
from tests.interop.page import PAGE, Section, rewritten
from tests.interop.processes import PORT, gapless, serving
from tests.interop.server_rows import SERVER_STEPS, SERVERS, try_server
from tests.interop.suites import CLIENT, SERVER, Outcome, judge_client, judge_server, worse

__all__ = ["main"]

_progress: Final = Console(stderr=True, highlight=False)

_FIXTURE: Final = str(ROOT / "tests" / "interop" / "fixture_server.py")
_ALONE: Final = "alone"

_BEYOND: Final = {("server-sse-polling", "server-sse-disconnect-resume")}
"""Checks that a fixture behind Gapless cannot come to: it has no HTTP stream that it could close."""


@asynccontextmanager
async def _alone() -> AsyncGenerator[str]:
    async with serving([sys.executable, _FIXTURE, "--http", PORT]) as url:
        yield url


@asynccontextmanager
async def _in_process() -> AsyncGenerator[str]:
    async with serving(gapless("tests.interop.fixture_server:server")) as url:
        yield url


@asynccontextmanager
async def _stdio() -> AsyncGenerator[str]:
    async with serving(gapless("--", sys.executable, _FIXTURE)) as url:
        yield url


@asynccontextmanager
async def _upstream() -> AsyncGenerator[str]:
    async with _alone() as upstream, serving(gapless("--upstream", upstream)) as url:
        yield url


_FORMS: Final = {_ALONE: _alone, "in process": _in_process, "stdio": _stdio, "upstream": _upstream}


@dataclass(slots=True)
class Found:
    """What a part of the run found.

    Attributes:
        section: for the page.
        wrong: what failed, one line each.
        data: the same, for programs.
    """

    section: Section
    wrong: list[str] = field(default_factory=list[str])
    data: dict[str, Any] = field(default_factory=dict[str, Any])


async def _suites() -> Found:
    found = Found(Section("suites", ["suite", *_FORMS]))
    outcomes: dict[tuple[str, str], Outcome] = {}
    for form, served in _FORMS.items():
        try:
            async with served() as url:
                for suite in SERVER:
                    _progress.print(f"{suite.title}: {form}")
                    outcomes[suite.title, form] = await judge_server(suite, url)
        except RuntimeError as error:
            found.wrong.append(f"{form}: {error}")
    for suite in SERVER:
        row = [outcomes.get((suite.title, form), Outcome({}, "it was not run")) for form in _FORMS]
        found.section.rows.append([suite.title, *map(str, row)])
        for form, outcome in zip(_FORMS, row, strict=True):
            found.data[f"{suite.title} {form}"] = str(outcome)
            where = f"{suite.title}: {form}"
            if not outcome.good:
                found.wrong.append(f"{where}: {outcome.complaint or outcome.failed}")
            lost = worse(row[0], outcome)
            found.wrong += [
                f"{where}: {scenario}, {check} passes alone, and here it is {how}"
                for (scenario, check), how in lost.items()
                if how != "ABSENT" or (scenario, check) not in _BEYOND
            ]
    return found


async def _client_suites() -> Found:
    versions = list(dict.fromkeys(suite.version for suite in CLIENT))
    found = Found(Section("client-suites", ["scenario", *versions]))
    rows: dict[str, dict[str, str]] = {}
    for suite in CLIENT:
        _progress.print(f"{suite.title}: our client")
        outcome = await judge_client(suite, fixture_client.main)
        for scenario, part in sorted(outcome.scenarios.items()):
            rows.setdefault(scenario, {})[suite.version] = str(part)
            found.data[f"{suite.version} {scenario}"] = str(part)
        if not outcome.good:
            found.wrong.append(f"{suite.title}: {outcome.complaint or outcome.failed}")
    for scenario, row in rows.items():
        found.section.rows.append([f"`{scenario}`", *(row.get(version, "–") for version in versions)])
    return found


async def _clients() -> Found:
    found = Found(Section("clients", ["client", *STEPS]))
    for client in CLIENTS:
        _progress.print(client.title)
        try:
            versions, steps = await try_client(client)
        except FileNotFoundError as error:
            versions, steps = {}, dict.fromkeys(STEPS, str(error))
        _row(found, f"{client.title.rstrip(' 0123456789')} {' '.join(versions.values())}", STEPS, steps)
    return found


async def _servers() -> Found:
    found = Found(Section("servers", ["server", *SERVER_STEPS]))
    for server in SERVERS:
        _progress.print(server.package)
        version, steps = await try_server(server)
        _row(found, f"`{server.package}` {version}", SERVER_STEPS, steps)
    return found


def _row(found: Found, title: str, names: tuple[str, ...], steps: dict[str, str]) -> None:
    """A step that is not there is one that the program does not have."""
    shown = {"ok": "yes", "": "–"}
    found.section.rows.append([title, *(shown.get(steps.get(name, ""), "**no**") for name in names)])
    found.wrong += [f"{title}: {name}: {how}" for name, how in steps.items() if how != "ok"]
    found.data[title] = steps


PARTS: Final[dict[str, Callable[[], Awaitable[Found]]]] = {
    "suites": _suites,
    "client-suites": _client_suites,
    "clients": _clients,
    "servers": _servers,
}


async def _run(names: list[str]) -> dict[str, Found]:
    return {name: await PARTS[name]() for name in names}


def _show(found: dict[str, Found]) -> None:
    console = Console(highlight=False)
    for part in found.values():
        table = Table(*part.section.head)
        for row in part.section.rows:
            table.add_row(*(cell.replace("`", "") for cell in row))
        console.print(table)
        for line in part.wrong:
            console.print(line, markup=False)


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; the exit status is returned."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is not current"
    )
    options = parser.parse_args(arguments)
    found = asyncio.run(_run(options.only))
    if options.json:
        print(json.dumps({name: {"found": part.data, "wrong": part.wrong} for name, part in found.items()}))
    else:
        _show(found)
    wrong = any(part.wrong for part in found.values())
    old = PAGE.read_text(encoding="utf-8")
    new = rewritten(old, [part.section for part in found.values()])
    if new != old:
        if options.check:
            _progress.print(f"{PAGE.name} is not what was found: run make interop")
            return 1
        PAGE.write_text(new, encoding="utf-8")
        _progress.print(f"{PAGE.name} is written anew")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
