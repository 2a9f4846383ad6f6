"""Time and chance, as the product and the libraries below it see them in a simulation."""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from random import Random

import httpcore2._backends.anyio as httpcore_anyio
import pytest

from tests.simulation.loop import Loop, current

__all__ = ["UNIX", "reproducible"]

_runs = count(1)

UNIX = 1_700_000_000.0
"""The Unix time at which simulations begin."""


@contextmanager
def reproducible(loop: Loop, random: Random) -> Generator[None]:
    """Clocks show the time of the process that looks; secrets come from the seed; garbage waits."""

    def wall() -> float:
        return loop.now + UNIX + current().wall

    def token_bytes(count: int | None = None) -> bytes:
        return random.randbytes(32 if count is None else count)

    gc.disable()  # when it comes depends on what ran before; what it finds would run cleanup
    gc.freeze()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", wall)
            patch.setattr(time, "monotonic", loop.time)
            patch.setattr(secrets, "token_bytes", token_bytes)
            patch.setattr(os, "fsync", lambda fd: None)  # a client's machine does not die, and it costs time
            patch.setattr(httpcore_anyio, "is_socket_readable", lambda sock: sock.readable)
            yield
    finally:
        gc.unfreeze()
        gc.enable()
        if next(_runs) % 16 == 0:
            gc.collect()  # all that is left of runs looks long-lived, and would not be looked at
