"""Bad inputs, a million of them, to a real `gapless serve`: `make attack`.

Three servers in turn, one in front of a stdio server on SQLite, two with an SDK server in their process, get
requests, handshakes and frames that are wrong in every way that anybody has thought of, from raw sockets, and
good clients climb beside them. The third asks for tokens, which none of that has: nobody is to be let in
there, with whichever session. Everything is drawn from one seed.

    python -m tests.attack --inputs 20000 --seed 7
    python -m tests.attack --server sdk --family framing

Exit status 1 if a verdict is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from gapless.auth.tokens import new_token
from gapless.cli.loop import loop_factory
from tests.attack.campaign import FAMILIES, Attack, Report
from tests.attack.exchange import Bounds
from tests.attack.findings import VERDICTS, Findings
from tests.attack.process import Held, Process, gapless
from tests.attack.volley import Family

__all__ = ["SERVERS", "attack", "main"]

_progress: Final = Console(stderr=True, highlight=False)

_SHARES: Final = {"stdio": 1, "sdk": 8, "guarded": 1}
SERVERS: Final = tuple(_SHARES)
_EVERY: Final = 5.0
"""Seconds between two lines of progress."""
LIMITS: Final = {
    "header_timeout": 2.0,
    "body_timeout": 2.0,
    "session_expiry": 3.0,
    "tombstone": 3.0,
    "probe_timeout": 0.2,
    "max_message_bytes": 65536,
    "max_upgrades_per_minute": 1_000_000,
    "retain_events": 2000,
}
"""Short timers, and a small message, so that going over them costs little."""
_TIMERS: Final = ("header_timeout", "body_timeout")


def command(server: str, folder: Path, quick: bool) -> list[str]:
    """What starts a server; `quick`, with timers that are shorter still."""
    limits = LIMITS | (dict.fromkeys(_TIMERS, 1.0) if quick else {})
    if server == "stdio":
        child = ["--", sys.executable, "-m", "tests.attack.child"]
        return gapless(f"sqlite:///{folder / 'attack.db'}", *child, **limits, max_children=64)
    tokens = ["--tokens", str(folder / "tokens")] if server == "guarded" else []
    return gapless("memory:", *tokens, "examples.ladder_server:server", **limits, max_sessions=400)


async def attack(server: str, inputs: int, seed: int, *, quick: bool = False, **options: Any) -> Report:
    """Attack one of the servers.

    Args:
        quick: in the short form: nothing is measured before, and nobody waits for long.
        options: of `Attack`.

    Raises:
        RuntimeError: it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        if server == "guarded":
            token, line = new_token("attacker")
            (Path(folder) / "tokens").write_text(line)
            options |= {"token": token, "witnesses": False}  # those that climb have no token, either
        process = Process(command(server, Path(folder), quick), Path(folder) / "said")
        seats = 4 if server == "stdio" else 12
        if quick:
            options |= {"warm": 0.0, "pace": 0.01}
        one = Attack(server, process, inputs, seed, bounds=Bounds(timers=6.0), seats=seats, **options)
        return await one.run()


def _progressed(inputs: int) -> Callable[[Report], None]:
    began = last = time.monotonic()

    def tell(report: Report) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _EVERY:
            last = now
            sent, wrong = report.findings.sent, sum(report.findings.wrong.values())
            per_second = sent / (now - began)
            words = f"{report.name}: {sent:,} of {inputs:,} bad inputs, {per_second:,.0f} a second"
            _progress.print(words + (f", {wrong} findings" if wrong else ""))

    return tell


