"""The machine of a session whose backend is gone: what is settled, withdrawn, replayed, handed over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless.protocol.block import BlockDecoder
from gapless.protocol.carried import Phase, Waiting
from gapless.protocol.cursor import Link
from gapless.protocol.delivery import ConnectionId
from gapless.protocol.inputs import Dispatch, Effect, Emitted, Handed, Lost, Message, Revive
from gapless.protocol.jsonrpc import peek
from gapless.protocol.record import Retained, read_record, restore, write_record
from gapless.protocol.recovery import FUTILE
from gapless.protocol.refusal import Reason
from gapless.protocol.session import Session, View
from gapless.protocol.settings import Limits

LINK0 = Link(bytes(range(8)))
TOOLS: dict[str, Any] = {"tools": {}, "logging": {}, "resources": {"subscribe": True}}


class Machine:
    """A session's machine, its log as lists, and the backend's side of it by hand."""

    def __init__(self, limits: Limits | None = None, view: View = View.SESSION) -> None:
        self.limits = limits or Limits()
        self.session = Session(view, LINK0, self.limits, "fsync", 0.0)
        self.entries: dict[int, bytes] = {}
        self.events: list[dict[str, Any]] = []
        self.dispatched = 0
        self.handed: list[Any] = []

    def put(self, input: Any) -> list[Effect]:
        effects = self.session.handle(input, 0.0)
        self.commit()
        self.handed += [(e.number, json.loads(e.data)) for e in effects if isinstance(e, Dispatch)]
        return effects

    def commit(self) -> None:
        commit = self.session.take()
        for entry in commit.entries:
            self.entries[entry.number or 0] = entry.data
        if commit.dispatched is not None:
            self.dispatched = commit.dispatched
        blocks = BlockDecoder(1 << 20).feed(commit.segment.data)
        self.events += [{"event": b.event, **json.loads(b.data or b"{}")} for b in blocks]
        self.session.confirm(commit)

    def client(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        number = self.session.inbox.received + 1
        self.put(
            Message(data, data[:16], peek(data), number=number, process="p", answer_on=ConnectionId(number))
        )

    def backend(self, message: dict[str, Any], incarnation: int = 0) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.put(Emitted(data, peek(data), None, incarnation))

    def taken(self) -> None:
        """The backend has taken what was dispatched."""
        self.put(Handed(self.session.carried.incarnation))

    def shake(self, capabilities: dict[str, Any] | None = None, version: str = "1") -> None:
        """A handshake."""
        self.client({"id": 0, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}})
        self.taken()
        self.backend({"id": 0, **server(TOOLS if capabilities is None else capabilities, version)})
        self.client({"method": "notifications/initialized"})
        self.taken()

    def revive(self) -> None:
        told = {n for n in self.session.carried.orders.values() if n <= self.dispatched}
        listens = {r.number for r in self.session.inbox.open.values() if r.method == "subscriptions/listen"}
        orders = told | {n for n in listens if n <= self.dispatched}
        self.handed.clear()
        self.put(Revive(self.logged(*orders), self.logged(*self.session.carried.untaken)))

    def logged(self, *numbers: int) -> tuple[Waiting, ...]:
        """Messages as the log has them, in order."""
        return tuple(Waiting(n, self.entries[n], peek(self.entries[n])) for n in sorted(numbers))

    def answer_replay(self, **answer: Any) -> None:
        """The backend answers the request that was replayed last."""
        number, message = self.handed[-1]
        assert number == 0
        self.backend({"id": message["id"], **(answer or {"result": {}})})

    def restart(self) -> Machine:
        """The process dies; what another one makes of the log."""
        other = Machine(self.limits)
        other.entries, other.events, other.dispatched = dict(self.entries), self.events, self.dispatched
        outbox = self.session.outbox
        waiting = [n for n in sorted(self.entries) if n > self.dispatched and self.entries[n]]
        log = Retained(
            committed=outbox.committed,
            link=outbox.link,
            floor=outbox.floor,
            floor_link=outbox.floor_link,
            received=max(self.entries, default=0),
            dispatched=self.dispatched,
            waiting=tuple(Waiting(n, self.entries[n], peek(self.entries[n])) for n in waiting),
        )
        record = read_record(write_record(self.session, "anonymous", None))
        other.session = restore(record, log, self.limits, "fsync", 0.0)
        other.put(Lost("the server was restarted", taken_over=True))
        return other


def server(capabilities: dict[str, Any], version: str = "1") -> dict[str, Any]:
    return {
        "result": {
            "protocolVersion": "2025-11-25",
            "capabilities": capabilities,
            "serverInfo": {"name": "ladder", "version": version},
        }
    }


def call(id: int | str, **params: Any) -> dict[str, Any]:
    return {"id": id, "method": "tools/call", "params": params}


def methods(machine: Machine) -> list[str]:
    return [message["method"] for _, message in machine.handed]


@pytest.mark.rule("N2")
@pytest.mark.rule("L7")
def test_what_was_dispatched_ends_outcome_unknown_and_what_was_not_runs() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))  # dispatched, and being handed over
    machine.client(call(2))  # waits
    assert machine.dispatched == 3
    machine.put(Lost("it crashed"))
    assert machine.events[-1]["id"] == 1
    assert machine.events[-1]["error"]["data"] == {"reason": "outcome-unknown"}
    assert list(machine.session.inbox.open) == [2]
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    assert methods(machine)[-1] == "tools/call"
    assert machine.handed[-1][1]["id"] == 2
    assert machine.dispatched == 4
    machine.backend({"id": 2, "result": {}})
    assert machine.events[-1] == {"event": "message", "jsonrpc": "2.0", "id": 2, "result": {}}


@pytest.mark.rule("N2")
def test_the_same_where_the_process_dies() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))
    machine.client(call(2))
    other = machine.restart()
    assert other.events[-1]["id"] == 1
    other.revive()
    other.answer_replay(**server(TOOLS))
    assert [message["id"] for _, message in other.handed if message["method"] == "tools/call"] == [2]


@pytest.mark.rule("N2")
def test_the_handshake_log_level_and_subscriptions_are_replayed_in_order_and_their_answers_swallowed() -> (
    None
):
    machine = Machine()
    machine.shake()
    for id, method, params in (
        (1, "resources/subscribe", {"uri": "a"}),
        (2, "logging/setLevel", {"level": "debug"}),
        (3, "resources/subscribe", {"uri": "b"}),
        (4, "resources/unsubscribe", {"uri": "a"}),
        (5, "logging/setLevel", {"level": "error"}),
    ):
        machine.client({"id": id, "method": method, "params": params})
        machine.taken()
        machine.backend({"id": id, "result": {}})
    machine.put(Lost("it crashed"))
    seen = len(machine.events)
    machine.revive()
    assert methods(machine) == ["initialize"]  # nothing else before its answer
    machine.answer_replay(**server(TOOLS))
    machine.answer_replay()
    machine.answer_replay()
    assert methods(machine) == [
        "initialize",
        "notifications/initialized",
        "resources/subscribe",
        "logging/setLevel",
    ]
    assert machine.handed[2][1]["params"] == {"uri": "b"}
    assert machine.handed[3][1]["params"] == {"level": "error"}
    assert [event["method"] for event in machine.events[seen:]] == [
        "notifications/tools/list_changed",
        "notifications/resources/list_changed",
    ]


@pytest.mark.rule("N2")
@pytest.mark.parametrize(
    "answer",
    [
        server({**TOOLS, "prompts": {}}),
        server(TOOLS, version="2"),
        {"result": {**server(TOOLS)["result"], "protocolVersion": "2025-06-18"}},
        {"error": {"code": -32603, "message": "no"}},
    ],
)
def test_a_backend_that_changed_its_mind_ends_the_session(answer: dict[str, Any]) -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))
    machine.client(call(2))
    machine.put(Lost("it crashed"))
    machine.revive()
    machine.answer_replay(**answer)
    assert machine.session.reason is Reason.BACKEND_LOST
    assert machine.events[-1]["event"] == "session-superseded"
    assert machine.events[-2]["id"] == 2  # settled, though it never ran


@pytest.mark.rule("N2")
def test_capabilities_in_another_order_are_the_same() -> None:
    machine = Machine()
    machine.shake()
    machine.put(Lost("it crashed"))
    machine.revive()
    machine.answer_replay(**server(dict(reversed(TOOLS.items()))))
    assert machine.session.carried.phase is Phase.RUNNING


@pytest.mark.rule("N3")
def test_a_replayed_request_bears_an_id_that_no_request_of_the_client_has() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call("replay-1"))
    machine.client(call("x"))
    machine.client(call("replay-1'"))
    machine.put(Lost("it crashed"))  # of these "x" and "replay-1'" wait
    machine.revive()
    assert machine.handed[0][1]["id"] not in {"x", "replay-1'", 0}


@pytest.mark.rule("N3", "M1")
def test_a_question_is_withdrawn_where_a_client_without_a_standalone_stream_sees_it() -> None:
    machine = Machine(view=View.STREAM)
    machine.shake()
    machine.client(call(1))
    machine.taken()
    machine.backend({"id": 7, "method": "elicitation/create", "params": {}})
    machine.put(Lost("it crashed"))
    assert [e.get("method") or e["error"]["data"]["reason"] for e in machine.events[-2:]] == [
        "notifications/cancelled",
        "outcome-unknown",
    ]
    assert machine.session.streams.last(0) == 0


@pytest.mark.rule("N3")
def test_questions_of_a_dead_incarnation_are_withdrawn_and_their_answers_dropped() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))
    machine.taken()
    machine.backend({"id": 7, "method": "elicitation/create", "params": {}})
    machine.put(Lost("it crashed"))
    withdrawn = [e for e in machine.events if e.get("method") == "notifications/cancelled"]
    assert [e["params"]["requestId"] for e in withdrawn] == [7]
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    machine.taken()
    machine.handed.clear()
    machine.client({"id": 7, "result": {"action": "accept"}})  # accepted, and goes nowhere
    assert machine.dispatched == machine.session.inbox.received
    assert not machine.handed


@pytest.mark.rule("N3")
def test_ids_and_tokens_of_a_later_incarnation_are_its_own() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))
    machine.taken()
    machine.backend({"id": 7, "method": "roots/list", "params": {"_meta": {"progressToken": 7}}})
    assert machine.events[-1]["id"] == 7  # the first is changed in nothing
    machine.put(Lost("it crashed"))
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    machine.taken()
    machine.backend({"id": 7, "method": "roots/list", "params": {"_meta": {"progressToken": 7, "x": 1.0}}})
    asked = machine.events[-1]
    assert asked["id"] != 7
    assert asked["params"]["_meta"]["progressToken"] != 7
    assert asked["params"]["_meta"]["x"] == 1.0
    machine.handed.clear()
    token = asked["params"]["_meta"]["progressToken"]
    progress = {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}}
    machine.client(progress)
    machine.taken()
    machine.client({**progress, "params": {"progressToken": 7, "progress": 2}})  # of the dead one
    machine.taken()
    machine.client({"id": asked["id"], "result": {"roots": []}})
    machine.taken()
    assert [message for _, message in machine.handed] == [
        {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 7, "progress": 1}},
        {"jsonrpc": "2.0", "id": 7, "result": {"roots": []}},
    ]
    machine.backend({"method": "notifications/cancelled", "params": {"requestId": 7}})
    assert machine.events[-1]["params"]["requestId"] == asked["id"]


@pytest.mark.rule("N3")
@pytest.mark.parametrize("id", ["b2.", "b2.i", "b2.ix", "b2.i" + "9" * 40, "b2.s", "b2.i-"])
def test_an_answer_under_an_id_that_was_never_made_harms_nobody(id: str) -> None:
    machine = Machine()
    machine.shake()
    machine.put(Lost("it crashed"))
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    machine.taken()
    machine.client({"id": id, "result": {}})
    machine.taken()
    machine.client(call(1))
    assert machine.handed[-1][1]["method"] == "tools/call"


@pytest.mark.rule("N3")
def test_a_dead_incarnation_says_nothing_any_more() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))
    machine.put(Lost("it crashed"))
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    seen = len(machine.events)
    machine.backend({"id": 1, "result": {}}, incarnation=1)
    machine.backend({"method": "notifications/message", "params": {}}, incarnation=1)
    assert len(machine.events) == seen


@pytest.mark.rule("N2")
def test_a_subscription_that_stays_open_is_replayed_under_its_own_id() -> None:
    machine = Machine()
    machine.client({"id": "d", "method": "server/discover", "params": {}})
    machine.taken()
    machine.backend({"id": "d", **server(TOOLS)})
    listen = {"notifications": {"toolsListChanged": True, "promptsListChanged": False}}
    machine.client({"id": "listen-1", "method": "subscriptions/listen", "params": listen})
    machine.taken()
    meta = {"io.modelcontextprotocol/subscriptionId": "listen-1"}
    acknowledged = {
        "method": "notifications/subscriptions/acknowledged",
        "params": {"notifications": {"toolsListChanged": True}, "_meta": meta},
    }
    machine.backend(acknowledged)
    machine.put(Lost("it crashed"))
    assert list(machine.session.inbox.open) == ["listen-1"]
    seen = len(machine.events)
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    assert machine.handed[-1][1]["id"] == "listen-1"
    machine.taken()
    machine.backend(acknowledged)  # the client had that
    assert [(e["method"], e["params"]) for e in machine.events[seen:]] == [
        ("notifications/tools/list_changed", {"_meta": meta})
    ]
    machine.backend(acknowledged)
    assert machine.events[-1]["method"] == "notifications/subscriptions/acknowledged"


@pytest.mark.rule("N2")
def test_a_backend_that_never_answered_anything_is_not_started_again() -> None:
    machine = Machine()
    machine.client({"id": 0, "method": "initialize", "params": {}})
    machine.put(Lost("it crashed"))
    assert machine.session.reason is Reason.BACKEND_LOST
    assert machine.events[0]["error"]["data"] == {"reason": "outcome-unknown"}


@pytest.mark.rule("N2")
def test_a_backend_that_crashes_again_and_again_is_given_up() -> None:
    machine = Machine()
    machine.shake()
    losses = 0
    while machine.session.reason is None:
        machine.put(Lost("it crashed"))
        losses += 1
        if machine.session.reason is None:
            machine.revive()
            machine.answer_replay(**server(TOOLS))
    assert losses == FUTILE + 2
    assert machine.session.reason is Reason.BACKEND_LOST


@pytest.mark.rule("N2")
def test_a_backend_that_answers_between_crashes_is_not_given_up() -> None:
    machine = Machine()
    machine.shake()
    for id in range(1, 3 * FUTILE):
        machine.client(call(id))
        machine.taken()
        machine.backend({"id": id, "result": {}})
        machine.put(Lost("it crashed"))
        machine.revive()
        machine.answer_replay(**server(TOOLS))
        machine.taken()
    assert machine.session.reason is None


@pytest.mark.rule("N2")
@pytest.mark.parametrize("taken_over", [False, True])
def test_superseding_ends_the_session_at_once(taken_over: bool) -> None:
    machine = Machine(Limits(on_backend_loss="supersede"))
    machine.shake()
    machine.client(call(1))
    machine.put(Lost("gone", taken_over))
    assert machine.session.reason is Reason.BACKEND_LOST
    assert [e.get("id") for e in machine.events[-2:]] == [1, None]


@pytest.mark.rule("N1")
def test_messages_that_come_while_one_is_handed_over_are_dispatched_in_the_commit_after() -> None:
    machine = Machine()
    for id in range(1, 101):
        machine.client(call(id))
    assert machine.dispatched == 1
    assert len(machine.handed) == 1
    machine.taken()
    assert machine.dispatched == 65
    assert len(machine.handed) == 65
    machine.taken()
    assert machine.dispatched == 100
    assert [number for number, _ in machine.handed] == list(range(1, 101))


def calls(machine: Machine) -> list[Any]:
    """The IDs of the calls that were handed over since the last revival began."""
    return [message["id"] for _, message in machine.handed if message["method"] == "tools/call"]


def refused(*ids: int) -> Machine:
    """A session with calls 1 and 2 dispatched and 3 waiting, whose backend has refused some, and is gone."""
    machine = Machine()
    machine.shake()
    machine.client(call(0))
    machine.client(call(1))
    machine.client(call(2))
    machine.backend({"id": 0, "result": {}})
    machine.taken()
    machine.client(call(3))
    machine.put(Lost("it forgot its session", untaken=frozenset(ids)))
    return machine


@pytest.mark.rule("N2")
@pytest.mark.rule("L7")
def test_a_request_that_certainly_reached_no_backend_runs_on_the_fresh_one_before_what_waits() -> None:
    machine = refused(2)
    assert [e["id"] for e in machine.events if "error" in e] == [1]
    assert list(machine.session.inbox.open) == [2, 3]
    machine.revive()
    assert methods(machine) == ["initialize"]
    machine.answer_replay(**server(TOOLS))
    assert calls(machine) == [2, 3]
    assert machine.dispatched == machine.session.dispatched == 6
    machine.backend({"id": 2, "result": {}})
    assert machine.events[-1] == {"event": "message", "jsonrpc": "2.0", "id": 2, "result": {}}


@pytest.mark.rule("N2")
def test_several_that_reached_no_backend_run_in_the_order_in_which_they_were_sent() -> None:
    machine = refused(2, 1)
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    assert calls(machine) == [1, 2, 3]


@pytest.mark.rule("N2")
def test_a_fresh_backend_that_dies_before_it_is_handed_them_leaves_them_to_the_next() -> None:
    machine = refused(1, 2)
    machine.revive()
    machine.put(Lost("it crashed"))
    assert list(machine.session.inbox.open) == [1, 2, 3]
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    assert calls(machine) == [1, 2, 3]


@pytest.mark.rule("N1")
def test_once_a_fresh_backend_has_them_they_are_dispatched_like_any_other() -> None:
    machine = refused(1, 2)
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    machine.put(Lost("it crashed"))
    assert [e["id"] for e in machine.events if "error" in e] == [1, 2, 3]


@pytest.mark.rule("N1")
def test_a_process_that_takes_over_does_not_know_that_they_reached_no_backend() -> None:
    other = refused(1, 2).restart()
    assert [e["id"] for e in other.events if "error" in e] == [1, 2]
    other.revive()
    other.answer_replay(**server(TOOLS))
    assert calls(other) == [3]


@pytest.mark.rule("N2")
def test_a_setting_that_reached_no_backend_does_not_replace_a_later_one() -> None:
    machine = Machine()
    machine.shake()
    for id, level in ((1, "debug"), (2, "error")):
        machine.client({"id": id, "method": "logging/setLevel", "params": {"level": level}})
        machine.taken()
    machine.backend({"id": 2, "result": {}})
    machine.put(Lost("it forgot its session", untaken=frozenset({1})))
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    machine.answer_replay()
    assert machine.handed[-1][1]["params"] == {"level": "debug"}
    machine.taken()
    machine.backend({"id": 1, "result": {}})
    machine.put(Lost("it crashed"))
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    assert machine.handed[-1][1]["params"] == {"level": "error"}


@pytest.mark.rule("N2")
def test_a_subscription_among_them_is_replayed_and_not_handed_over_twice() -> None:
    machine = Machine()
    machine.client({"id": "d", "method": "server/discover", "params": {}})
    machine.taken()
    machine.backend({"id": "d", **server(TOOLS)})
    machine.client({"id": "l", "method": "subscriptions/listen", "params": {"notifications": {}}})
    machine.taken()
    machine.put(Lost("it forgot its session", untaken=frozenset({"l"})))
    machine.revive()
    machine.answer_replay(**server(TOOLS))
    assert methods(machine).count("subscriptions/listen") == 1


@pytest.mark.rule("N2")
def test_a_backend_that_refuses_everything_is_given_up() -> None:
    machine = Machine()
    machine.shake()
    machine.client(call(1))
    losses = 0
    while machine.session.reason is None:
        machine.put(Lost("it forgot its session", untaken=frozenset({1})))
        losses += 1
        assert losses <= FUTILE + 2
        if machine.session.reason is None:
            machine.revive()
            machine.answer_replay(**server(TOOLS))
            assert calls(machine) == [1]
    assert losses == FUTILE + 2
    assert [e["id"] for e in machine.events if "error" in e] == [1]


@pytest.mark.rule("N2")
def test_what_a_restarted_server_knows_it_knows_after_the_next_restart() -> None:
    machine = Machine()
    machine.shake()
    for _ in range(3):
        machine = machine.restart()
        machine.revive()
        assert methods(machine) == ["initialize"]
        machine.answer_replay(**server(TOOLS))
        machine.taken()
    machine.backend({"id": 7, "method": "roots/list", "params": {}})
    assert machine.events[-1]["id"] == "b4.i7"
