"""`gapless log`: whether a log is whole, what is in it, and its unused space given back."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import msgspec
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gapless.cli.limits import some_limits
from gapless.cli.output import err, examples, interactive, print_json, print_table, say, size, table
from gapless.cli.serve import DEFAULT_LOG
from gapless.cli.sessions import SHORT, details, log_file
from gapless.errors import SchemaError, StorageError, UsageError
from gapless.log.open import open_log
from gapless.protocol.record import read_record
from gapless.protocol.settings import Limits

if TYPE_CHECKING:
    from gapless.log.base import Entry, Log, SessionKey, Stored
    from gapless.log.maintain import Fault
    from gapless.log.snapshot import Snapshot

__all__ = ["log"]

log = typer.Typer(
    name="log",
    help="Check a log, export it, or give its unused space back.",
    no_args_is_help=True,
    epilog=examples("gapless log check", "gapless log export > log.jsonl", "gapless log compact"),
)

_Url = Annotated[str, typer.Argument(metavar="URL", help="The log, as it was given to gapless serve.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_MOST: Final = 20
"""Faults of one session's rows that are told; the first ones say where to look."""
_SHOWN: Final = 5
"""Sessions that a line names."""
_PAGE: Final = 256 * 1024
_ENTRIES: Final = 16
_REDACTED: Final = "redacted"


@dataclass(frozen=True, slots=True)
class _Finding:
    """What is shown: `session` is a hash; `None` where it is no one session's. A note is no damage."""

    session: str | None
    where: str
    what: str
    damage: bool = True


def _found(fault: Fault) -> _Finding:
    session = None if fault.session is None else fault.session.hex()
    return _Finding(session, fault.where, fault.what)


@log.command(epilog=examples("gapless log check", "gapless log check sqlite:////srv/gapless.db --quick"))
def check(
    url: _Url = DEFAULT_LOG,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out indexes and events.")] = False,
    as_json: _Json = False,
) -> None:
    """Check that a log is whole: its file, and each session in it, event by event.

    Nothing is written; a server may be using the log meanwhile, or have been killed.

    The exit status is 0 if it is whole, 1 if it is damaged, and 2 if there is no log to look at.
    """
    path = _path(url)
    from gapless.log.maintain import size_of

    with _snapshot(path) as source, _progress() as progress:
        sessions, findings = _look(source, quick, progress)
    damage = [finding for finding in findings if finding.damage]
    counts = {
        "sessions": len(sessions),
        "events": sum(max(stored.committed - stored.floor, 0) for stored in sessions),
        "messages": sum(stored.received for stored in sessions),
        "bytes": size_of(path),
    }
    if as_json:
        print_json({"whole": not damage, **counts, "findings": [asdict(finding) for finding in findings]})
    elif findings:
        _print(findings)
    if damage:
        hurt = len({finding.session for finding in damage if finding.session})
        where = f" in {hurt} of {_many(len(sessions), 'session')}" if hurt else ""
        say(f"damaged: {_many(len(damage), 'finding')}{where}", style="red")
        raise typer.Exit(1)
    texts = [_many(counts[name], name[:-1]) for name in ("sessions", "events", "messages")]
    say(f"whole: {', '.join(texts)}, {size(counts['bytes'])}")


def _look(source: Snapshot, quick: bool, progress: Progress) -> tuple[tuple[Stored, ...], list[_Finding]]:
    """The sessions, and what is wrong with them and with the file."""
    from gapless.log.maintain import integrity, strays

    task = progress.add_task("the file", total=None)
    findings = [*map(_found, integrity(source, quick=quick))]
    try:
        findings += map(_found, strays(source))
    except StorageError as error:
        findings.append(_Finding(None, "the file", _unreadable(error)))
    try:
        sessions = asyncio.run(source.sessions())
    except StorageError as error:
        return (), [*findings, _Finding(None, "the sessions", _unreadable(error))]
    total = sum(stored.received + (0 if quick else stored.committed - stored.floor) for stored in sessions)
    progress.update(task, description="the sessions", total=total)
    counted = _Counted(source, lambda count: progress.advance(task, count))

    async def each() -> list[_Finding]:
        return [finding for stored in sessions for finding in await _examine(source, counted, stored, quick)]

    return sessions, findings + asyncio.run(each())


