"""Watch a session survive its connections: `make demo`.

`gapless serve` runs the ladder server over stdio. The official SDK's client connects through our
transport, in both of MCP's eras at once, and makes a call that reports numbered progress. While
that streams, a proxy in between cuts, blocks and half-opens its connections. At the end what
arrived is compared with what the server's log says was emitted. Exit status 1 if anything differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from mcp import Client
from mcp.client import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import gapless
from gapless.cli.target import serving
from gapless.client.driver import Observation
from gapless.log import open_log
from gapless.log.base import SessionKey
from gapless.protocol.block import BlockDecoder
from gapless.torture.faults import Direction, FaultProxy, Link

STEPS = 90
DELAY = 0.05
ERAS = {"legacy": "initialize", "auto": "2026-07-28"}


@dataclass
class Story:
    """One era's session, as it went."""

    mode: str
    connection: gapless.Connection
    proxy: FaultProxy
    tell: Any
    got: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    asked: int = 0
    settled: int = 0
    changes: int = 0
    token: str = ""
    cursor: int = 0
    committed: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until this is so, looking again whenever something has happened."""
        async with asyncio.timeout(20):
            while not condition():
                self.moved.clear()
                await self.moved.wait()

    async def reached(self, step: int) -> None:
        """Until the application has seen this step."""
        await self.until(lambda: bool(self.got) and self.got[-1] >= step)

    async def on(self, transport: str) -> None:
        """Until events come over this transport."""
        await self.until(lambda: self.connection.transport == transport)

    def links(self) -> list[Link]:
        """The connections that carry events now."""
        return [link for link in self.proxy.links if link.carries_events and link.open]

    async def faults(self) -> None:
        """What the network does meanwhile."""
        await self.reached(10)
        self.tell(self, "the TCP connection is reset")
        for link in self.links():
            link.reset()
        await self.reached(25)
        self.tell(self, "migrating to WebSocket; the socket will be cut inside the gap")
        self.proxy.on_request = self._cut_in_gap
        self.connection.migrate()
        await self.reached(40)
        self.proxy.on_request = None
        self.tell(self, "migrating to WebSocket, mid-stream")
        self.connection.migrate()
        await self.on("websocket")
        await self.reached(60)
        self.tell(self, "the socket goes half-open: no bytes, no FIN")
        for link in self.links():
            link.black_hole()
        await self.on("none")
        self.tell(self, "nothing heard for two keep-alives: falling back to SSE")
        await self.on("sse")
        await self.reached(75)
        self.tell(self, "migrating to WebSocket once more")
        self.connection.migrate()

    def _cut_in_gap(self, link: Link) -> None:
        if link.upgraded:
            self.proxy.on_request = None
            link.arm(Direction.TO_CLIENT, b"resume-cursor", self._cut)

    def _cut(self, link: Link) -> None:
        self.tell(self, "the socket is cut inside the gap")
        link.reset()

    async def run(self) -> None:
        """Connect, call, be cut, call again, leave."""
        async with Client(
            self.connection,
            mode=self.mode,
            elicitation_callback=self._answer,
            message_handler=self._message,
        ) as client:
            async with AsyncExitStack() as stack:
                if self.mode != "legacy":
                    subscription = await stack.enter_async_context(client.listen(tools_list_changed=True))
                    listening = asyncio.create_task(self._listen(subscription))
                    stack.callback(listening.cancel)
                self.token = self.connection.session or ""
                faults = asyncio.create_task(self.faults())
                arguments = {"steps": STEPS, "delay": DELAY}
                await self._call(client, "climb", arguments, progress_callback=self._progress)
                await faults
                await self._call(client, "ask", {})
                await self._call(client, "grow", {"name": f"rung_{self.mode}"})
                await self.until(lambda: self.changes > 0)
            self.cursor, self.committed = self.connection.cursor, self.connection.committed

    async def _call(self, client: Client, tool: str, arguments: dict[str, Any], **options: Any) -> None:
        self.asked += 1
        result = await client.call_tool(tool, arguments, **options)
        self.settled += 1
        self.answers.append(getattr(result.content[0], "text", ""))
        self.tell(self, f"{tool}: {self.answers[-1]}")

    async def _progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.got.append(int(progress))
        self.tell(self, "")

    async def _answer(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        self.tell(self, f"the server asks: {params.message}")
        return ElicitResult(action="accept", content={"metres": 3})

    async def _message(self, message: Any) -> None:
        if "list_changed" in getattr(message, "method", "") and self.mode == "legacy":
            self._changed()

    async def _listen(self, subscription: Any) -> None:
        async for _ in subscription:
            self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self.tell(self, "the list of tools has changed")


class Stage:
    """The live display: what the sessions are doing, and what has happened."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self.now: dict[str, tuple[str, ...]] = {}
        self.lines: list[Text] = []
        self.live: Live | None = None

    def tell(self, story: Story, what: str) -> None:
        """Something happened to a story."""
        story.moved.set()
        connection = story.connection
        step = f"step {story.got[-1]}/{STEPS}" if story.got else "connecting"
        cursor, committed = str(connection.cursor), str(connection.committed)
        self.now[story.mode] = (ERAS[story.mode], step, connection.transport, cursor, committed)
        if what:
            at = f"{time.monotonic() - self.began:5.1f} s"
            self.lines.append(
                Text(f"{at}  {ERAS[story.mode]:<15} {connection.transport:<10} {cursor:>4}  {what}")
            )
            if self.live is None:
                self.console.print(self.lines[-1])
        if self.live is not None:
            self.live.update(self.view())

    def observe(self, story: Story, seen: Observation) -> None:
        """The client's machine moved."""
        story.moved.set()
        if "→" in seen.what:
            self.tell(story, f"client: {seen.what}")

    def view(self) -> Group:
        """The table and the last lines."""
        table = Table(title="one session per era, one log each, whatever happens to the wire")
        for name in ("era", "event", "transport", "cursor", "committed"):
            table.add_column(name)
        for row in self.now.values():
            table.add_row(*row)
        return Group(table, *self.lines[-24:])


