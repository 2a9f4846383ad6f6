"""The system's own disk, with a word to say before everything that SQLite does to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import apsw

_numbers = itertools.count()


@dataclass
class Disk:
    """`before` is told what is about to be done, and to which file; what it raises happens instead."""

    name: str
    before: Callable[[str, str], None] = lambda what, path: None


@contextmanager
def mounted() -> Iterator[Disk]:
    """A disk, for as long as it is entered; `vfs` of a log is its name."""
    disk = Disk(f"disk {next(_numbers)}")
    vfs = _Vfs(disk)
    try:
        yield disk
    finally:
        vfs.unregister()


class _Vfs(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.name, "")
        self._disk = disk

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self._disk.before("delete", filename)
        super().xDelete(filename, syncdir)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        self._disk = disk
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        self._disk.before("read", self._path)
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.before("write", self._path)
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._disk.before("truncate", self._path)
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self._disk.before("sync", self._path)
        super().xSync(flags)
