"""This process among those that serve a log: its own signs of life, and the others' silence (N1).

No clock is ever compared with another's. An owner counts from before it wrote its sign of life; who
watches it counts from after it has read that; so, as long as clocks run at much the same rate, an
owner stops trusting its lease before anybody else does. What wall clocks say, and whether they jump,
is of no account. And should all this fail, by a machine that stood still say, the fence in the log
refuses whoever was too slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gapless.errors import ConflictError, StorageError
from gapless.log.base import Log, Owner, OwnerId

__all__ = ["Lease"]

_log: Final = logging.getLogger("gapless.lease")
_BEATS: Final = 3
"""Signs of life in a lease."""


class Lease:
    """The right of this process to serve the sessions that are its own.

    Args:
        seconds: how long it holds after a sign of life.
        taken: called when a session was taken from this process, before anything else is done.
    """

    def __init__(self, log: Log, seconds: float, taken: Callable[[], Awaitable[None]]) -> None:
        self._log = log
        self._seconds = seconds
        self._taken = taken
        self._clock = asyncio.get_running_loop().time
        self._address = ""
        self._until = 0.0
        self._losses: int | None = 0
        """As far as they were looked into; `None`: everything may be lost."""
        self._seen: dict[OwnerId, tuple[int, float]] = {}
        self._beating: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.id = OwnerId(0)
        self.lost = 0
        """Times that this process was taken for dead."""

    async def start(self, address: str) -> None:
        """Become an owner, whom others reach at `address`.

        Raises:
            StorageError: the log could not be written.
        """
        self._address = address
        started = self._clock()
        self.id = await self._log.join(address)
        self._until = started + self._seconds
        await self.watch()
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Be no owner any more: whoever asks for a session may have it at once."""
        for task in (self._beating, self._renewing):
            if task is not None:
                task.cancel()
        try:
            await self._log.leave(self.id)
        except StorageError as error:
            _log.warning("%s", error.line)  # then the others wait until the lease has run out

    @property
    def held(self) -> bool:
        """Whether this process may act for its sessions."""
        return self._clock() < self._until

    async def ensure(self) -> None:
        """Return when the lease is held: at once, or by a sign of life, after which losses are known.

        Raises:
            StorageError: none could be given.
        """
        while not self.held:  # a sign may take longer than a lease: this process was stopped, say
            await self._sign()

    def silent(self, owner: OwnerId) -> bool:
        """Whether another owner has shown no life for as long as a lease; of a stranger that is not known."""
        seen = self._seen.get(owner)
        return seen is not None and self._clock() - seen[1] >= self._seconds

    async def silence(self, owner: OwnerId) -> None:
        """Return when another owner is silent or struck off: within two leases, if it shows life no more."""
        while owner in self._seen and not self.silent(owner):
            _, since = self._seen[owner]
            left = since + self._seconds - self._clock()
            await asyncio.sleep(max(min(left, self._seconds / _BEATS), 0.01))

    async def _sign(self) -> None:
        """Give a sign of life, one for all who want it at the same time."""
        if self._renewing is None or self._renewing.done():  # one that is done would not be waited for
            self._renewing = asyncio.create_task(self._renew())
            self._renewing.add_done_callback(_noted)
        await asyncio.shield(self._renewing)

    async def _renew(self) -> None:
        started = self._clock()
        try:
            losses = await self._log.beat(self.id)
        except ConflictError:
            _log.warning("this process was taken for dead")
            self.lost += 1
            self.id, losses = await self._log.join(self._address), 0
            self._losses = None
        if losses != self._losses:
            await self._taken()
            self._losses = losses  # not before: a look that failed is tried again
        self._until = started + self._seconds

    async def watch(self) -> tuple[Owner, ...]:
        """Look at all owners, and remember who has shown life since the last look.

        Raises:
            StorageError: the log could not be read.
        """
        owners = await self._log.owners()
        now, seen = self._clock(), self._seen
        self._seen = {}
        for owner in owners:
            beat, since = seen.get(owner.id, (None, now))
            self._seen[owner.id] = (owner.beat, since if beat == owner.beat else now)
        return owners

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / _BEATS)
            try:
                await self._sign()
                await self.watch()
            except StorageError as error:
                _log.warning("no sign of life could be given: %s", error.line)


def _noted(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # those who wait for it have it too
