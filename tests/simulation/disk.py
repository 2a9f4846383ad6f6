"""A machine's disk below SQLite: it knows what is durable, and what a death would leave of the rest.

An apsw VFS passes everything on to the system's own, in a directory of the test's, and keeps a record:
of each file its content as of its last sync, and what was written to it since. If only a process
dies, all of that stays. If the machine dies, what was not synced may be there or not, in any
combination, and torn between two sectors; shared memory is gone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, ParamSpec, TypeVar

import apsw

from gapless.log.threads import Threads
from tests.simulation.loop import Loop, Process
from tests.simulation.trace import Trace

__all__ = ["Disk"]

P = ParamSpec("P")
T = TypeVar("T")

_SECTOR: Final = 512
_numbers: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class _Written:
    """A write that no sync has followed."""

    offset: int
    data: bytes

    def apply(self, content: bytearray, random: Random | None = None) -> None:
        """Put it there; with `random` only some of its sectors, as a write that was cut short."""
        step = len(self.data) if random is None else _SECTOR
        for at in range(0, len(self.data), max(step, 1)):
            if random is None or random.random() < 0.5:
                where = self.offset + at
                part = self.data[at : at + step]
                content.extend(bytes(max(0, where + len(part) - len(content))))
                content[where : where + len(part)] = part


@dataclass(frozen=True, slots=True)
class _Cut:
    """A truncation that no sync has followed."""

    size: int

    def apply(self, content: bytearray, random: Random | None = None) -> None:
        """Cut it off, or not."""
        if random is None or random.random() < 0.5:
            del content[self.size :]


@dataclass(slots=True)
class _Kept:
    """One file: what is durable (`None`: not even its name), what was done since, and if it is deleted."""

    durable: bytearray | None = None
    since: list[_Written | _Cut] = field(default_factory=list["_Written | _Cut"])
    deleted: bool = False

    def sync(self) -> None:
        content = self.durable if self.durable is not None else bytearray()
        for change in self.since:
            change.apply(content)
        self.durable = content
        self.since.clear()

    def after_death(self, random: Random) -> bytes | None:
        """What a machine finds of it when it is up again; `None`: no such file."""
        if self.durable is None and random.random() < 0.5:
            return None
        if self.deleted and random.random() < 0.5:
            return None
        content = bytearray(self.durable or b"")
        mood = random.choice(("all", "none", "first", "some", "some"))
        first = random.randrange(len(self.since) + 1)
        for number, change in enumerate(self.since):
            if mood == "all" or (mood == "first" and number < first):
                change.apply(content)
            elif mood == "some" and random.random() < 0.7:
                change.apply(content, random if random.random() < 0.3 else None)
        return bytes(content)


class Disk:
    """One machine's directory.

    Attributes:
        latency: the least and the most seconds that something usually takes.
        full: writes fail as on a full disk. `broken`: writes and syncs fail. For as long as they are set.
        operations: writes, syncs, truncations and deletions so far; `doomed` is the number of the one
            that its process does not live to see.
    """

    def __init__(self, loop: Loop, root: Path, random: Random, trace: Trace) -> None:
        self.loop = loop
        self.latency = (0.0001, 0.005)
        self.root = root
        self.random = random
        self.trace = trace
        self.full = False
        self.broken = False
        self.operations = 0
        self.doomed: int | None = None
        self._files: dict[str, _Kept] = {}
        self._mounted: list[_Vfs] = []

    def delay(self) -> float:
        """Seconds that a task for it takes."""
        low, high = self.latency
        often = self.random.random() < 0.95
        return self.random.uniform(low, high) if often else self.random.uniform(high, 20 * high)

    def threads(self) -> Threads:
        """What a log has instead of threads."""
        return Threads(Worker(self), Worker(self), nullcontext())

    def mount(self, process: Process) -> str:
        """The name of a VFS for `process`; what it has open goes with it."""
        vfs = _Vfs(self, process, f"simulated-{next(_numbers)}")
        self._mounted.append(vfs)
        process.ends.append(vfs.release)
        return vfs.name

    def crash(self) -> None:
        """The machine dies, and comes back. Its processes are dead by now."""
        for path, kept in sorted(self._files.items()):
            left = kept.after_death(self.random)
            size = None if left is None else len(left)
            self.trace.note("disk", f"finds {size} of {os.path.basename(path)}")
            if left is None:
                Path(path).unlink(missing_ok=True)
            else:
                Path(path).write_bytes(left)
        for path in self.root.glob("*-shm"):
            path.unlink()
        self._files = {p: _Kept(bytearray(Path(p).read_bytes())) for p in self._files if Path(p).exists()}

    def unmount(self) -> None:
        """Let go of everything."""
        for vfs in self._mounted:
            vfs.release()

    # What the VFS reports -----------------------------------------------------------------------------

    def file(self, path: str) -> _Kept:
        """What is known of a file."""
        kept = self._files.get(path)
        if kept is None:
            content = Path(path).read_bytes() if Path(path).exists() else b""
            kept = self._files[path] = _Kept(bytearray(content) if content else None)
        return kept

    def sync_directory(self) -> None:
        """What is deleted is deleted for good."""
        for path in [path for path, kept in self._files.items() if kept.deleted]:
            del self._files[path]

    def before(self, process: Process, what: str, path: str) -> None:
        """Something is about to be done.

        Raises:
            apsw.Error: it is not.
        """
        if process.alive:
            self.operations += 1
            if what != "write":
                self.trace.note("disk", f"{what} {os.path.basename(path)} ({self.operations})")
            if self.doomed is not None and self.operations >= self.doomed:
                self.doomed = None
                process.kill()
        if not process.alive:
            raise apsw.IOError("its process is dead")
        if self.broken:
            raise apsw.IOError("simulated: the disk is broken")
        if self.full and what == "write":
            raise apsw.FullError("simulated: the disk is full")


class Worker(Executor):
    """Where a log's work is done, in order: on the loop, each thing when the disk is done with it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._free_at = 0.0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        loop = self._disk.loop
        future: Future[T] = Future()
        self._free_at = max(self._free_at, loop.time()) + self._disk.delay()
        loop.call_at(self._free_at, _run, future, lambda: fn(*args, **kwargs))
        return future


