"""What wakes a connection's loop: no wake is missed between two looks, and none is given to who has gone."""

from __future__ import annotations

import asyncio

import pytest

from gapless.server.attached import Cuttable, Wake


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


@pytest.mark.parametrize("cuts", [1, 2])
async def test_a_block_that_is_cut_ends_and_its_task_goes_on(cuts: int) -> None:
    cuttable = Cuttable()

    async def task() -> str:
        async with cuttable:
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # no cancellation is left over
        return "went on"

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    for _ in range(cuts):
        cuttable.cut()
    assert await asyncio.wait_for(running, 1) == "went on"
    cuttable.cut()


async def test_what_is_raised_in_a_block_gets_out_of_it_and_so_does_another_s_cancellation() -> None:
    cuttable = Cuttable()
    with pytest.raises(TimeoutError, match="within"):
        async with cuttable:
            raise TimeoutError("within")

    async def task() -> None:
        async with Cuttable():
            await asyncio.Event().wait()

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
