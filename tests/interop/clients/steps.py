"""What the Python clients share; it runs in their environments, so it imports nothing of the project."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["Notes", "cancelled", "expect", "settled", "text"]

PATIENCE = 15.0
"""Seconds that one step may take."""


class Notes:
    """What became of each step: `ok`, or what was wrong."""

    def __init__(self) -> None:
        self._steps: dict[str, str] = {}

    def passed(self, name: str) -> None:
        self._steps[name] = "ok"

    @asynccontextmanager
    async def step(self, name: str) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(PATIENCE):
                yield
        except Exception as error:
            self._steps[name] = f"{type(error).__name__}: {error}"
        else:
            self.passed(name)

    def tell(self) -> None:
        print(json.dumps(self._steps))


def expect(good: bool, otherwise: str) -> None:
    if not good:
        raise AssertionError(otherwise)


def text(result: Any) -> str:
    return result.content[0].text


async def settled(seen: list[float], rungs: int) -> None:
    """Notifications may be handled after the result that they precede."""
    for _ in range(20):
        if len(seen) >= rungs:
            break
        await asyncio.sleep(0.05)
    expect(seen == list(range(1, rungs + 1)), f"of {rungs} steps it saw {seen}")


async def cancelled(count: Callable[[], Awaitable[Any]]) -> None:
    """The server has to hear of it, which takes as long as it takes."""
    for _ in range(40):
        if text(await count()) == "1":
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the server did not hear of it")
