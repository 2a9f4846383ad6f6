"""The command: which rows there are, running them, telling what came of it."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness import LOAD_CORE, Bench, Figure, NotMeasured, WrongEvents, pin

__all__ = ["ROWS", "Outcome", "Row", "main"]

ROUNDS = 7
QUICK = 2
LONGEST = 400
"""Seconds that a row may take: one that waits for an event which was lost would wait for ever."""

progress = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a function of a module in `rows/`."""

    number: int
    title: str
    module: str
    function: str


ROWS = (
    Row(1, "CPU per event, one call × 1,000 notifications, SDK in memory ÷ ours", "emit", "one"),
    Row(2, "the same, 50 calls in 50 sessions", "emit", "fifty"),
    Row(3, "ours ÷ a bare loop that syncs and sends the same bytes, 64 to a batch", "bare", "loop"),
    Row(4, "log FULL ÷ log in memory, CPU per event", "durability", "full"),
    Row(5, "WebSocket ÷ SSE, CPU per event", "wires", "socket"),
    Row(6, "backlog ÷ live, CPU per event; a million events from disk", "replay", "backlog"),
    Row(7, "`tools/call`, p50, SDK in memory ÷ ours", "latency", "call"),
    Row(8, "SSE → WebSocket under 1,000 events/s", "migrate", "crossing"),
    Row(9, "CPU per delivered event ÷ Nchan's", "nchan", "delivered"),
    Row(10, "our client ÷ the SDK's, events/s from one server", "clients", "reading"),
    Row(11, "memory per session with an open stream, SDK ÷ ours", "memory", "session"),
    Row(12, "many sessions, many events, a restart", "scale", "flat"),
    Row(13, "one event alone, append to client, p50 ÷ bare fsync and send", "alone", "event"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row: its figures, or why there are none."""

    row: Row
    figures: list[Figure] = field(default_factory=list[Figure])
    notes: list[str] = field(default_factory=list[str])
    reason: str = ""
    wrong: bool = False
    seconds: float = 0.0

    def as_json(self) -> dict:
        """For programs: every round's value is in it."""
        figures = [{**asdict(f), "median": f.median, "met": f.met} for f in self.figures]
        return {**asdict(self), "figures": figures}


def measure(row: Row, *, quick: bool) -> Outcome:
    """Run one row."""
    bench = Bench(QUICK if quick else ROUNDS, quick)
    begun = time.monotonic()
    progress.print(f"row {row.number}: {row.title}", highlight=False)
    run: Callable[[Bench], list[Figure]] = getattr(
        import_module(f"benchmarks.rows.{row.module}"), row.function
    )
    signal.alarm(LONGEST)
    try:
        figures = run(bench)
    except NotMeasured as reason:
        return Outcome(row, reason=str(reason), seconds=time.monotonic() - begun)
    except WrongEvents as error:
        return Outcome(row, reason=str(error), wrong=True, seconds=time.monotonic() - begun)
    except OSError as error:  # its text may name places of this machine
        return Outcome(row, reason=type(error).__name__, wrong=True, seconds=time.monotonic() - begun)
    finally:
        signal.alarm(0)
    return Outcome(row, figures, bench.notes, seconds=time.monotonic() - begun)


def _too_long(*_: object) -> NoReturn:
    raise WrongEvents(f"it was not done within {LONGEST} s")


def number(value: float, unit: str) -> str:
    """A figure with as many digits as it is worth."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{unit and ' '}{unit}"


def cells(figure: Figure) -> tuple[str, ...]:
    """What, target, median, spread, of, verdict."""
    target = "" if figure.target is None else f"{'≥' if figure.sense == 'at least' else '≤'} "
    if figure.target is not None:
        target += f"{figure.target:g}{figure.unit and ' '}{figure.unit}"
    spread = f"{number(min(figure.values), '')} – {number(max(figure.values), '')}"
    verdict = "" if figure.target is None else "met" if figure.met else "missed"
    return figure.what, target, number(figure.median, figure.unit), spread, figure.of, verdict


def show(outcomes: list[Outcome]) -> None:
    """The table, for a terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("#", "of", "target", "median", "spread", "behind it", ""):
        table.add_column(heading)
    for outcome in outcomes:
        table.add_row(str(outcome.row.number), outcome.row.title, style="bold")
        if outcome.reason:
            table.add_row("", f"not measured: {outcome.reason}", style="red")
        for figure in outcome.figures:
            table.add_row("", *cells(figure), style="" if figure.met else "yellow")
        for note in outcome.notes:
            table.add_row("", note, style="dim")
    Console(width=160).print(table)


def main() -> int:
    """Measure what is asked for; 1 if events were lost, or nothing came."""
    from benchmarks import report  # which needs `cells`

    parser = argparse.ArgumentParser(description="How fast Gapless is, row by row.")
    parser.add_argument(
        "rows",
        nargs="*",
        type=int,
        metavar="ROW",
        help=f"numbers of rows, 1 to {len(ROWS)}; without any all are measured, and the page is written",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds instead of {ROUNDS}")
    parser.add_argument("--json", action="store_true", help="print every round's figures as JSON")
    parser.add_argument("--no-page", action="store_true", help="do not write the page after a whole run")
    asked = parser.parse_args()
    if unknown := {*asked.rows} - {row.number for row in ROWS}:
        parser.error(f"there is no row {', '.join(map(str, sorted(unknown)))}")
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    writes = not asked.rows and not asked.no_page
    if writes:
        report.around()  # before all the work
    pin(LOAD_CORE)
    wanted = [row for row in ROWS if not asked.rows or row.number in asked.rows]
    outcomes = [measure(row, quick=asked.quick) for row in wanted]
    if asked.json:
        print(json.dumps([outcome.as_json() for outcome in outcomes], indent=2, ensure_ascii=False))
    else:
        show(outcomes)
    if writes:
        report.write(outcomes, quick=asked.quick)
    return int(any(outcome.wrong for outcome in outcomes))