async def emitted(log_url: str, token: str) -> tuple[list[int], int]:
    """What the log says was emitted: the numbered steps, and how many events in all."""
    log = open_log(log_url)
    await log.start()
    try:
        key = SessionKey(hashlib.sha256(token.encode()).digest())
        stored = await log.load(key)
        assert stored is not None
        steps: list[int] = []
        after, decoder = stored.floor, BlockDecoder(1 << 24)
        while after < stored.committed:
            data, after = await log.read(key, after, stored.committed, 1 << 20)
            for block in decoder.feed(data):
                message = msgspec.json.decode(block.data or b"{}")
                if message.get("method") == "notifications/progress":
                    steps.append(int(message["params"]["progress"]))
        return steps, stored.committed
    finally:
        await log.close()


async def verdict(stories: list[Story], log_url: str, console: Console) -> bool:
    """Compare what arrived with what was emitted."""
    table = Table(title="verdict", box=box.SIMPLE_HEAD)
    for name in (
        "era",
        "emitted",
        "received",
        "missing",
        "repeated",
        "reordered",
        "settled",
        "changes",
    ):
        table.add_column(name, justify="left" if name == "era" else "right")
    good = True
    for story in stories:
        steps, committed = await emitted(log_url, story.token)
        counts = Counter(story.got)
        missing = [step for step in steps if step not in counts]
        repeated = sum(count - 1 for count in counts.values())
        reordered = sum(1 for a, b in zip(story.got, story.got[1:], strict=False) if b < a)
        right = steps == list(range(1, STEPS + 1)) and story.answers == [
            f"climbed {STEPS} steps",
            "a ladder of 3 m",
            f"grew rung_{story.mode}",
        ]
        settled = f"{story.settled}/{story.asked}"
        figures = (len(steps), len(story.got), len(missing), repeated, reordered, settled, story.changes)
        table.add_row(ERAS[story.mode], *map(str, figures))
        good &= right and not missing and not repeated and not reordered and story.settled == story.asked
        good &= story.changes == 1 and story.cursor <= committed
    console.print(table)
    console.print(
        "nothing lost" if good else "SOMETHING IS WRONG", style="bold green" if good else "bold red"
    )
    return good


async def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    stage = Stage(console)
    with tempfile.TemporaryDirectory() as folder:
        log_url = f"sqlite:///{Path(folder) / 'demo.db'}"
        options = ["--log", log_url, "--keepalive", "0.5", "--probe-timeout", "0.5"]
        target = ["--", sys.executable, str(Path(__file__).with_name("ladder_server.py"))]
        async with serving((*options, *target)) as (url, _):
            stories: list[Story] = []
            for mode in ERAS:
                proxy = FaultProxy("127.0.0.1", urlsplit(url).port or 0)
                await proxy.start()
                stories.append(_story(mode, proxy, stage))
            if console.is_terminal:
                with Live(stage.view(), console=console, refresh_per_second=12) as stage.live:
                    await asyncio.gather(*(story.run() for story in stories))
            else:
                await asyncio.gather(*(story.run() for story in stories))
            for story in stories:
                await story.proxy.close()
            good = await verdict(stories, log_url, console)
    return 0 if good else 1


def _story(mode: str, proxy: FaultProxy, stage: Stage) -> Story:
    connection = gapless.connect(
        f"http://127.0.0.1:{proxy.port}/mcp",
        upgrade="never",  # the script moves it
        observe=lambda seen: stage.observe(story, seen),
        answer_timeout=2.0,
    )
    story = Story(mode, connection, proxy, stage.tell)
    return story


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
