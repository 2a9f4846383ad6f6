"""What the commands share: where they print, how they fail, how they write sizes and times."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gapless.errors import GaplessError, UsageError

__all__ = [
    "Options",
    "err",
    "examples",
    "fail",
    "interactive",
    "options",
    "out",
    "print_json",
    "print_table",
    "say",
    "size",
    "span",
    "table",
]

out: Final = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 4096)
"""Results, on stdout; into pipes in whole lines, whatever their length."""

err: Final = Console(stderr=True, highlight=False, emoji=False)
"""Everything else, on stderr."""


@dataclass(slots=True)
class Options:
    """The options of `gapless` itself."""

    debug: bool = False


options: Final = Options()


def interactive() -> bool:
    """Whether stderr is a terminal that can be drawn on; colours may be forced on others."""
    return err.is_interactive and sys.stderr.isatty()


def say(text: str, *, style: str = "") -> None:
    """One line on stderr; never wrapped, so that it stays one."""
    err.print(f"[bold]gapless:[/bold] {escape(text)}", style=style, soft_wrap=True)


def fail(error: GaplessError) -> int:
    """Say in one line what is wrong and what to do; the exit status is returned."""
    say(error.line, style="red")
    return 2 if isinstance(error, UsageError) else 1


def print_json(value: Any) -> None:
    """A result as JSON, for programs."""
    out.print_json(data=value)


def print_table(made: Table) -> None:
    """A result as a table, without the blanks that would fill its last column."""
    with out.capture() as captured:
        out.print(made)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns in `right` hold numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left")
    return made


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to try."""
    return "\n".join(["[bold]Examples[/bold]", *(f"[dim]$[/dim] {escape(line)}" for line in lines)])


def size(count: int) -> str:
    """A number of bytes for people: `4 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def span(seconds: float) -> str:
    """A time for people, in its largest unit: `30 min`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