async def _examine(source: Snapshot, counted: _Counted, stored: Stored, quick: bool) -> list[_Finding]:
    """What is wrong with one session."""
    from gapless.log.maintain import misfits
    from gapless.torture.audit import audit_session
    from gapless.torture.audit.findings import Kind

    name = stored.key.hex()
    try:
        report = await audit_session(counted, stored, outbox=not quick)
        told = [f for f in report.findings if f.kind.violation or f.kind is Kind.REFORMATTED]
        found = [_Finding(name, f.where, f.what, f.kind.violation) for f in told]
        if report.findings.uncounted:
            found.append(_Finding(name, "", f"and {report.findings.uncounted} more"))
        if not any(f.kind.label.startswith("events-") for f in told):
            # Otherwise it is the same damage, and the events themselves say where more exactly.
            found += map(_found, islice(misfits(source, stored), _MOST))
    except StorageError as error:
        return [_Finding(name, "", _unreadable(error))]
    return found


class _Counted:
    """A snapshot, and how much of it has been read."""

    def __init__(self, source: Snapshot, advance: Callable[[int], None]) -> None:
        self._source = source
        self._advance = advance

    async def sessions(self) -> tuple[Stored, ...]:
        """All sessions."""
        return await self._source.sessions()

    async def read(self, key: SessionKey, after: int, upto: int, limit: int) -> tuple[bytes, int]:
        """As the snapshot."""
        await asyncio.sleep(0)  # where Ctrl-C is noticed
        page, last = await self._source.read(key, after, upto, limit)
        self._advance(last - after)
        return page, last

    async def entries(self, key: SessionKey, after: int, limit: int) -> tuple[Entry, ...]:
        """As the snapshot."""
        await asyncio.sleep(0)
        entries = await self._source.entries(key, after, limit)
        self._advance(len(entries))
        return entries


def _print(findings: list[_Finding]) -> None:
    made = table("session", "where", "what was found")
    for finding in findings:
        name = "-" if finding.session is None else finding.session[:SHORT]
        what = escape(finding.what)
        told = f"[red]{what}[/red]" if finding.damage else f"[dim]a note: {what}[/dim]"
        made.add_row(name, escape(finding.where or "-"), told)
    print_table(made)


