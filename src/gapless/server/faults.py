"""What a live session fails with for now, and may succeed with later."""

from __future__ import annotations

from typing import Final

from gapless.errors import GaplessError

__all__ = ["RETRY_STORAGE", "StorageFault"]

RETRY_STORAGE: Final = 0.25
"""Seconds until what the log did not take, or did not tell, is tried again."""


class StorageFault(GaplessError):
    """The log does not take writes now; nothing was acknowledged, and the write is tried again."""

    code = "storage"
