"""An event loop in which nothing is left to chance: time is a number, and a seed says who comes first.

Several processes share the loop, each with clocks of its own. Within a process callbacks run in the
order asyncio promises; between processes nothing is promised, and the seed decides. A process can be
killed after any callback: from then on none of its callbacks runs, none of its code cleans up.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import sys
import warnings
from asyncio import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import Any, Final, TypeVar

__all__ = ["Loop", "Process", "SimulationError", "current"]

T = TypeVar("T")

_MOST_AT_ONCE: Final = 100_000
"""Callbacks without a step of time after which something runs in circles."""
_MOST: Final = 2_000_000
"""Callbacks after which no run is of use."""
_MOST_LOOKS: Final = 100_000
"""Looks at the clock within one callback after which it will not come back."""


class SimulationError(Exception):
    """What must not happen in any schedule: a failed task, a wait for nothing, a run in circles."""


class Process:
    """Something that can die on its own: whatever runs in its context is dropped from then on.

    Attributes:
        epoch: what its monotonic clock shows when the simulation begins.
        wall: what its wall clock shows then, in Unix time.
        steps: callbacks that it has run; `doomed` is the step that is its last.
        ends: called once when it is dead, and nothing of it is on the stack.
    """

    def __init__(self, loop: Loop, name: str, epoch: float = 0.0, wall: float = 0.0) -> None:
        self.loop = loop
        self.name = name
        self.epoch = epoch
        self.wall = wall
        self.alive = True
        self.steps = 0
        self.doomed: int | None = None
        self.ends: list[Callable[[], object]] = []
        self.ready: deque[Handle] = deque()
        self.stalled_until = 0.0
        self.shown = float("-inf")
        """The latest its clock has shown: a timer that is due is never early by a rounding error."""
        self.context = Context()
        self.context.run(_current.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something as this process."""
        return self.loop.create_task(work, context=self.context.copy())

    def kill(self) -> None:
        """Die now. Its tasks stay where they are."""
        if self.alive:
            self.alive = False
            self.loop.deaths.append(self)

    def doom(self, steps: int) -> None:
        """Die after so many more callbacks; at once if that is none."""
        self.doomed = self.steps + steps
        if not steps:
            self.kill()

    def stall(self, seconds: float) -> None:
        """Run nothing for a while: a machine that is busy elsewhere."""
        self.stalled_until = self.loop.now + seconds
        self.loop.schedule(self.stalled_until, _nothing)

    def __repr__(self) -> str:
        return self.name


_current: ContextVar[Process] = ContextVar("process")


def current() -> Process:
    """The process that is running."""
    return _current.get()


def _nothing() -> None:
    pass


class _Task(asyncio.Task[Any]):
    """A task that knows whose it is, and whose place in a set does not depend on its address."""

    _serials = count()

    def __init__(self, work: Any, *, loop: Loop, context: Context | None = None) -> None:
        self.serial = next(self._serials)
        self.process: Process = (context or copy_context())[_current]
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


