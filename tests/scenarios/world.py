"""The world of a scenario: both machines, the wire between them, a clock, and an account of it all.

Everything that crosses does so at once and in the order in which it was sent, unless it is held, lost,
or its connection is half-open. Time stands still but for `tick`. So a scenario has one outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from gapless.protocol.block import BlockDecoder
from gapless.protocol.phases import Policy
from gapless.protocol.settings import Limits
from tests.scenarios.client_end import ClientEnd
from tests.scenarios.server_end import ServerEnd
from tests.scenarios.wire import Item, Link, Request
from tests.scenarios.words import Words

__all__ = ["World"]

_MOST: Final = 1_000
"""Steps without rest, after which it is not going to come to rest."""


class World:
    """Two machines and what lies between them. `told` is the account since it was last taken."""

    def __init__(self, limits: Limits, policy: Policy, steps: Literal[1, 2]) -> None:
        self.now = 0.0
        self.words = Words()
        self.told: list[str] = []
        self.wire: list[Item] = []
        self.links: list[Link] = []
        self.held: set[str] = set()
        self.losing: list[str] = []
        self.proxy = "passes"
        """What becomes of handshakes: it `passes` them, `eats` their Upgrade, or answers with a status."""
        self.header: int | None = None
        """What the next 101 says in place of its own cursor."""
        self.stalling = False
        """Whether the server will be unable to write on the next connection."""
        self._clock = 0.0
        self._stood = ""
        self.server = ServerEnd(self, limits)
        self.client = ClientEnd(self, policy, steps)
        self.client.start(limits)
        self.settle()
        self.told.clear()

    # The account ----------------------------------------------------------------------------------

    def tell(self, who: str, what: str) -> None:
        """Note that something happened, and when, if time has passed."""
        self.client.tell_cursor()
        if self.now != self._clock:
            self._clock = self.now
            self.told.append(f"{'clock':<17} {self.now:g} s")
        self.told.append(f"{who:<17} {what}")

    def account(self) -> list[str]:
        """What happened since the last one, and where both machines stand if that changed."""
        self.client.tell_cursor()
        told, self.told = self.told, []
        stands = f"= {self.server} | {self.client}"
        if stands != self._stood:
            self._stood = stands
            told.append(stands)
        return told or ["(nothing)"]

    def finish(self) -> None:
        """The scenario ends here.

        Raises:
            ValueError: something that was to be lost never came.
        """
        if self.losing or self.header is not None:
            raise ValueError(f"never lost: {', '.join(self.losing) or 'the header'}")

    # The wire -------------------------------------------------------------------------------------

    def send(self, request: Request) -> None:
        """A request sets out. One that is lost gets no answer, which its client notices at once."""

        def cross() -> None:
            text = request.read(self.words)
            if request.kind != "handshake" or self.proxy == "passes":
                self.tell(f"{request.who} → server", text)
                self.server.serve(request)
            elif self.proxy == "eats":
                self.tell(
                    f"{request.who} → server", text.replace(", Upgrade: websocket", "") + " (upgrade eaten)"
                )
                self.server.serve(request, eaten=True)
            else:
                self.tell(f"{request.who} → proxy", text)
                self.tell(f"proxy → {request.who}", self.proxy)
                self.client.refused(request, None, int(self.proxy))

        def lose() -> None:
            self.tell(f"{request.who} → nobody", request.read(self.words))
            self.client.unanswered(request)

        self.wire.append(Item(request.called(request.kind), cross, lose))

    def reply(
        self, request: Request, name: str, text: str, arrive: Callable[[], None], link: Link | None = None
    ) -> None:
        """An answer sets out. If it is lost, the server does not know, and its client gets none."""

        def cross() -> None:
            self.tell(f"server → {request.who}", text)
            if link is not None:
                link.answered = True
            arrive()

        def lose() -> None:
            self.tell("server → nobody", text)
            if link is not None:
                link.answered = link.half = True
                link.open = False
            self.client.unanswered(request)

        self.wire.append(Item(request.called(name), cross, lose))

    def echo(self, committed: int) -> int | None:
        """What is left of the 101's header when it arrives."""
        if self.lost("header"):
            self.tell("network", "loses X-MCP-Resume-Cursor")
            return None
        if self.header is not None:
            self.tell("network", f"makes of it X-MCP-Resume-Cursor: {self.header}")
            committed, self.header = self.header, None
        return committed

    def down(self, link: Link, data: bytes) -> None:
        """The server writes on a connection."""

        def cross() -> None:
            blocks = BlockDecoder(1 << 30).feed(data)
            if link.half:
                self.tell("server → nobody", f"{link.kind}: {self.words.blocks(blocks)}")
                return
            if not link.open:
                return
            lost = [block for block in blocks if self.lost(self.words.name(block))]
            kept = [block for block in blocks if block not in lost]
            if lost:
                self.tell("server → nobody", f"{link.kind}: {self.words.blocks(lost)}")
            if kept or not blocks:
                self.tell(f"server → {link.request.who}", f"{link.kind}: {self.words.blocks(kept)}")
                self.client.arrived(link, kept)

        self._put(link, cross, lambda: link.answered and self.client.reads(link))

    def end_down(self, link: Link, code: int) -> None:
        """The server ends a connection."""

        def cross() -> None:
            text = f"{link.kind}: " + (f"close {code}" if link.socket else "end")
            if link.half:
                self.tell("server → nobody", text)
            elif link.open:
                self.tell(f"server → {link.request.who}", text)
                link.open = False
                self.client.ended(link, code)

        self._put(link, cross, lambda: link.answered and self.client.reads(link))

    def up(self, link: Link, frame: bytes) -> None:
        """The client writes on its socket."""

        def cross() -> None:
            text = f"{link.kind}: {self.words.frame(BlockDecoder(1 << 30).feed(frame))}"
            if link.half:
                self.tell(f"{link.request.who} → nobody", text)
            else:
                self.tell(f"{link.request.who} → server", text)
                self.server.heard(link, frame)

        self._put(link, cross)

    def end_up(self, link: Link) -> None:
        """The client drops a connection; the server learns of it unless it is half-open."""
        link.open = False

        def cross() -> None:
            self.tell(f"{link.request.who} → {'nobody' if link.half else 'server'}", f"{link.kind}: closed")
            if not link.half:
                self.server.gone(link)

        name = (
            link.name if link.socket else link.request.called("close")
        )  # what holds a stream holds what the server writes
        self.wire.append(Item(name, cross, lambda: None, link=link))

    def _put(self, link: Link, cross: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.wire.append(Item(link.name, cross, lambda: None, ready, link))

    def lost(self, name: str) -> bool:
        """Whether the next thing of this name was to be lost; then it has been."""
        if name not in self.losing:
            return False
        self.losing.remove(name)
        return True

    def broken(self, link: Link, at: str) -> None:
        """A connection breaks: `both` ends notice it, or only the one `at` the `client` or the `server`."""
        self.wire = [item for item in self.wire if item.link is not link]
        link.half = at != "both"
        who = link.request.who if at == "client" else at
        self.tell("network", f"the {link.name} breaks" + (f", and only {who} notices" if link.half else ""))
        if at != "client":
            self.server.gone(link)
        if at != "server":
            link.open = False
            self.client.ended(link, 1006)

    # Time -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything happen that happens by itself, until nothing does."""
        for _ in range(_MOST):
            self.server.feed()
            if not (self.client.accept() or self._cross() or self.client.due() or self.server.due()):
                self.client.tell_cursor()
                return
        raise AssertionError("this goes on for ever")

    def _cross(self) -> bool:
        item = next((i for i in self.wire if i.name not in self.held and i.ready()), None)
        if item is None:
            return False
        self.wire.remove(item)
        if self.lost(item.name):
            item.lose()
        else:
            item.cross()
        return True

    def tick(self, seconds: float) -> None:
        """Let time pass, stopping wherever somebody waits for it."""
        until = self.now + seconds
        for _ in range(_MOST):
            self.settle()
            at = min(
                (t for t in (self.client.deadline, self.server.deadline) if t is not None), default=until
            )
            self.now = max(self.now, min(at, until))
            self.server.look_after()
            if at >= until:
                break
        else:
            raise AssertionError("somebody waits for a time that has passed")
        self.server.look_after()
        self.settle()
