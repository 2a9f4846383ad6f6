"""Where a log that blocks does its work: in threads, or, for a simulation, on the loop itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Final, ParamSpec, Protocol, TypeVar

__all__ = ["Threads", "Worker", "done_by", "inline", "threads"]

_TURN_EVERY: Final = 0.002
_TURN: Final = 0.00001
"""Seconds between two moments in which the loop stands aside, and of one (some 60 µs in effect)."""

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Protocol):
    """Does one thing after another, in the order they were given to it."""

    def submit(self, work: Callable[[], None], /) -> object:
        """Have something done soon. What it raises is its own affair."""
        ...

    def shutdown(self, wait: bool = True) -> None:
        """End it once all of that is done."""
        ...


@dataclass(frozen=True, slots=True)
class Threads:
    """One for the writer and one for the reader.

    `waiting` is entered while somebody on the loop waits for one of them.
    """

    writer: Worker
    reader: Executor
    waiting: AbstractContextManager[object]

    def shutdown(self, wait: bool = True) -> None:
        """End them, once they have done what they were given."""
        self.writer.shutdown(wait)
        self.reader.shutdown(wait)


def threads() -> Threads:
    """Two threads, for the loop that runs."""
    return Threads(
        _Thread("gapless-log-writer"),
        ThreadPoolExecutor(1, "gapless-log-reader"),
        _Turns(asyncio.get_running_loop()),
    )


def inline() -> Threads:
    """No threads: everything happens in callbacks of the loop that runs, in an order that repeats itself."""
    loop = _Inline(asyncio.get_running_loop())
    return Threads(loop, loop, nullcontext())


class _Thread:
    """A worker that costs less than an executor, which makes a future for everything."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], /) -> None:
        self._queue.put(work)

    def shutdown(self, wait: bool = True) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        for work in iter(self._queue.get, None):
            work()


class _Inline(Executor):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._loop.call_soon(_run, future, partial(fn, *args, **kwargs))
        return future


async def done_by(worker: Worker, work: Callable[[], T]) -> T:
    """Have something done, and wait until it is."""
    future: Future[T] = Future()
    worker.submit(partial(_run, future, work))
    return await asyncio.wrap_future(future)


def _run(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


class _Turns:
    """Lets threads have the interpreter while somebody on the loop waits for one of them.

    A loop without an idle moment gives the interpreter up once a turn, for less time than a
    thread takes to wake up, and as long as it does so every few milliseconds CPython never makes
    it wait for one. Commits of 20 s were seen that way. So while a thread is waited for, the loop
    stands aside now and then, for just as long as waking up takes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting = 0
        self._armed = False

    def __enter__(self) -> None:
        self._waiting += 1
        if not self._armed:
            self._armed = True
            self._loop.call_later(_TURN_EVERY, self._stand_aside)

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1

    def _stand_aside(self) -> None:
        self._armed = self._waiting > 0
        if self._armed:
            time.sleep(_TURN)
            self._loop.call_later(_TURN_EVERY, self._stand_aside)