def _show(reports: list[Report]) -> None:
    console = Console(highlight=False)
    names = [report.name for report in reports]

    def rows(
        title: str, of: Callable[[Findings], Counter[Any]], shown: Callable[[Any], list[str]], *heads: str
    ) -> None:
        table = Table(*heads, title=title, title_justify="left")
        for name in names:
            table.add_column(name, justify="right")
        tallies = [of(report.findings) for report in reports]
        for key in sorted(set().union(*tallies)):
            table.add_row(*shown(key), *(f"{tally[key]:,}" for tally in tallies))
        console.print(table)

    rows("bad inputs", lambda found: found.inputs, lambda key: [key], "family")
    rows("answers", lambda found: found.answers, lambda key: [str(key[0]), key[1] or "–"], "status", "reason")
    rows("WebSockets", lambda found: found.closes, lambda key: [str(key)], "closed with")
    table = Table("", *names)
    for what, cell in _MEASURES.items():
        table.add_row(what, *map(cell, reports))
    console.print(table)
    table = Table("verdict", *names)
    for verdict, meaning in VERDICTS.items():
        counts = [report.findings.broken(verdict) for report in reports]
        table.add_row(meaning, *(f"[red]broken {count:,} times[/]" if count else "holds" for count in counts))
    console.print(table)
    for report in reports:
        for (verdict, what), count in sorted(report.findings.wrong.items()):
            console.print(f"{report.name}: {verdict}: {what} ({count} times)", markup=False)
            for example in report.findings.examples[verdict, what][:1]:
                console.print(f"    {example[:1500]}", markup=False)


def _grown(of: Callable[[Held], int], unit: int = 1) -> Callable[[Report], str]:
    def cell(report: Report) -> str:
        if report.before is None or report.after is None:
            return "not measured"
        return f"{of(report.before) / unit:,.0f}, then {of(report.after) / unit:,.0f}"

    return cell


_MEASURES: Final[dict[str, Callable[[Report], str]]] = {
    "bad inputs": lambda report: f"{report.findings.sent:,}",
    "connections": lambda report: f"{report.findings.connections:,}",
    "sessions attacked": lambda report: f"{report.sessions:,}",
    "seconds": lambda report: f"{report.seconds:.0f}",
    "memory, MiB": _grown(lambda held: held.memory, 1024 * 1024),
    "descriptors": _grown(lambda held: held.descriptors),
    "tasks": lambda report: ", then ".join(map(str, report.tasks)),
    "threads": _grown(lambda held: held.threads),
    "children": _grown(lambda held: held.children),
    "lines on stderr": lambda report: f"{sum(report.said.values()):,}",
    "witnesses' messages": lambda report: f"{report.rungs:,}",
}


def _data(report: Report) -> dict[str, Any]:
    found = report.findings
    return {
        "inputs": found.inputs,
        "answers": {f"{status} {reason}".strip(): count for (status, reason), count in found.answers.items()},
        "closes": found.closes,
        "connections": found.connections,
        "sessions": report.sessions,
        "seconds": round(report.seconds, 1),
        "before": report.before and asdict(report.before),
        "after": report.after and asdict(report.after),
        "witnesses": report.rungs,
        "verdicts": {verdict: found.broken(verdict) for verdict in VERDICTS},
        "findings": [
            {"verdict": verdict, "what": what, "count": count, "examples": found.examples[verdict, what]}
            for (verdict, what), count in sorted(found.wrong.items())
        ],
    }


async def _run(servers: list[str], inputs: int, seed: int, families: tuple[Family, ...]) -> list[Report]:
    """Each server gets its share: the one whose sessions cost a process gets less."""
    ours = asyncio.current_task()
    assert ours is not None
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, ours.cancel
    )  # so that no server is left behind
    reports: list[Report] = []
    whole = sum(_SHARES[server] for server in servers)
    for server in servers:
        count = inputs * _SHARES[server] // whole
        reports.append(await attack(server, count, seed, families=families, progress=_progressed(count)))
    return reports


def main(arguments: list[str] | None = None) -> int:
    """Attack; the exit status is returned."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=description)
    parser.add_argument(
        "--inputs", type=int, default=1_000_000, help="how many bad inputs to send (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (%(default)s)")
    parser.add_argument("--server", action="append", choices=SERVERS, help="this one alone; may be repeated")
    names = [family.name for family in FAMILIES]
    parser.add_argument("--family", action="append", choices=names, help="this kind alone; may be repeated")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    options = parser.parse_args(arguments)
    families = tuple(family for family in FAMILIES if family.name in (options.family or names))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        reports = runner.run(_run(options.server or [*_SHARES], options.inputs, options.seed, families))
    if options.json:
        print(json.dumps({report.name: _data(report) for report in reports}))
    else:
        _show(reports)
    return int(any(report.findings.wrong for report in reports))


if __name__ == "__main__":
    sys.exit(main())
