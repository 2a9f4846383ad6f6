"""stdin and stdout of a command that a host has started, for as long as the host stays."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

__all__ = ["Pipes"]

_CHUNK: Final = 64 * 1024

T = TypeVar("T")


class Pipes:
    """Bytes in, lines out. From now on stdout is this object's alone: what others print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._reader = _Thread()
        self._writer = _Thread()

    async def read(self) -> bytes:
        """The next bytes, at most 64 KiB; none once the host has left."""
        return await self._reader.call(_read)

    async def write(self, line: bytes) -> None:
        """Write a line, whole or not at all if the caller is cancelled; returns when the pipe has it.

        Raises:
            OSError: the host does not take it, and has left if that is a `BrokenPipeError`.
        """
        await self._writer.call(lambda: _write(self._out, line + b"\n"))


def _read() -> bytes:
    try:
        return os.read(0, _CHUNK)
    except OSError:  # a terminal that is gone, say
        return b""


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


class _Thread:
    """Makes one blocking call at a time.

    A thread can wait for whatever a host has put there, a pipe, a file or a terminal. This one, unlike an
    executor's, does not hold up the end of the process: nothing can interrupt a read.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._calls.put((function, future))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except OSError as error:
                future.set_exception(error)
