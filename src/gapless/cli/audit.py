"""`gapless audit`: whether a log holds together, and a client processed all that is in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from gapless.cli.output import examples, print_json, print_table, say, table
from gapless.cli.serve import DEFAULT_LOG
from gapless.cli.sessions import SHORT, log_file
from gapless.errors import UsageError
from gapless.log.open import open_log

if TYPE_CHECKING:
    from gapless.client.receipts import Line
    from gapless.torture.audit import Report

__all__ = ["AUDIT_EXAMPLES", "audit_log"]

AUDIT_EXAMPLES: Final = examples(
    "gapless audit --log sqlite:///gapless.db",
    "gapless audit --log sqlite:///gapless.db --receipts agent.receipts",
    "gapless audit --session 3f9a --json",
)


def audit_log(
    *,
    log: Annotated[str, typer.Option(help="The log, as it was given to gapless serve.")] = DEFAULT_LOG,
    receipts: Annotated[
        str | None,
        typer.Option(metavar="<file>", help="What a client wrote with receipts= or --receipts."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="<hash>", help="Only sessions whose hash begins so.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that a log holds together, and that a client processed all of it, once and in order.

    Links are computed anew, every request must be settled once, and what a client's receipts say
    must be a prefix of the log: if not, it is said between which turns of its connection that was.

    Nothing is written; a server may be using the log meanwhile. The exit status is 1 if there is a
    violation, and 2 if there was nothing to look at.
    """
    reports = _audit(_path(log), receipts, (session or "").lower())
    if session and not reports:
        raise UsageError(f"there is no session {session}", hint="gapless sessions list shows those there are")
    if as_json:
        print_json([report.as_json() for report in reports])
    else:
        _print(reports)
    broken = [report for report in reports if report.count]
    if broken:
        violations = sum(report.count for report in broken)
        say(
            f"{_many(violations, 'violation')} in {len(broken)} of {_many(len(reports), 'session')}",
            style="red",
        )
        raise typer.Exit(1)
    say(f"{_many(len(reports), 'session')}, no violation")


def _path(url: str) -> str:
    """The file that a log's URL names, which has to be there."""
    open_log(url)  # which says what is wrong with a URL; it is not started
    path = log_file(url)
    if not os.path.isfile(path):
        raise UsageError(f"there is no log {path}", hint="--log names it, as for gapless serve")
    return path


def _audit(path: str, receipts: str | None, session: str) -> list[Report]:
    from gapless.client.receipts import read_receipts
    from gapless.log.snapshot import snapshot
    from gapless.torture.audit import audit

    with ExitStack() as closing:
        lines: Iterator[Line] = iter(())
        if receipts is not None:
            try:
                file = closing.enter_context(open(receipts, "rb"))
            except OSError as error:
                raise UsageError(f"cannot read the receipts {receipts}: {error.strerror}") from None
            # As far as it goes before the log is looked at: what is processed is in the log by then (L2).
            lines = read_receipts(file, os.fstat(file.fileno()).st_size)
        return asyncio.run(audit(closing.enter_context(snapshot(path)), lines, session))


def _print(reports: list[Report]) -> None:
    if not reports:
        return
    numbers = ("events", "requests", "open", "receipts", "violations")
    made = table("session", "view", "state", *numbers, right=numbers)
    for report in reports:
        retained = f"{report.floor + 1} to {report.committed}" if report.committed > report.floor else "-"
        made.add_row(
            report.session[:SHORT],
            report.view or "-",
            report.ended or report.state or ("unreadable" if report.logged else "not in the log"),
            retained,
            str(report.requests.requests),
            str(report.requests.open),
            "-" if report.processed is None else f"up to {report.processed}",
            f"[red]{report.count}[/red]" if report.count else "none",
        )
    print_table(made)
    found = table("session", "rule", "what was found")
    for report in reports:
        for finding in (*report.violations, *report.notes):
            colour = "red" if finding.kind.violation else "dim"
            text = f"[{colour}]{escape(finding.text)}[/{colour}]"
            found.add_row(report.session[:SHORT], finding.kind.rule, text)
        if report.findings.uncounted:
            found.add_row(report.session[:SHORT], "", f"[red]and {report.findings.uncounted} more[/red]")
    if found.row_count:
        print()
        print_table(found)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
