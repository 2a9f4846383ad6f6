"""What a live session fails with for now, and may succeed with later."""

from __future__ import annotations

from gapless.errors import GaplessError

__all__ = ["StorageFault"]


class StorageFault(GaplessError):
    """The log does not take writes now; nothing was acknowledged, and the write is tried again."""

    code = "storage"
