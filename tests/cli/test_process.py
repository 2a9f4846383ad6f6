"""The serving process and its memory."""

from __future__ import annotations

import os
import threading
from itertools import count

import pytest

from gapless.cli import process
from gapless.cli.process import give_back_memory
from tests.soak.sampling import resident

BLOCK = 16 * 1024
"""Bytes that lie in the heap, in glibc's eyes."""
COUNT = 4096
PAGES = COUNT * BLOCK // 2
"""Bytes that are freed there at least, in whole pages, between what stays."""


class Times(threading.Event):
    """Time passes so often, then it is the end."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is the end."""
        self._left -= 1
        self.waited.append(timeout)
        return self._left < 0


def test_what_is_freed_between_things_that_stay_is_given_back() -> None:
    held = [bytearray(BLOCK) for _ in range(COUNT)]
    stays = held[::4]
    del held
    before = resident(os.getpid())
    give_back_memory(Times(1))
    assert resident(os.getpid()) < before - PAGES
    assert len(stays) == COUNT // 4


@pytest.mark.parametrize(("taken", "then"), [(0.002, 10.0), (0.07, 70.0)])
def test_giving_back_takes_no_more_than_a_thousandth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, taken: float, then: float
) -> None:
    ticks = count()
    monkeypatch.setattr(process.time, "thread_time", lambda: next(ticks) * taken)
    stopping = Times(1)
    give_back_memory(stopping, 10.0)
    assert stopping.waited == [10.0, pytest.approx(then)]
