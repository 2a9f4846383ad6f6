"""Scenario files: inputs, and what both machines did.

A file is a sequence of paragraphs, and a paragraph is prose, commands, `----`, and what happened::

    # The client has processed 3; 4 and 5 are on their way to it.
    hold stream
    emit 2
    ----
    = server SSE_ACTIVE, log 1–5, acked 0 | client streaming, cursor 3

What happened is not written by hand: `pytest tests/scenarios --rewrite-scenarios` does that, and whoever
reviews the diff judges it. A line says who did what. `a → b` crossed the wire, and is told when it
arrives; `nobody` is where what is lost goes. `client` is our client, and `other` somebody else who has
its token. The line that begins with `=` says where both machines stand, whenever that has changed.

`open` begins a world: a session, and its client, which reads its event stream from the start. With
`policy=never` the client stays there until it is told otherwise; by default it goes to the door by
itself when it has taken an event, in one step or, with `steps=2`, in two. With `loss=supersede` it ends
with its backend. `COMMANDS` is the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any, Final, Literal, cast

from gapless.protocol.block import encode_block
from gapless.protocol.moves import Leave, Move
from gapless.protocol.phases import Policy
from gapless.protocol.settings import Limits
from tests.scenarios.wire import Link, Request
from tests.scenarios.world import World

__all__ = ["COMMANDS", "ScenarioError", "check", "run"]

_SEPARATOR: Final = "----"
_NOTE: Final = b'{"jsonrpc":"2.0","method":"notifications/n"}'
_QUESTION: Final = b'{"jsonrpc":"2.0","id":%d,"method":"elicitation/create"}'
_NAMES: Final = (
    *("events", "handshake", "upgrade", "messages", "ack", "delete"),  # requests
    *("200", "101", "acceptance", "answer"),  # and what comes of them
    *("stream", "socket"),
)
_UNITS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


class ScenarioError(Exception):
    """A scenario file that cannot be run as it stands; says where."""


class _Command:
    """The words of one command: what stands alone, in order, and what is named."""

    def __init__(self, line: str) -> None:
        self.verb, *rest = line.split()
        self._plain = [word for word in rest if "=" not in word]
        self._named = dict(word.split("=", 1) for word in rest if "=" in word)

    def next(self, *allowed: str) -> str:
        """The next plain word; one of `allowed`, where that is limited."""
        if not self._plain:
            raise ValueError(f"{self.verb} what?")
        word = self._plain.pop(0)
        if allowed and word not in allowed:
            raise ValueError(f"{word!r} is none of {', '.join(allowed)}")
        return word

    def then(self, word: str) -> bool:
        """Whether this plain word comes next; then it is taken."""
        return self._plain[:1] == [word] and bool(self._plain.pop(0))

    def number(self) -> int:
        """The next plain word as a number."""
        return int(self.next())

    def named(self, name: str) -> str | None:
        """What is named so."""
        return self._named.pop(name, None)

    def needed(self, name: str) -> str:
        """What must be named so."""
        found = self.named(name)
        if found is None:
            raise ValueError(f"{self.verb} {name}=what?")
        return found

    def done(self) -> None:
        """Everything was understood."""
        left = self._plain + [f"{name}={value}" for name, value in self._named.items()]
        if left:
            raise ValueError(f"{self.verb} does not take {' '.join(left)}")


def _open(command: _Command) -> World:
    limits: dict[str, Any] = {}
    retain = command.named("retain")
    if retain is not None:
        limits["retain_events"] = int(retain)
    limits["on_backend_loss"] = loss = command.named("loss") or "restart"
    if loss not in ("restart", "supersede"):
        raise ValueError("loss is restart or supersede")
    policy, steps = command.named("policy") or "auto", int(command.named("steps") or 1)
    if policy not in ("auto", "never", "require") or steps not in (1, 2):
        raise ValueError("policy is auto, never or require; steps are 1 or 2")
    return World(Limits(**limits), cast("Policy", policy), cast("Literal[1, 2]", steps))


def _emit(world: World, command: _Command) -> None:
    world.server.emit(*[_NOTE] * command.number())


def _call(world: World, command: _Command) -> None:
    world.client.call(command.number(), "tools/call")


def _initialize(world: World, command: _Command) -> None:
    world.client.call(command.number(), "initialize")


def _answer(world: World, command: _Command) -> None:
    id = command.number()
    if id not in world.server.open:
        raise ValueError(f"the backend has no request {id} to answer")
    world.server.answer(id)


def _question(world: World, command: _Command) -> None:
    world.server.emit(_QUESTION % command.number())


def _reply(world: World, command: _Command) -> None:
    world.client.reply(command.next())


def _backend(world: World, command: _Command) -> None:
    match command.next("stops", "goes-on", "changes", "dies"):
        case "stops":
            world.server.takes = False
        case "goes-on":
            world.server.backend_goes_on()
        case "changes":
            world.server.version += 1
        case _:
            world.tell("backend", "dies")
            world.server.backend_dies()


def _server(world: World, command: _Command) -> None:
    command.next("restarts")
    world.tell("server", "dies, and another begins")
    world.server.restarts()


def _client(world: World, command: _Command) -> None:
    match command.next("migrates", "leaves", "dies"):
        case "migrates":
            world.client.put(Move())
        case "leaves":
            world.client.put(Leave())
        case _:
            world.client.gone = True
            for link in [link for link in world.links if link.open and link.request.who == "client"]:
                world.end_up(link)


def _application(world: World, command: _Command) -> None:
    match command.next("stops", "takes", "goes-on"):
        case "stops":
            world.client.takes = 0
        case "takes":
            world.client.takes = command.number()
        case _:
            world.client.takes = None


def _name(command: _Command, *more: str) -> str:
    """What something on the wire is called, as `Request.called` has it."""
    other = "other " if command.then("other") else ""
    name = command.next(*_NAMES, *more)
    return other + (f"event {command.number()}" if name == "event" else name)


def _hold(world: World, command: _Command) -> None:
    world.held.add(_name(command))


def _release(world: World, command: _Command) -> None:
    name = _name(command)
    if name not in world.held:
        raise ValueError(f"{name} is not held")
    world.held.remove(name)


def _lose(world: World, command: _Command) -> None:
    world.losing.append(_name(command, "header", "resume-cursor", "event"))


def _header(world: World, command: _Command) -> None:
    world.header = command.number()


def _proxy(world: World, command: _Command) -> None:
    what = command.next("passes", "eats", "answers")
    world.proxy = str(command.number()) if what == "answers" else what


def _link(world: World, command: _Command) -> Link:
    who = "other" if command.then("other") else "client"
    name = command.next("stream", "socket")
    links = [k for k in world.links if k.kind == name and k.request.who == who and (k.open or k.serving)]
    if not links:
        raise ValueError(f"{who} has no {name}")
    return links[-1]


def _speak(world: World, command: _Command) -> None:
    links = [k for k in world.links if k.socket and k.request.who == "other" and k.open]
    if not links:
        raise ValueError("other has no socket")
    world.up(links[-1], encode_block("probe-ack", b"{}"))


def _drop(world: World, command: _Command) -> None:
    link = _link(world, command)
    at = command.named("at") or "both"
    if at not in ("both", "client", "server"):
        raise ValueError("at is client or server")
    world.broken(link, at)


def _half_open(world: World, command: _Command) -> None:
    _link(world, command).half = True


def _stall(world: World, command: _Command) -> None:
    if command.then("next"):
        world.stalling = True
    else:
        _link(world, command).stalled = True


def _unstall(world: World, command: _Command) -> None:
    _link(world, command).stalled = False


def _tick(world: World, command: _Command) -> None:
    match = re.fullmatch(r"([0-9.]+)(ms|s|min|h)", command.next())
    if match is None:
        raise ValueError("a time reads like 10s, 500ms, 30min or 24h")
    world.tick(float(match[1]) * _UNITS[match[2]])


def _other(kind: str) -> Callable[[World, _Command], None]:
    """A request of somebody else with the same token, who takes what comes and answers nothing."""

    def send(world: World, command: _Command) -> None:
        stated: dict[str, Any] = {}
        cursor = command.named("cursor") if kind == "events" else None
        if kind in ("handshake", "upgrade", "ack"):
            cursor = command.needed("cursor")
        if cursor is not None:
            stated["cursor"] = world.words.read_cursor(cursor)
        if kind == "upgrade":
            stated["nonce"] = command.needed("nonce")
        if kind == "handshake":
            stated["ticket"] = command.named("ticket")
        if kind == "messages":
            stated["messages"] = ((int(command.needed("number")), _NOTE),)
        world.send(Request("other", kind, **stated))

    return send


COMMANDS: Final[dict[str, Callable[[World, _Command], None]]] = {
    "emit": _emit,  # emit 3: the backend emits three notifications
    "call": _call,  # call 1: a request of the application
    "initialize": _initialize,  # initialize 0: the same, which asks the backend what it is
    "answer": _answer,  # answer 1: the backend's result
    "question": _question,  # question 1: the backend asks the application something
    "reply": _reply,  # reply 1: the application's answer to a question, by the ID that it knows
    "backend": _backend,  # backend stops | goes-on, taking messages; dies; changes: the next is a new version
    "server": _server,  # server restarts: its process dies, and another finds the session
    "client": _client,  # client migrates | leaves | dies
    "application": _application,  # application stops | takes 2 | goes-on
    "hold": _hold,  # hold stream | socket | handshake | 101 | …: whatever is called so waits on the wire
    "release": _release,
    "lose": _lose,  # lose handshake | 101 | acceptance | header | resume-cursor | event 5 | …: the next one
    "header": _header,  # header 1: the next 101 says 1
    "proxy": _proxy,  # proxy passes | eats | answers 502: what becomes of handshakes
    "drop": _drop,  # drop stream | socket | other stream, at=client | server where only that one notices
    "half-open": _half_open,  # half-open socket: nothing gets through, and nobody notices
    "stall": _stall,  # stall socket | next: the server cannot write
    "unstall": _unstall,
    "tick": _tick,  # tick 10s
    "resume": _other("events"),  # resume cursor=5, or without: somebody else asks for the event stream
    "upgrade": _other("upgrade"),  # upgrade cursor=5 nonce=x
    "knock": _other("handshake"),  # knock cursor=5 ticket=t1, or without
    "ack": _other("ack"),  # ack cursor=5
    "post": _other("messages"),  # post number=1
    "delete": _other("delete"),
    "speak": _speak,  # its socket lives after all: it says something
}
"""What a scenario may ask, beside `open`."""


@dataclass
class _Paragraph:
    """One paragraph: its prose and commands as they stand, and whether it says what then happens."""

    head: list[str] = field(default_factory=list[str])
    commands: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    separated: bool = False


def _paragraphs(text: str) -> list[_Paragraph]:
    found: list[_Paragraph] = []
    blank = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            blank = True
            continue
        if blank:
            found.append(_Paragraph())
            blank = False
        paragraph = found[-1]
        if paragraph.separated:
            continue  # what happened before; it is about to happen again
        if line == _SEPARATOR:
            paragraph.separated = True
            continue
        paragraph.head.append(line)
        if not line.startswith("#"):
            paragraph.commands.append((number, line))
    return found


def run(path: Path, *, rewriting: bool = False) -> str:
    """The whole text of a scenario file, with what happens now.

    Raises:
        ScenarioError: a command that makes no sense, or, unless `rewriting`, one without an outcome.
    """
    out: list[str] = []
    world: World | None = None
    line = 1
    for paragraph in _paragraphs(path.read_text(encoding="utf-8")):
        text = list(paragraph.head)
        for line, command in paragraph.commands:
            try:
                world = _do(world, command)
            except Exception as error:  # a machine's own as well: it is this line that led to it
                what = str(error) if isinstance(error, ValueError) else repr(error)
                raise ScenarioError(f"{path.name}:{line}: {command}: {what}") from error
        if paragraph.commands:
            if not (paragraph.separated or rewriting):
                told = "nothing is said of what happens; write that with --rewrite-scenarios"
                raise ScenarioError(f"{path.name}:{line}: {told}")
            assert world is not None
            text += [_SEPARATOR, *world.account()]
        out.append("\n".join(text) + "\n")
    if world is None:
        raise ScenarioError(f"{path.name}: no commands")
    try:
        world.finish()
    except ValueError as error:
        raise ScenarioError(f"{path.name}:{line}: {error}") from None
    return "\n".join(out)


def check(path: Path, *, rewriting: bool = False) -> str:
    """What happens now in a scenario file, as a diff to what it says; empty if that is the same.

    If `rewriting`, the file then says what happens now.

    Raises:
        ScenarioError: as `run` does.
    """
    before, after = path.read_text(encoding="utf-8"), run(path, rewriting=rewriting)
    if rewriting and before != after:
        path.write_text(after, encoding="utf-8")
    said, now = before.splitlines(), after.splitlines()
    return "\n".join(unified_diff(said, now, path.name, "what happens now", lineterm=""))


def _do(world: World | None, line: str) -> World:
    command = _Command(line)
    if command.verb == "open":
        if world is not None:
            world.finish()
            if world.told:
                raise ValueError("this begins a paragraph, or what happened before it is not told")
        world = _open(command)
    elif command.verb not in COMMANDS:
        raise ValueError("there is no such command")
    elif world is None:
        raise ValueError("a scenario begins with open")
    else:
        COMMANDS[command.verb](world, command)
    command.done()
    world.settle()
    return world
