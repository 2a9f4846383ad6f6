"""N1: what a process knows of its own lease, and of the silence of others, by its own clock alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gapless.errors import StorageError
from gapless.log.base import Owner, OwnerId, SessionKey
from gapless.log.memory import MemoryLog
from gapless.protocol.cursor import Link
from gapless.server.lease import Lease
from tests.server.harness import soon

SECONDS = 1000.0
"""A lease that nobody renews in time: what a test sees, it has asked for."""


class Log(MemoryLog):
    """A log whose signs of life take time, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.signing: Callable[[], Awaitable[None]] | None = None
        self.signs = 0

    async def beat(self, owner: OwnerId) -> int:
        self.signs += 1
        if self.full:
            raise StorageError("no space left")
        if self.signing is not None:
            await self.signing()
        return await super().beat(owner)


class Process:
    """A process with a lease, and a clock of its own."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.now = 0.0
        self.losses = 0
        self.blind = False
        self.lease = Lease(log, SECONDS, self._taken)
        self.lease._clock = lambda: self.now

    async def _taken(self) -> None:
        if self.blind:
            raise StorageError("a bad sector")
        self.held_before = self.lease.held
        self.losses += 1

    async def other(self) -> Owner:
        """What it sees of the process that is not it."""
        (other,) = (owner for owner in await self.lease.watch() if owner.id != self.lease.id)
        return other


@pytest.fixture
async def log() -> Log:
    return Log()


@pytest.fixture
async def process(log: Log) -> AsyncIterator[Process]:
    process = Process(log)
    await process.lease.start("here")
    yield process
    await process.lease.close()


async def take_one(log: Log, process: Process) -> None:
    """Somebody takes a session from a process."""
    key = SessionKey(bytes(32))
    await log.create(key, b"", Link(bytes(8)), process.lease.id)
    await log.acquire(key, 0, await log.join("elsewhere"))


# One's own -----------------------------------------------------------------------------------------


@pytest.mark.rule("N1")
async def test_a_lease_that_is_held_costs_no_sign_of_life(process: Process) -> None:
    process.now = SECONDS - 1
    await process.lease.ensure()
    assert process.log.signs == 0
    process.now = SECONDS
    await process.lease.ensure()
    assert process.log.signs == 1


@pytest.mark.rule("N1")
async def test_a_lease_counts_from_before_its_sign_of_life(process: Process) -> None:
    async def slowly() -> None:
        process.now += 400

    process.log.signing = slowly
    process.now = SECONDS
    await process.lease.ensure()
    process.now = 2 * SECONDS - 1
    assert process.lease.held
    process.now = 2 * SECONDS
    assert not process.lease.held


@pytest.mark.rule("N1")
async def test_a_sign_that_took_longer_than_a_lease_gives_none(process: Process) -> None:
    """The process stood still while it gave it: what it was told with that may be long out of date."""

    async def stand_still() -> None:
        if process.log.signs == 1:
            process.now += 2 * SECONDS

    process.log.signing = stand_still
    process.now = SECONDS
    await process.lease.ensure()
    assert process.lease.held
    assert process.log.signs == 2


@pytest.mark.timeout(10)
@pytest.mark.rule("N1")
async def test_a_sign_that_is_just_over_is_not_waited_for_again(process: Process) -> None:
    """It gave no lease, and to wait for what is done is not to wait: nothing else would ever run."""
    given = asyncio.Event()

    async def late() -> None:
        await given.wait()
        await process.lease.ensure()

    async def stand_still() -> None:
        if not given.is_set():
            process.now += 2 * SECONDS
            given.set()

    process.log.signing = stand_still
    process.now = SECONDS
    async with asyncio.TaskGroup() as group:
        group.create_task(late())
        group.create_task(process.lease.ensure())
    assert process.lease.held
    assert process.log.signs == 2


@pytest.mark.rule("N1")
async def test_losses_are_looked_into_before_the_lease_is_held_again(log: Log, process: Process) -> None:
    await take_one(log, process)
    process.now = SECONDS
    await process.lease.ensure()
    assert (process.losses, process.held_before) == (1, False)
    process.now = 2 * SECONDS
    await process.lease.ensure()
    assert process.losses == 1, "once"


@pytest.mark.rule("N1")
async def test_losses_that_could_not_be_looked_into_are_looked_into_again(log: Log, process: Process) -> None:
    await take_one(log, process)
    process.blind, process.now = True, SECONDS
    for _ in range(2):
        with pytest.raises(StorageError):
            await process.lease.ensure()
    process.blind = False
    await process.lease.ensure()
    assert process.losses == 1


@pytest.mark.rule("N1")
async def test_a_process_that_was_taken_for_dead_is_another_owner_and_looks_into_everything(
    log: Log, process: Process
) -> None:
    before = process.lease.id
    await log.leave(before)
    process.blind, process.now = True, SECONDS
    with pytest.raises(StorageError):
        await process.lease.ensure()
    assert not process.lease.held
    process.blind = False
    await process.lease.ensure()
    assert process.losses == 1
    assert process.lease.id != before
    assert [(owner.id, owner.address) for owner in await log.owners()] == [(process.lease.id, "here")]


@pytest.mark.rule("N1")
async def test_a_lease_for_which_no_sign_can_be_given_is_not_held(process: Process) -> None:
    process.log.full, process.now = True, SECONDS
    with pytest.raises(StorageError):
        await process.lease.ensure()
    process.log.full = False
    await process.lease.ensure()


@pytest.mark.rule("N1")
async def test_all_who_want_a_sign_at_the_same_time_get_one(process: Process) -> None:
    process.now = SECONDS
    await asyncio.gather(*(process.lease.ensure() for _ in range(8)))
    assert process.log.signs == 1


# Others --------------------------------------------------------------------------------------------


@pytest.mark.rule("N1")
async def test_silence_counts_from_when_the_last_sign_was_seen(log: Log, process: Process) -> None:
    other = await log.join("there")
    assert (await process.other()).id == other
    process.now = 900
    await log.beat(other)
    await process.other()
    process.now = 1899
    await process.other()
    assert not process.lease.silent(other)
    process.now = 1900
    assert process.lease.silent(other)
    await log.beat(other)
    assert (await process.other()).beat == 2
    assert not process.lease.silent(other), "it has shown life"


@pytest.mark.rule("N1")
async def test_who_waits_for_the_silence_of_one_that_is_struck_off_waits_no_more(log: Log) -> None:
    lease = Lease(log, 0.3, _nothing)
    await lease.start("here")
    other = await log.join("there")
    await lease.watch()
    waiting = asyncio.create_task(lease.silence(other))
    await log.leave(other)
    await soon(waiting)
    await lease.close()


@pytest.mark.rule("N1")
async def test_who_waits_for_silence_is_told_of_it(log: Log) -> None:
    lease = Lease(log, 0.1, _nothing)
    await lease.start("here")
    other = await log.join("there")
    await lease.watch()
    await soon(lease.silence(other))
    assert lease.silent(other)
    await lease.close()


@pytest.mark.rule("N1")
async def test_a_process_that_ends_is_nobodys_owner(log: Log) -> None:
    lease = Lease(log, SECONDS, _nothing)
    await lease.start("here")
    await lease.close()
    assert await log.owners() == ()


async def _nothing() -> None:
    raise AssertionError("nothing was lost")
