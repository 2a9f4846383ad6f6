"""What wakes a connection's loop: no wake is missed between two looks, and none is given to who has gone."""

from __future__ import annotations

import asyncio

from gapless.server.attached import Wake


async def test_who_was_woken_before_waiting_does_not_wait() -> None:
    wake = Wake()
    wake.set()
    await asyncio.wait_for(wake.wait(), 1)
    wake.clear()
    waiting = asyncio.ensure_future(wake.wait())
    await asyncio.sleep(0)
    assert not waiting.done(), "what it was woken for was looked at"
    wake.set()
    wake.set()
    await asyncio.wait_for(waiting, 1)


async def test_a_wait_that_was_given_up_takes_no_wake_with_it() -> None:
    wake = Wake()
    waiting = asyncio.ensure_future(wake.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    wake.set()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await asyncio.wait_for(wake.wait(), 1)
