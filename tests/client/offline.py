"""A driver that does nothing in the world: what arrives is put in by hand, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from gapless.client.driver import Driver
from gapless.client.network import Network
from gapless.protocol.block import Block
from gapless.protocol.client import Client
from gapless.protocol.cursor import EventId
from gapless.protocol.moves import Arrived, Effect, Opened, Over, Settle, Start, StreamOpened
from tests.client.machine import LINK0, Hand

__all__ = ["Offline", "offline"]


class Offline(Driver):
    """A driver that does nothing in the world."""

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Over):
            self.ends.append(effect.error)
        elif isinstance(effect, Settle):
            super()._perform(effect)

    ends: list[Any]


def offline(saving: Callable[[bool], None] = lambda stating: None, ahead: int = 256) -> tuple[Offline, Hand]:
    """A driver whose event stream is open, and who has the log behind it."""
    nobody = cast("Any", None)
    network = Network(nobody, {}, nobody, None, None, 1.0)
    driver = Offline(Client("never", ahead=ahead), "http://x", "p", network, over=nobody, saving=saving)
    driver.ends = []
    log = Hand(driver.machine)
    driver.put(Start())
    driver.put(Opened(1, "token", EventId(0, 0, LINK0), {}, {"keepalive": 0.02}))
    driver.put(StreamOpened(2))
    driver.put(Arrived(2, Block(id=str(log.id(0)), data=b"")))
    return driver, log
