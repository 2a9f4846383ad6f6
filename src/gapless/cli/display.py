"""What a call shows while it runs, on stderr: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gapless.cli.output import err, interactive, table

if TYPE_CHECKING:
    from gapless.client.driver import Observation

__all__ = ["Display"]

_ROWS: Final = 12
"""Events that the table of a terminal shows, the latest ones."""

_Row = tuple[float, "Observation"]


class Display:
    """Progress, and with `watch` how the session moves; enter it for as long as it is to be seen."""

    def __init__(self, what: str, *, watch: bool) -> None:
        self._live = Live(console=err, transient=not watch) if interactive() else None
        self._watch = watch
        self._began = time.monotonic()
        self._rows: deque[_Row] = deque(maxlen=_ROWS)
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err
        )
        self._task = self._progress.add_task(escape(what), total=None)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
            self._show()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(self._table() if self._watch else "", refresh=True)
            self._live.stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Make room for a question."""
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.start()

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """The tool says how far it is."""
        text = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        text = f"{text} {message}" if message else text
        if self._live is None:
            err.print(text, markup=False, soft_wrap=True)
        else:
            self._progress.update(self._task, completed=progress, total=total, description=escape(text))

    def observe(self, seen: Observation) -> None:
        """Something happened on the session's connection."""
        if not self._watch:
            return
        if self._rows and "→" not in seen.what:
            last = self._rows[-1][1]
            if (last.cursor, last.committed) == (seen.cursor, seen.committed):
                return
            if "→" not in last.what:
                self._rows.pop()  # between two turns the latest says all
        row = (time.monotonic() - self._began, seen)
        self._rows.append(row)
        if self._live is None:
            err.print(_line(row), markup=False, soft_wrap=True)
        else:
            self._show()

    def _show(self) -> None:
        assert self._live is not None
        self._live.update(Group(self._table(), self._progress) if self._watch else self._progress)

    def _table(self) -> Table:
        numbers = ("cursor", "committed", "seconds")
        made = table("event", "transport", *numbers, right=numbers)
        for at, seen in self._rows:
            made.add_row(seen.what, seen.transport, str(seen.cursor), str(seen.committed), f"{at:.2f}")
        return made


def _line(row: _Row) -> str:
    at, seen = row
    where = f"{seen.transport:<9}  cursor {seen.cursor}  committed {seen.committed}"
    return f"{seen.what:<24} {where}  {at:.2f} s"
