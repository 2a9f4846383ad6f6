"""Carries out a trial's schedule on the connections of one proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, assert_never

from gapless.torture.faults import Direction, FaultProxy, Link
from gapless.torture.ladder import Ledger
from gapless.torture.schedule import Fault, Schedule
from gapless.torture.trial import Target, Trace

__all__ = ["Saboteur", "sabotage"]

_SWALLOW: Final = 0.03
_DELAY: Final = 0.03
_RATE: Final = 4096
_THROTTLED: Final = 0.5
_SPLIT: Final = 0.2
_COALESCE: Final = 0.05
_OUTAGE: Final = 0.15
_HOLD: Final = 0.2

_EVENT_STREAM: Final = b"text/event-stream"
_SWITCHING: Final = b"HTTP/1.1 101"


class Saboteur:
    """Does each step of a schedule when its moment has come.

    Attributes:
        waiting: faults that wait for their moment, in the order they will be used.
        moved: called when the client is to go through the door.
        requested: called with every request, after the schedule's own faults.
    """

    def __init__(self, proxy: FaultProxy, schedule: Schedule, trace: Trace) -> None:
        self.proxy = proxy
        self.trace = trace
        self.waiting: list[Fault] = []
        self.moved: Callable[[], None] = lambda: None
        self.requested: Callable[[Link], None] = lambda link: None
        self._steps = list(schedule)
        self._streaming: set[Link] = set()
        self._results: list[Fault] = []
        self._timers: list[asyncio.TimerHandle] = []
        proxy.on_request = self._on_request

    @property
    def streams(self) -> list[Link]:
        """The connections that carry events now."""
        self._streaming = {link for link in self._streaming if link.open}
        return sorted(self._streaming, key=lambda link: link.number)

    def begin(self, ledger: Ledger) -> Callable[[int], None]:
        """The schedule counts from here; what is returned is to be called with the ledger's count."""
        before = ledger.count
        self._received(0)
        return lambda count: self._received(count - before)

    def _received(self, count: int) -> None:
        while self._steps and self._steps[0].at <= count:
            fault = self._steps.pop(0).fault
            self.trace.note("fault", fault.value)
            self.strike(fault)

    def close(self) -> None:
        """Nothing more happens: what was done to connections ends with them, and new ones are let in."""
        self._steps.clear()
        self._results.clear()
        self.waiting.clear()
        for timer in self._timers:
            timer.cancel()
        self._restore()
        self.cut()

    def strike(self, fault: Fault) -> None:
        """Do a fault now, or arm it for its moment."""
        match fault:
            case Fault.RESET:
                self._each(Link.reset)
            case Fault.CLOSE:
                self._each(Link.close)
            case Fault.HALF_CLOSE:
                self._each(lambda link: link.half_close(Direction.TO_CLIENT))
            case Fault.HALF_OPEN:
                self._each(Link.black_hole)
            case Fault.SWALLOW:
                for link in self.streams:
                    link.black_hole(Direction.TO_CLIENT)
                    self._later(_SWALLOW, link.reset)
            case Fault.DELAY:
                self._each(lambda link: link.delay(Direction.TO_CLIENT, _DELAY))
            case Fault.THROTTLE:
                for link in self.streams:
                    link.throttle(Direction.TO_CLIENT, _RATE)
                    self._later(_THROTTLED, partial(link.throttle, Direction.TO_CLIENT, 0))
            case Fault.SPLIT:
                for link in self.streams:
                    link.split(Direction.TO_CLIENT)
                    self._later(_SPLIT, partial(link.split, Direction.TO_CLIENT, 0))
            case Fault.COALESCE:
                self._each(lambda link: link.coalesce(Direction.TO_CLIENT, _COALESCE))
            case Fault.CUT_ALL:
                self.cut()
            case Fault.OUTAGE:
                self.proxy.refusing = True
                self.cut()
                self._later(_OUTAGE, self._restore)
            case Fault.CUT_RESULT | Fault.CUT_END:
                self._results.append(fault)
                self._each(self._arm_results)
            case Fault.MOVE:
                self.moved()
            case _:
                self.waiting.append(fault)

    def cut(self) -> None:
        """Reset every connection."""
        for link in list(self.proxy.links):
            link.reset()

    def _restore(self) -> None:
        self.proxy.refusing = False

    def _each(self, action: Callable[[Link], None]) -> None:
        for link in self.streams:
            action(link)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, action))

    # Requests, as they come ---------------------------------------------------------------------------

    def _on_request(self, link: Link) -> None:
        self._streaming.discard(link)
        self.trace.note("wire", f"{link.number} {link.request}")
        link.arm(Direction.TO_CLIENT, _EVENT_STREAM, self._stream_began)
        if link.upgraded:
            link.arm(Direction.TO_CLIENT, _SWITCHING, self._stream_began)
        for fault in self.waiting:
            if _takes(fault, link):
                self.waiting.remove(fault)
                self.trace.note("fault", f"{fault.value} on {link.number}")
                self._ambush(fault, link)
                break
        self.requested(link)

    def _stream_began(self, link: Link) -> None:
        self._streaming.add(link)
        self._arm_results(link)

    def _arm_results(self, link: Link) -> None:
        for fault in self._results:
            action = partial(self._cut_result, fault)
            link.arm(Direction.TO_CLIENT, b'"result"', action, before=fault is Fault.CUT_RESULT)

    def _cut_result(self, fault: Fault, link: Link) -> None:
        if fault not in self._results:  # it has struck elsewhere
            return
        self._results.remove(fault)
        if fault is Fault.CUT_RESULT:
            link.reset()
        else:
            for end in (b"\n\n", b"\r\n\r\n"):
                link.arm(Direction.TO_CLIENT, end, Link.reset)

    def _ambush(self, fault: Fault, link: Link) -> None:
        """A fault whose moment is this request."""
        arm = partial(link.arm, Direction.TO_CLIENT)
        match fault:
            case Fault.CUT_HEAD:
                arm(b"HTTP/1.1 2", Link.reset, before=True)
            case Fault.BUFFER:
                link.buffer_response()
            case Fault.NOT_FOUND:
                link.answer(404, body=b"not found\n")
            case Fault.CUT_FIRST:
                arm(b"\nid:", Link.reset, before=True)
            case Fault.LOST_ANSWER:
                arm(b"HTTP/1.1 2", Link.reset, before=True)
            case Fault.REPEAT:
                link.repeat()
            case Fault.REFUSE_200 | Fault.REFUSE_400 | Fault.REFUSE_403 | Fault.REFUSE_502:
                link.answer(int(fault.value.rpartition("-")[2]), body=b"no\n")
            case Fault.STRIP_UPGRADE:
                link.strip_upgrade()
            case Fault.STRIP_ECHO:
                link.strip_headers(Direction.TO_CLIENT, "x-mcp-resume-cursor")
            case Fault.EAT_101:
                arm(_SWITCHING, Link.black_hole, before=True)
            case Fault.HOLD_101:
                self._hold(link)
            case Fault.CUT_101:
                arm(_SWITCHING, Link.reset, before=True)
            case Fault.CUT_GAP:
                arm(b"resume-cursor\n", Link.reset)
            case (
                Fault.RESET
                | Fault.CLOSE
                | Fault.HALF_CLOSE
                | Fault.HALF_OPEN
                | Fault.SWALLOW
                | Fault.DELAY
                | Fault.THROTTLE
                | Fault.SPLIT
                | Fault.COALESCE
                | Fault.CUT_ALL
                | Fault.OUTAGE
                | Fault.CUT_RESULT
                | Fault.CUT_END
                | Fault.MOVE
            ):
                raise AssertionError(f"{fault.value} strikes at once")
            case _:
                assert_never(fault)

    def _hold(self, link: Link) -> None:
        link.hold(Direction.TO_CLIENT)
        self._later(_HOLD, lambda: link.release(Direction.TO_CLIENT))


def _takes(fault: Fault, link: Link) -> bool:
    """Whether a waiting fault is for this request."""
    match fault:
        case Fault.CUT_FIRST | Fault.LOST_ANSWER | Fault.REPEAT:
            return link.request.startswith("POST")
        case Fault.CUT_HEAD | Fault.BUFFER | Fault.NOT_FOUND:
            return link.request.startswith("GET") and not link.upgraded
        case _:
            return link.upgraded


@asynccontextmanager
async def sabotage(target: Target, schedule: Schedule, trace: Trace) -> AsyncGenerator[tuple[str, Saboteur]]:
    """A proxy in front of a target for one trial: its URL, and who does the schedule on it."""

    def passed(link: Link, direction: Direction, count: int, note: str) -> None:
        trace.passed(link.number, direction is Direction.TO_CLIENT, count)

    proxy = FaultProxy(target.host, target.port, on_bytes=passed)
    await proxy.start()
    saboteur = Saboteur(proxy, schedule, trace)
    try:
        yield target.through(proxy.port), saboteur
    finally:
        saboteur.close()
        await proxy.close()