def _run(future: Future[T], work: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


class _Vfs(apsw.VFS):
    """A process's way to the disk."""

    def __init__(self, disk: Disk, process: Process, name: str) -> None:
        self.name = name
        self.base = ""
        self._disk = disk
        self._process = process
        self._released = False
        super().__init__(name, self.base)

    def release(self) -> None:
        """Close what its process had open, without a trace: not even the log's own tidying up."""
        if self._released:
            return
        self._released = True
        self._process.alive = False
        for connection in apsw.connections():
            if connection.open_vfs == self.name:
                with suppress(apsw.Error):  # it wanted to write
                    connection.close(True)
        self.unregister()

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self._disk, self._process, self.base, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        try:
            self._disk.before(self._process, "delete", filename)
        except apsw.IOError:
            if self._process.alive:
                raise
            return
        super().xDelete(filename, syncdir)
        self._disk.file(filename).deleted = True
        if syncdir:
            self._disk.sync_directory()


class _File(apsw.VFSFile):
    """An open file."""

    def __init__(self, disk: Disk, process: Process, base: str, name: Any, flags: list[int]) -> None:
        self._disk = disk
        self._process = process
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        super().__init__(base, name, flags)
        self._kept = disk.file(self._path)
        self._kept.deleted = False

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.before(self._process, "write", self._path)
        super().xWrite(data, offset)
        self._kept.since.append(_Written(offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        self._disk.before(self._process, "truncate", self._path)
        super().xTruncate(newsize)
        self._kept.since.append(_Cut(newsize))

    def xSync(self, flags: int) -> None:
        self._disk.before(self._process, "sync", self._path)
        if self._kept.durable is None:
            self._disk.sync_directory()  # as SQLite does with the first sync of a journal that it made
        self._kept.sync()  # the system's own sync would only cost time
