"""An attack on one server: many volleys at a time, witnesses beside them, what it held before and after."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tests.attack.endpoint_inputs import ENDPOINT_FAMILIES
from tests.attack.exchange import Bounds, Exchanges
from tests.attack.findings import Findings
from tests.attack.frame_inputs import FRAME_FAMILIES
from tests.attack.http_inputs import HTTP_FAMILIES
from tests.attack.process import Held, Process, complaints
from tests.attack.shapes import request
from tests.attack.target import Target
from tests.attack.volley import Family, Volley
from tests.attack.wire import ask
from tests.attack.witnesses import Witnesses

__all__ = ["FAMILIES", "Attack", "Report"]

FAMILIES: Final = (*HTTP_FAMILIES, *ENDPOINT_FAMILIES, *FRAME_FAMILIES)

_AT_ONCE: Final = 48
"""Connections that are attacked on at a time; those left to the server's timers come on top."""
_PATIENT: Final = 200
_GROWTH: Final = 12 * 1024 * 1024
_GROWTH_SHARE: Final = 0.1
"""Bytes, and a share of what it held, that memory may grow by from warm-up on: an allocator's fragments, and
what a session in the log's and the metrics' tables leaves. A hundred bytes kept of each of a million inputs
would be eight times as much."""
_FEW: Final = 10
"""Descriptors, threads, children and tasks of the witnesses and of the look itself, which come and go."""


@dataclass(slots=True)
class Report:
    """What came of an attack on one server.

    Attributes:
        name: of the server.
        before, after: what it held once it was warm, and at the end; `None` where that cannot be known.
        tasks: of its event loop, before and after, as it counts them itself.
        said: how often it said what on stderr.
        sessions: how many were attacked.
        rungs: how many numbered messages the witnesses received.
    """

    name: str
    findings: Findings = field(default_factory=Findings)
    before: Held | None = None
    after: Held | None = None
    tasks: list[int] = field(default_factory=list[int])
    said: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0
    sessions: int = 0
    rungs: int = 0


