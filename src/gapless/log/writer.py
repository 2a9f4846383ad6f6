"""The one writer of a SQLite log: group commit.

Whatever writes arrive while a commit runs are the next transaction: one thread hand-off, one
statement and one sync of the file for all of them.
"""

# apsw's stubs name `collections.abc.Buffer`, which Python 3.11 has not.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

import apsw

from gapless.log.database import Files, sql, storage_error, transaction
from gapless.log.threads import Worker

__all__ = ["DONE", "REFUSED", "Step", "Writer"]

REFUSED: Final = 0
"""What a step answers where it changed nothing."""

DONE: Final = -1
"""What stands for no answer."""

_CHUNK: Final = 256
"""The most rows one statement takes, and one sweep deletes (as the files in `sql/` have it too)."""

_Value = bytes | str | int | float | None
_Row = tuple[_Value, ...]


class Step(NamedTuple):
    """One change of the log: a row of the view `step`, but for its `n`. `sql/writer.sql` has the columns."""

    op: str | None = None
    key: bytes | None = None
    number: int | None = None
    mark: bytes | None = None
    data: bytes | str | None = None
    at: float | None = None
    owner: int | None = None
    fence: int | None = None
    expect: int | None = None
    before: int | None = None
    received: int | None = None
    dispatched: int | None = None
    record: bytes | None = None
    floor: int | None = None
    floor_link: bytes | None = None


_NOTHING: Final = Step()
_ROW: Final = f"({', '.join('?' * (1 + len(_NOTHING)))})"


@cache
def _insert(rows: int) -> str:
    return f"INSERT INTO step VALUES {', '.join([_ROW] * rows)}"


@dataclass(frozen=True, slots=True)
class _Job:
    """Steps that belong together, and who waits for the answer to them."""

    steps: tuple[Step, ...]
    done: asyncio.Future[int]


class Writer:
    """Takes what has gathered, commits it, tells those who wait; one group after another.

    Args:
        path: the log's, for those who read errors.
        thread: where it works.
        waiting: entered while somebody on the loop waits for it.
    """

    def __init__(
        self,
        db: apsw.Connection,
        path: str,
        files: Files,
        thread: Worker,
        waiting: AbstractContextManager[object],
    ) -> None:
        self.db = db
        self._path = path
        self._files = files
        self._thread = thread
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self._awake = False
        self._answers: dict[int, int] = {}
        self._litter = True  # until looked: the last process may have left some
        db.create_scalar_function("answer", self._answered, 2)
        db.create_scalar_function("litter", self._found_litter, 0)
        self._wake()

    async def step(self, *steps: Step) -> int:
        """Hand over steps that belong together; their answer, or `DONE`, once they are durable."""
        done: asyncio.Future[int] = self._loop.create_future()
        self._jobs.append(_Job(steps, done))
        self._wake()
        with self._waiting:
            return await done

    def close(self) -> None:
        """Close the file. To be called in its own thread, the last thing there."""
        self._litter = False
        self.db.close()
        self._files.close()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._thread.submit(self._turn)

    def _turn(self) -> None:
        """One group, and where there is litter one chunk of that."""
        self._awake = False  # before it looks, so that nothing is handed over unseen
        if self._litter:
            self._tidy()
        jobs: list[_Job] = []
        while self._jobs:
            jobs.append(self._jobs.popleft())
        if jobs:
            self._commit(jobs)
        if self._litter:
            self._wake()

    def _commit(self, jobs: list[_Job]) -> None:
        failure: Exception | None = None
        try:
            self._insert([(n, *step) for n, job in enumerate(jobs) for step in job.steps])
            self._files.check()
        except Exception as error:  # whatever it is, those who wait must hear of it
            failure = error
        answers, self._answers = self._answers, {}
        self._loop.call_soon_threadsafe(self._deliver, jobs, answers, failure)

    def _insert(self, rows: list[_Row]) -> None:
        if len(rows) > _CHUNK:
            with transaction(self.db):
                for at in range(0, len(rows), _CHUNK):
                    self._insert(rows[at : at + _CHUNK])
            return
        # Rows that do nothing fill up to a power of two, so that few statements serve all groups.
        size = 1 << (len(rows) - 1).bit_length()
        rows += [(None, *_NOTHING)] * (size - len(rows))
        values: list[_Value] = list(chain.from_iterable(rows))
        self.db.execute(_insert(size), values)

    def _deliver(self, jobs: list[_Job], answers: dict[int, int], failure: Exception | None) -> None:
        for n, job in enumerate(jobs):
            if job.done.done():  # its caller was cancelled
                continue
            if failure is None:
                job.done.set_result(answers.get(n, DONE))
            else:
                job.done.set_exception(storage_error(self._path, "written", failure))

    def _answered(self, *answer: Any) -> None:
        n, value = answer
        self._answers[n] = value

    def _found_litter(self, *_: object) -> None:
        self._litter = True

    def _tidy(self) -> None:
        before = self.db.total_changes()
        try:
            with transaction(self.db):
                self.db.execute(sql("sweep.sql"))
        except Exception:
            # A full disk, say. It costs nobody anything but space: the next eviction tries again.
            self._litter = False
        else:
            self._litter = self.db.total_changes() - before >= _CHUNK