class Loop(asyncio.BaseEventLoop):
    """The loop. `now` is the true time, in seconds since the simulation began.

    Attributes:
        nobody: a process for what belongs to none, the network for instance.
        connect, listen: make and accept connections; the network sets them.
        failures: what was raised and never retrieved in a process that lives.
        at_step: called before each callback, with the process whose it is.
    """

    connect: Callable[..., Coroutine[Any, Any, Any]]
    listen: Callable[..., Any]

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.failures: list[dict[str, Any]] = []
        self.deaths: list[Process] = []
        self.at_step: Callable[[Process], object] | None = None
        self._random = random
        self._timers: list[tuple[float, int, Handle]] = []
        self._serials = count()
        self._processes: list[Process] = []
        self._at_once = 0
        self._looks = 0
        self._graves: list[_Task] = []
        self._left: list[Any] = []
        self._generators: dict[int, Process] = {}
        _Task._serials = count()
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.nobody = self.process("nobody")

    def process(self, name: str, epoch: float = 0.0, wall: float = 0.0) -> Process:
        """A new process."""
        process = Process(self, name, epoch, wall)
        self._processes.append(process)
        return process

    # What asyncio asks ----------------------------------------------------------------------------

    def time(self) -> float:
        process = _current.get(None)
        if process is None:
            return self.now
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            self._looks = 0
            error = SimulationError("a callback that looks at the clock for ever")
            self.failures.append({"message": str(error), "exception": error})
            raise error
        return max(process.shown, self.now + process.epoch)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        process = handle._context.get(_current, self.nobody)
        heapq.heappush(self._timers, (max(self.now, when - process.epoch), next(self._serials), handle))
        return handle

    def schedule(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call something at a true time."""
        handle = Handle(callback, args, self, context or self.nobody.context)
        heapq.heappush(self._timers, (max(self.now, when), next(self._serials), handle))
        return handle

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> Handle:
        handle = Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def _enqueue(self, handle: Handle) -> None:
        process = handle._context.get(_current, self.nobody)
        if process.alive:
            process.ready.append(handle)

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        if executor is None:
            raise SimulationError("a thread: nobody could say when it is done")
        return super().run_in_executor(executor, func, *args)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await self.connect(protocol_factory, (host, port))

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Any, path: Any = None, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await self.connect(protocol_factory, path)

    async def create_unix_server(  # type: ignore[override]
        self, protocol_factory: Any, path: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        return self.listen(sock.getsockname(), current(), protocol_factory)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        process = task.process if isinstance(task, _Task) else _current.get(self.nobody)
        if process.alive:
            self.failures.append(context)

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        self._generators[id(agen)] = _current.get(self.nobody)

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        process = self._generators.pop(id(agen), self.nobody)
        if process.alive:
            self.call_soon(self.create_task, agen.aclose(), context=process.context.copy())
        else:
            self._left.append(agen)

    # Running ----------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        process = self._choose()
        handle = process.ready.popleft()
        if handle._cancelled:
            return
        self._looks = 0
        self.steps += 1
        process.steps += 1
        if isinstance(handle, TimerHandle):
            process.shown = max(process.shown, handle._when)
        if self.at_step is not None:
            self.at_step(process)
        handle._run()
        if process.doomed is not None and process.steps >= process.doomed:
            process.kill()
        while self.deaths:
            self._bury(self.deaths.pop(0))
        if self.failures:
            failed = self.failures[0]
            raise SimulationError(f"{process}: {failed.get('message')}") from failed.get("exception")
        self._at_once += 1
        if self._at_once > _MOST_AT_ONCE or self.steps > _MOST:
            raise SimulationError(f"{process} runs in circles at {self.now:.3f}: {handle!r}")

    def _choose(self) -> Process:
        """Whose turn it is. If nobody can run, time passes."""
        while True:
            able = [p for p in self._processes if p.ready and p.stalled_until <= self.now]
            if able:
                return able[0] if len(able) == 1 else self._random.choice(able)
            while self._timers and self._timers[0][2]._cancelled:
                heapq.heappop(self._timers)
            if not self._timers:
                raise SimulationError(f"nothing is left to happen at {self.now:.3f}")
            self.now = self._timers[0][0]
            self._at_once = 0
            while self._timers and self._timers[0][0] <= self.now:
                self._enqueue(heapq.heappop(self._timers)[2])

    # Death --------------------------------------------------------------------------------------------

    def tasks(self, process: Process) -> list[_Task]:
        """What a process is still about."""
        tasks = (task for task in asyncio.all_tasks(self) if isinstance(task, _Task))
        return sorted((t for t in tasks if t.process is process), key=lambda task: task.serial)

    def _bury(self, process: Process) -> None:
        """Keep its tasks from being collected: that would run their cleanup, in somebody else's time."""
        self._graves += self.tasks(process)  # those that only `ready` knows as well
        process.ready.clear()
        self._processes.remove(process)
        for end in process.ends:
            end()

    def close(self) -> None:
        """End everything. What was never to run again is let go here, where it can do no harm."""
        if not self.is_closed():
            for process in list(self._processes):
                process.kill()
            self.deaths.clear()
            self.nobody.context.copy().run(self._let_go)
        super().close()

    def _let_go(self) -> None:
        asyncio.events._set_running_loop(self)
        logging.disable()
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._close_tasks()
                self._left.clear()
                gc.collect()  # here, where what it finds is let go in silence as well
        finally:
            sys.unraisablehook = hook
            logging.disable(logging.NOTSET)
            asyncio.events._set_running_loop(None)

    def _close_tasks(self) -> None:
        gone: set[_Task] = set()
        while True:
            tasks = [t for t in (*self._graves, *asyncio.all_tasks(self)) if isinstance(t, _Task)]
            left = [task for task in tasks if task not in gone]
            if not left:
                self._graves.clear()
                return
            for task in left:
                gone.add(task)
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):  # if it awaits something in its cleanup, that goes nowhere
                    task.get_coro().close()  # type: ignore[union-attr]

    @staticmethod
    def _make_task(loop: Loop, work: Any, *, context: Context | None = None) -> _Task:
        task = _Task(work, loop=loop, context=context)
        if not task.process.alive:
            loop._graves.append(task)
        return task
