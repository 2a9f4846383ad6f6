"""What the Python clients share; it runs in their environments, so it imports nothing of the project."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

__all__ = ["Notes", "text", "walk"]

PATIENCE = 15.0
"""Seconds that one step may take."""


class Calls(Protocol):
    """Makes a call, and says of its progress what comes."""

    def __call__(self, tool: str, arguments: dict[str, Any], progress: Any = None) -> Awaitable[Any]: ...


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


async def walk(
    notes: Notes,
    listed: Callable[[], Awaitable[list[Any]]],
    call: Calls,
    cancel: Callable[[asyncio.Task[Any]], Awaitable[None]],
) -> None:
    """All steps but the first; `cancel` cancels the call that a task makes."""
    async with notes.step("list"):
        expect("climb" in [tool.name for tool in await listed()], "climb is not listed")
    for step, rungs in (("progress", 4), ("resume", 12)):
        async with notes.step(step):
            seen: list[float] = []

            async def climbed(
                progress: float, total: float | None, message: str | None, seen: list[float] = seen
            ) -> None:
                seen.append(progress)

            result = await call("climb", {"steps": rungs, "delay": 0.05}, climbed)
            expect(text(result) == f"climbed {rungs} steps", f"it ended with {text(result)}")
            await settled(seen, rungs)
    async with notes.step("question"):
        expect(text(await call("ask", {})) == "a ladder of 3 m", "the answer was lost")
    async with notes.step("cancellation"):
        begun = asyncio.Event()

        async def lingering(progress: float, total: float | None, message: str | None) -> None:
            begun.set()

        task = asyncio.ensure_future(call("linger", {}, lingering))
        await asyncio.wait_for(begun.wait(), 10)
        await cancel(task)
        await cancelled(lambda: call("cancellations", {}))
        task.cancel()
        await asyncio.wait({task})