@log.command(
    epilog=examples(
        "gapless log export > log.jsonl",
        "gapless log export --session 3f9a | jq 'select(.event) | .data'",
        "gapless log export sqlite:////srv/gapless.db --out log.jsonl",
    )
)
def export(
    url: _Url = DEFAULT_LOG,
    *,
    session: Annotated[
        str | None, typer.Option(metavar="<hash>", help="Only sessions whose hash begins so.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="<file>", help="A file to make, in place of stdout.")
    ] = None,
) -> None:
    """Print what is in a log, as JSON lines.

    For each session: what gapless sessions show --json says of it; its events, with session, seq,
    stream, event, link and data; its messages, with session, number, digest and data (null: a
    placeholder).

    The ticket of an upgrade, and the URL that holds a session's token, are redacted.

    Nothing is written to the log; a server may be using it meanwhile. The exit status is 1 if
    something cannot be exported.
    """
    path = _path(url)
    prefix = (session or "").lower()
    with _snapshot(path) as source, _output(out) as file:
        sessions = [
            stored for stored in asyncio.run(source.sessions()) if stored.key.hex().startswith(prefix)
        ]
        if session and not sessions:
            raise UsageError(
                f"there is no session {session}", hint="gapless sessions list shows those there are"
            )
        lacking = asyncio.run(_export(source, sessions, open_log(url), file))
    if lacking:
        shown = ", ".join(name[:SHORT] for name in lacking[:_SHOWN])
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise StorageError(f"not exported whole: {shown}{more}", hint="gapless log check says what is wrong")


async def _export(source: Snapshot, sessions: Iterable[Stored], store: Log, file: BinaryIO) -> list[str]:
    """Write what there is of some sessions; those are returned that something is missing of."""
    encode = msgspec.json.Encoder().encode
    lacking: list[str] = []
    for stored in sessions:
        name, due = stored.key.hex(), 1 + max(stored.committed - stored.floor, 0) + stored.received
        try:
            async for line in _lines(source, stored, name, store):
                file.write(encode(line) + b"\n")
                due -= 1
        except StorageError:
            due = 1
        if due:
            lacking.append(name)
    return lacking


async def _lines(source: Snapshot, stored: Stored, name: str, store: Log) -> AsyncIterator[dict[str, Any]]:
    from gapless.torture.audit.chain import BLOCK

    yield details(stored, store)
    after = stored.floor
    while True:
        await asyncio.sleep(0)  # where Ctrl-C is noticed
        page, upto = await source.read(stored.key, after, stored.committed, _PAGE)
        if upto <= after:
            break
        for block in BLOCK.finditer(page):
            seq, stream, link, event, data = block.groups()
            if int(seq) <= stored.floor:
                continue  # evicted, and not swept yet
            event = (event or b"message").decode()
            yield {
                "session": name,
                "seq": int(seq),
                "stream": int(stream),
                "event": event,
                "link": link.decode(),
                "data": _redacted(data) if event == "upgrade-accepted" else _json(data),
            }
        after = upto
    number = 0
    while entries := await source.entries(stored.key, number, _ENTRIES):
        await asyncio.sleep(0)
        for entry in entries:
            digest, number = entry.digest.hex(), entry.number
            yield {"session": name, "number": number, "digest": digest, "data": _json(entry.data)}


def _json(data: bytes) -> Any:
    """JSON as it is; as text what is none; `None` for a placeholder."""
    if not data:
        return None
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return data.decode(errors="backslashreplace")
    return value if b"\n" in data or b"\r" in data else msgspec.Raw(data)


def _redacted(data: bytes) -> Any:
    """An acceptance without what lets somebody into the session: the ticket, and the token in the URL."""
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return _REDACTED
    return {
        name: value if name == "negotiation" or value is None else _REDACTED for name, value in body.items()
    }


@log.command(epilog=examples("gapless log compact", "gapless log compact --tombstone 3600 --json"))
@some_limits("session_expiry", "tombstone")
def compact(url: _Url = DEFAULT_LOG, *, as_json: _Json = False, limits: Limits) -> None:
    """Give back the space of what nobody can ask for any more. No server may be running.

    Sessions are removed that ended a tombstone ago, and those that nobody came back for within
    expiry and tombstone; then what is evicted, and the file is written anew.

    For a while it takes as much space again beside the log, and in SQLite's directory for temporary
    files, which SQLITE_TMPDIR names. If there is not as much, the log stays as it is.
    """
    path = _path(url)
    from gapless.log.maintain import compact as compact_log

    done = compact_log(path, _gone(limits, time.time()))
    if as_json:
        print_json(asdict(done))
        return
    removed = _many(done.removed, "session")
    say(f"{path}: {size(done.before)} before, {size(done.after)} after; {removed} removed")


def _gone(limits: Limits, now: float) -> Callable[[Stored], bool]:
    """Whether nobody can ask for a session any more, as a server with these limits sees it."""

    def gone(stored: Stored) -> bool:
        try:
            ended = read_record(stored.record).ended_at
        except StorageError:
            return False  # that is for gapless log check
        return now >= limits.tombstone + (stored.updated + limits.session_expiry if ended is None else ended)

    return gone


def _path(url: str) -> str:
    """The file that a log's URL names, which has to be there."""
    if "://" not in url and os.path.isfile(url):
        raise UsageError(f"{url} is a file, and a log is named by its URL", hint=f"write sqlite:///{url}")
    open_log(url)  # which says what is wrong with a URL; it is not started
    path = log_file(url)
    if not os.path.isfile(path):
        raise UsageError(f"there is no log {path}", hint="name it as it was given to gapless serve")
    return path


@contextmanager
def _snapshot(path: str) -> Generator[Snapshot]:
    """One moment of a log.

    Raises:
        UsageError: it is another program's file, or of another version. StorageError: it is damaged.
    """
    from gapless.log.snapshot import snapshot

    try:
        with snapshot(path) as source:
            yield source
    except SchemaError as error:
        raise UsageError(str(error), hint=error.hint) from None


@contextmanager
def _output(path: str | None) -> Generator[BinaryIO]:
    """Where an export goes; a file is made, for its owner alone, and is not left half written."""
    try:
        if path is None:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            try:
                yield file
            except BaseException:
                os.unlink(path)
                raise
    except BrokenPipeError:  # whoever reads has seen enough
        raise
    except OSError as error:
        raise StorageError(f"cannot write {path or 'the export'}: {error.strerror}", hint="") from error


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not interactive())


def _unreadable(error: StorageError) -> str:
    return f"cannot be read: {error.__cause__}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
