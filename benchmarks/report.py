"""Writes what was measured into docs/reference/performance.md, and draws it."""

from __future__ import annotations

import math
import os
import platform
import textwrap
from collections.abc import Sequence
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from benchmarks.harness import BUILD, LOAD_CORE, ROOT, SERVER_CORE, Figure, disk

if TYPE_CHECKING:
    from benchmarks.bench import Outcome

__all__ = ["PAGE", "PLOT", "around", "write"]

PAGE = ROOT / "docs" / "reference" / "performance.md"
PLOT = ROOT / "docs" / "reference" / "performance" / "targets.svg"

BEGIN, END = "<!-- make bench -->\n", "<!-- end -->"
PACKAGES = ("gapless", "mcp", "uvicorn", "uvloop", "httptools", "websockets", "apsw", "msgspec")

ROW_HEIGHT, LEFT, RIGHT, TOP = 22, 430, 40, 40
WIDTH = 900
DECADES = (-2, 2)
"""The plot's ends, as powers of ten of a median beside its target."""


def around() -> tuple[str, str]:
    """The page before the table, and after it.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begins, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise ValueError(f"{PAGE} has no markers")
    return before, after


def write(outcomes: Sequence[Outcome], *, quick: bool) -> None:
    """Put the table between the page's markers, and the plot beside the page."""
    before, after = around()
    text = "\n".join([*_table(outcomes), "", _told(outcomes, quick=quick)])
    PAGE.write_text(f"{before}{BEGIN}{text}\n{END}{after}", encoding="utf-8")
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(plot(outcomes), encoding="utf-8")


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    from benchmarks.bench import cells

    lines = [
        "| # | measure | target | median | spread | medians behind it | |",
        "|---|---|---|---:|---|---|---|",
    ]
    for outcome in outcomes:
        lines.append(f"| {outcome.row.number} | **{outcome.row.title}** | | | | | |")
        if outcome.reason:
            lines.append(f"| | not measured: {outcome.reason} | | | | | |")
        lines += [f"| | {' | '.join(cells(figure))} |" for figure in outcome.figures]
        lines += [f"| | *{note}* | | | | | |" for note in outcome.notes]
    return lines


def _told(outcomes: Sequence[Outcome], *, quick: bool) -> str:
    """When, where and with what it was measured."""
    rounds = max((len(f.values) for o in outcomes for f in o.figures), default=0)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    taken = (
        f"Measured on {date.today().isoformat()} in {minutes:.0f} minutes, {rounds} rounds of each"
        f"{' (a quick run: too few to rely on)' if quick else ''}. "
        f"Machine: {_cpu()}, {os.cpu_count()} cores, server on core {SERVER_CORE}, load on core {LOAD_CORE}, "
        f"{_memory()}, Linux {platform.release()}, logs on {disk(BUILD)}. "
        f"Python {platform.python_version()}, {', '.join(f'{p} {version(p)}' for p in PACKAGES)}{_nginx()}."
    )
    return "\n".join(textwrap.wrap(taken, 110))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")


def _memory() -> str:
    first = Path("/proc/meminfo").read_text().split()
    return f"{int(first[1]) / 2**20:.0f} GiB"


def _nginx() -> str:
    packages = sorted(path.stem for path in (BUILD / "nchan").glob("*.deb"))
    return "".join(f", {unquote(name.rpartition('_')[0].replace('_', ' '))}" for name in packages)


# The plot -----------------------------------------------------------------------------------------------


def plot(outcomes: Sequence[Outcome]) -> str:
    """Each figure's median beside its target, with its spread, on a logarithmic scale."""
    figures = [(o.row.number, f) for o in outcomes for f in o.figures if f.target is not None]
    height = TOP + ROW_HEIGHT * len(figures) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for power in range(DECADES[0], DECADES[1] + 1):
        x = _x(10.0**power)
        colour, width = ("#333", 1.5) if power == 0 else ("#ddd", 1)
        label = "target" if power == 0 else f"{10.0**power:g}×"
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 10}" x2="{x:.1f}" y2="{height - 25}" stroke="{colour}" '
            f'stroke-width="{width}"/><text x="{x:.1f}" y="{TOP - 18}" text-anchor="middle">{label}</text>'
        )
    for at, (number, figure) in enumerate(figures):
        parts.append(_bar(number, figure, TOP + at * ROW_HEIGHT))
    parts.append(
        f'<text x="20" y="{height - 8}" fill="#555">to the right of the line: better than the target; '
        "the thin line is the spread of the rounds</text></svg>\n"
    )
    return "\n".join(parts)


def _bar(number: int, figure: Figure, top: float) -> str:
    beside = sorted(_beside(figure, value) for value in figure.values)
    middle = _x(_beside(figure, figure.median))
    zero, y = _x(1.0), top + ROW_HEIGHT / 2
    colour = "#2a7f4f" if figure.met else "#c0392b"
    left, width = min(zero, middle), abs(middle - zero)
    what = escape(f"{number}  {figure.what.replace('`', '')}")
    return (
        f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{what}</text>'
        f'<rect x="{left:.1f}" y="{top + 5:.1f}" width="{width:.1f}" height="{ROW_HEIGHT - 10}" '
        f'fill="{colour}"/>'
        f'<line x1="{_x(beside[0]):.1f}" x2="{_x(beside[-1]):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#111"/>'
    )


def _beside(figure: Figure, value: float) -> float:
    """How many times better than its target a value is."""
    assert figure.target is not None
    low = 10.0 ** DECADES[0]
    value = max(value, low * figure.target)
    return value / figure.target if figure.sense == "at least" else figure.target / value


def _x(times: float) -> float:
    low, high = DECADES
    power = min(max(math.log10(times), low), high)
    return LEFT + (WIDTH - LEFT - RIGHT) * (power - low) / (high - low)