class Attack:
    """Attacks one server.

    Args:
        process: the server; it is started and stopped here.
        inputs: how many bad inputs to send.
        seats, uses: sessions of each view that are attacked at a time, and how often each is.
        token: what the server asks for: no bad input has it, and nobody is to be let in without.
        witnesses, pace: whether good clients climb beside, and how many seconds there are between two rungs.
        warm: how much of the attack comes before what the server holds is noted; 0 if it is not to be.
        settle: seconds that the server has to be rid of sessions that nobody is connected to.
        families: kinds of input.
        progress: told now and then how many have been sent.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        inputs: int,
        seed: int,
        *,
        bounds: Bounds = Bounds(),  # noqa: B008
        seats: int = 6,
        uses: int = 150,
        token: str = "",
        witnesses: bool = True,
        pace: float = 0.04,
        settle: float = 40.0,
        warm: float = 0.12,
        families: tuple[Family, ...] = FAMILIES,
        progress: Callable[[Report], None] = lambda report: None,
    ) -> None:
        self.report = Report(name)
        self._process = process
        self._inputs = inputs
        self._seed = seed
        self._bounds = bounds
        self._seats, self._uses, self._token = seats, uses, token
        self.report.findings.guarded = bool(token)
        self._witnesses = witnesses
        self._pace = pace
        self._settled = settle
        self._warm = warm
        self._families = families
        self._progress = progress
        self._volleys = 0
        self._goal = 0

    async def run(self) -> Report:
        """Attack, and judge."""
        report, findings = self.report, self.report.findings
        began = time.monotonic()
        try:
            await self._process.start()
            target = Target(self._process.port, seats=self._seats, uses=self._uses, token=self._token)
            witnesses = self._good_ones() if self._witnesses else None
            if witnesses is not None:
                await witnesses.start(target)
            try:
                if self._warm:
                    await self._volley(target, int(self._inputs * self._warm))
                    report.tasks = [await self._settle(target, 3 if witnesses else 0)]
                    report.before = self._process.held()
                await self._volley(target, self._inputs)
                report.tasks.append(await self._settle(target, 3 if witnesses else 0))
                report.after = self._process.held()
            finally:
                if witnesses is not None:
                    await witnesses.stop()
                    report.rungs = witnesses.rungs
            report.sessions = target.opened
            self._grown()
            await self._still_there()
        finally:
            await self._process.kill()
        bad, said = complaints(self._process.said())
        for what, whole in bad:
            findings.find("traceback", f"on stderr: {what}", whole)
        report.said = dict(said)
        report.seconds = time.monotonic() - began
        return report

    def _good_ones(self) -> Witnesses:
        return Witnesses(self._process.url, self.report.findings, pace=self._pace)

    async def _volley(self, target: Target, goal: int) -> None:
        """Send until so many inputs have been sent in all."""
        self._goal = goal
        await target.tend()
        exchanges = Exchanges(target, self.report.findings, self._bounds)
        patient = asyncio.Semaphore(_PATIENT)
        waiting: set[asyncio.Task[None]] = set()
        shares = [family.share for family in self._families]

        async def later(work: Awaitable[None]) -> None:
            async with patient:
                await work

        async def work() -> None:
            while self.report.findings.sent < self._goal and self._process.runs:
                self._volleys += 1
                about = f"--seed {self._seed} volley {self._volleys}"
                random = Random(f"{self._seed} {self._volleys}")
                if self._volleys <= len(self._families):
                    family = self._families[
                        self._volleys - 1
                    ]  # each of them once, however few inputs there are
                else:
                    (family,) = random.choices(self._families, shares)
                volley = family.make(random, target)
                sending = exchanges.run(volley, family.name, about)
                if isinstance(volley, Volley) and volley.patient:
                    task = asyncio.create_task(later(sending))
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
                else:
                    await sending

        async def tend() -> None:
            while True:
                await target.tend()
                self._progress(self.report)
                await asyncio.sleep(0.1)

        tending = asyncio.create_task(tend())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(work())
            await asyncio.gather(*waiting)
        finally:
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
        await target.leave()

    async def _settle(self, target: Target, sessions: int) -> int:
        """Wait until the server has no sessions but those of the witnesses; how many tasks it then has."""
        deadline, text = time.monotonic() + self._settled, b""
        while self._process.runs and time.monotonic() < deadline:
            metrics = request(b"GET", b"/metrics", target.headers)
            answer = await ask(self._process.port, metrics, self._bounds.answer)
            text = b"" if answer is None else bytes(answer.body)
            states = re.findall(rb'gapless_sessions\{state="(\w+)"\} ([\d.]+)', text)
            live = sum(float(n) for state, n in states if state != b"TERMINATED")
            if answer is not None and live <= sessions:
                found = re.search(rb"^gapless_tasks ([\d.]+)", text, re.MULTILINE)
                return 0 if found is None else int(float(found[1]))
            await asyncio.sleep(0.25)
        what = "there are sessions that nobody is connected to, and that do not expire"
        self.report.findings.find("growth", what, text.decode())
        return 0

    def _grown(self) -> None:
        before, after, find = self.report.before, self.report.after, self.report.findings.find
        if before is None or after is None:
            return
        most = before.memory + max(_GROWTH, before.memory * _GROWTH_SHARE)
        if after.memory > most:
            find("growth", f"memory: {before.memory >> 10} KiB, then {after.memory >> 10} KiB")
        if max(self.report.tasks) > self.report.tasks[0] + _FEW:
            find("growth", f"tasks: {self.report.tasks[0]}, then {self.report.tasks[-1]}")
        for name in ("descriptors", "threads", "children"):
            had, has = getattr(before, name), getattr(after, name)
            if has > had + _FEW:
                find("growth", f"{name}: {had}, then {has}")

    async def _still_there(self) -> None:
        find = self.report.findings.find
        answer = await ask(self._process.port, request(b"GET", b"/healthz"), self._bounds.answer)
        if answer is None or answer.status != 200:
            find("alive", f"/healthz is answered {answer.status if answer else 'not at all'}")
        status = await self._process.stop(self._bounds.stop)
        if status != 0:
            find("alive", "SIGTERM does not end it" if status is None else f"its exit status is {status}")
