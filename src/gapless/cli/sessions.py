"""`gapless sessions`: what a log knows of its sessions."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import typer
from rich.markup import escape

from gapless.cli.output import examples, print_json, print_table, say, span, table
from gapless.cli.serve import DEFAULT_LOG
from gapless.errors import GaplessError, UsageError
from gapless.log.base import Log, Stored
from gapless.log.open import open_log
from gapless.protocol.inputs import End
from gapless.protocol.record import read_record, write_record
from gapless.protocol.refusal import Reason
from gapless.protocol.settings import Limits
from gapless.server.live import as_write
from gapless.server.sessions import own

__all__ = ["SHORT", "details", "log_file", "sessions"]

T = TypeVar("T")

SHORT = 8
"""Digits of a session's hash that tables show; any unambiguous beginning names it."""

sessions = typer.Typer(
    name="sessions",
    help="Look at the sessions in a log; end one.",
    no_args_is_help=True,
    epilog=examples("gapless sessions list", "gapless sessions show 3f9a", "gapless sessions end 3f9a"),
)

_LogOption = Annotated[str, typer.Option("--log", help="The log, as it was given to gapless serve.")]
_Prefix = Annotated[
    str, typer.Argument(metavar="HASH", help="The session's hash, or enough of it.", show_default=False)
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@sessions.command("list", epilog=examples("gapless sessions list", "gapless sessions list --json"))
def list_sessions(*, log: _LogOption = DEFAULT_LOG, as_json: _Json = False) -> None:
    """List the sessions in a log, oldest first, by the hashes of their tokens."""

    async def run(store: Log) -> list[dict[str, Any]]:
        return [_summary(stored, store) for stored in await store.sessions()]

    found = _with_log(log, run)
    if as_json:
        print_json(found)
        return
    if not found:
        say(f"no sessions in {log}")
        return
    numbers = ("committed", "floor", "received", "open")
    made = table("session", "view", "state", *numbers, "age", right=numbers)
    for one in found:
        made.add_row(
            one["session"][:SHORT],
            one["view"],
            one["ended"] or one["state"],
            *(str(one[name]) for name in numbers),
            span(one["age"]),
        )
    print_table(made)


@sessions.command(epilog=examples("gapless sessions show 3f9a", "gapless sessions show 3f9a --json"))
def show(session: _Prefix, *, log: _LogOption = DEFAULT_LOG, as_json: _Json = False) -> None:
    """Show one session, and which of its events are retained."""

    async def run(store: Log) -> dict[str, Any]:
        stored = await _find(store, session)
        return details(stored, store)

    found = _with_log(log, run)
    if as_json:
        print_json(found)
        return
    made = table("", "")
    made.show_header = False
    for name, value in found.items():
        made.add_row(f"[bold]{name}[/bold]", escape(_shown(name, value)))
    print_table(made)


@sessions.command(epilog=examples("gapless sessions end 3f9a"))
def end(session: _Prefix, *, log: _LogOption = DEFAULT_LOG) -> None:
    """End a session. What it has open is answered: outcome unknown.

    The process that serves it finds out when it next writes, and its client is told then.
    """

    async def run(store: Log) -> tuple[Stored, Reason | None]:
        stored = await _find(store, session)
        return stored, await _end(store, stored)

    stored, over = _with_log(log, run)
    name = stored.key.hex()[:SHORT]
    say(f"session {name} had ended before: {over}" if over else f"session {name} is ended")


def log_file(url: str) -> str:
    """The file that the URL of a log names.

    Raises:
        UsageError: it names none.
    """
    if url == "memory:":
        raise UsageError("a memory log cannot be looked into: it is inside the process that serves")
    return unquote(urlsplit(url).path)[1:]


def _with_log(url: str, run: Callable[[Log], Awaitable[T]]) -> T:
    """What `run` makes of the log at `url`, which has to be there."""
    store = open_log(url)
    path = log_file(url)
    if not os.path.exists(path):
        raise GaplessError(f"there is no log {path}", hint="--log names it, as for gapless serve")

    async def work() -> T:
        await store.start()
        try:
            return await run(store)
        finally:
            await store.close()

    return asyncio.run(work())


async def _find(store: Log, prefix: str) -> Stored:
    """The session that a beginning of its hash names.

    Raises:
        GaplessError: none, or several.
    """
    found = [stored for stored in await store.sessions() if stored.key.hex().startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise GaplessError(
            f"there is no session {prefix}", hint="gapless sessions list shows those there are"
        )
    raise GaplessError(f"{len(found)} sessions begin with {prefix}", hint="give more digits")


async def _end(store: Log, stored: Stored) -> Reason | None:
    """End a session in its log, and fence off whoever serves it; the reason, if it was over before."""
    machine, principal, fence = await own(store, stored, Limits(), None, now=0.0, unix=time.time())
    over = machine.reason
    if over is None:
        machine.handle(End(Reason.SESSION_ENDED, ""), 0.0)
        record = write_record(machine, principal, time.time())
        await store.commit(stored.key, as_write(machine.take(), record, fence))
    return over


def _summary(stored: Stored, store: Log) -> dict[str, Any]:
    record = read_record(stored.record)
    now = time.time()
    return {
        "session": stored.key.hex(),
        "view": record.view.value,
        "state": record.state.value,
        "ended": None if record.reason is None else record.reason.value,
        "durability": store.durability.value,
        "committed": stored.committed,
        "floor": stored.floor,
        "received": stored.received,
        "open": len(record.open),
        "age": round(now - stored.created, 3),
        "idle": round(now - stored.updated, 3),
    }


def details(stored: Stored, store: Log) -> dict[str, Any]:
    """What is known of a session and no secret, as its ticket is."""
    record = read_record(stored.record)
    return {
        **_summary(stored, store),
        "created": _date(stored.created),
        "updated": _date(stored.updated),
        "ended_at": None if record.ended_at is None else _date(record.ended_at),
        "principal": record.principal,
        "retained": [stored.floor + 1, stored.committed] if stored.committed > stored.floor else None,
        "acks": {str(stream): seq for stream, seq in record.acks.items()},
        "dispatched": stored.dispatched,
        "requests": [{"id": r.id, "method": r.method, "number": r.number} for r in record.open],
        "fence": stored.fence,
    }


def _date(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def _shown(name: str, value: Any) -> str:
    match name, value:
        case _, None | [] | {}:
            return "-"
        case (("age" | "idle"), float()):
            return span(value)
        case "retained", [first, last]:
            return f"{first} to {last}"
        case "acks", dict():
            acks = cast("dict[str, int]", value)
            return ", ".join(f"{seq} of stream {stream}" for stream, seq in acks.items())
        case "requests", list():
            requests = cast("list[dict[str, Any]]", value)
            return ", ".join(f"{r['method']} (ID {r['id']!r}, message {r['number']})" for r in requests)
        case _:
            return str(value)
