"""The serving process and its memory."""

from __future__ import annotations

import os
import threading

from gapless.cli.process import give_back_memory
from tests.soak.sampling import resident

BLOCK = 16 * 1024
"""Bytes that lie in the heap, in glibc's eyes."""
COUNT = 4096
PAGES = COUNT * BLOCK // 2
"""Bytes that are freed there at least, in whole pages, between what stays."""


class Once(threading.Event):
    """Time passes once, then it is the end."""

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is the end."""
        ended = self.is_set()
        self.set()
        return ended


def test_what_is_freed_between_things_that_stay_is_given_back() -> None:
    held = [bytearray(BLOCK) for _ in range(COUNT)]
    stays = held[::4]
    del held
    before = resident(os.getpid())
    give_back_memory(Once())
    assert resident(os.getpid()) < before - PAGES
    assert len(stays) == COUNT // 4
