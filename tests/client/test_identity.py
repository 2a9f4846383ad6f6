"""IDs of different client processes stay apart (N3)."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.client.identity import Identity

MESSAGES: list[dict[str, Any]] = [
    {"id": 1, "method": "tools/call", "params": {"_meta": {"progressToken": 1}}},
    {"id": "1", "method": "tools/call", "params": {"_meta": {"progressToken": "1"}}},
    {"id": 2, "method": "ping"},
]


def copy(message: dict[str, Any]) -> dict[str, Any]:
    params = {k: dict(v) if isinstance(v, dict) else v for k, v in message.get("params", {}).items()}
    return {**message, "params": params}


@pytest.mark.rule("N3")
def test_the_first_process_of_a_session_rewrites_nothing() -> None:
    for message in MESSAGES:
        assert Identity(0).outgoing(copy(message)) == copy(message)
    assert Identity(0).owns(1)


@pytest.mark.rule("N3")
@pytest.mark.parametrize("message", MESSAGES)
def test_a_later_process_marks_its_ids_and_gets_them_back(message: dict[str, Any]) -> None:
    identity = Identity(3)
    sent = identity.outgoing(copy(message))
    assert sent["id"] != message["id"]
    assert identity.owns(sent["id"])
    assert identity.incoming({"id": sent["id"], "result": {}})["id"] == message["id"]


@pytest.mark.rule("N3")
def test_no_two_processes_and_no_two_types_of_id_collide() -> None:
    ids = [1, "1", "i1", "p1.i1"]
    sent = {Identity(n).outgoing({"id": id, "method": "x"})["id"] for n in (1, 2, 11) for id in ids}
    assert len(sent) == 12
    assert not any(Identity(1).owns(id) for id in (1, 2, "p2.i1", "p11.i1", None))


@pytest.mark.rule("N3")
def test_progress_cancellation_and_subscriptions_follow_their_request() -> None:
    identity = Identity(1)
    token = identity.outgoing(copy(MESSAGES[0]))["params"]["_meta"]["progressToken"]
    progress = {"method": "notifications/progress", "params": {"progressToken": token}}
    assert identity.incoming(progress)["params"]["progressToken"] == 1
    cancelled = {"method": "notifications/cancelled", "params": {"requestId": 1}}
    sent = identity.outgoing(cancelled)["params"]["requestId"]
    assert sent == identity.outgoing(copy(MESSAGES[0]))["id"]
    name = "io.modelcontextprotocol/subscriptionId"
    change = {"method": "notifications/tools/list_changed", "params": {"_meta": {name: sent}}}
    assert identity.incoming(change)["params"]["_meta"][name] == 1
