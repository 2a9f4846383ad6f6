"""The serving process and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

MAPPED: Final = """
import ctypes
from gapless.cli.process import give_back_memory

class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep"
    )]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Figures
give_back_memory()
bytearray(3 * 2**20)  # freed at once: from then on glibc would keep what is smaller
before = mallinfo().hblkhd
kept = bytearray(2**20)
print(mallinfo().hblkhd - before)
"""


@pytest.mark.parametrize(
    ("set_up", "mapped"),
    [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False)],
)
def test_a_large_block_is_one_that_is_given_back_unless_somebody_set_that_up(
    set_up: dict[str, str], mapped: bool
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = subprocess.run(
        [sys.executable, "-c", MAPPED],
        env=environ | set_up,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert (int(told.stdout) >= 2**20) is mapped
