"""The oracle: what arrived of a climb, told apart from everything else that a server may send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless.torture.ladder import Account, Climb, Kind, Ledger, ranges, runs_request

ALL = (Kind.PROGRESS, Kind.LOG, Kind.ASK, Kind.CHANGED, Kind.STRAY)
CLIMB = Climb("resume-1-aa", 10, 0.01, ALL)


def rung(number: int, climb: Climb = CLIMB, kind: Kind | None = None) -> dict[str, Any]:
    """A rung, as `examples/ladder_server.py` sends it."""
    here = {"run": climb.run, "rung": number}
    match kind or climb.kind(number):
        case Kind.PROGRESS:
            return note("progress", {"progressToken": climb.run, "progress": number, "total": climb.rungs})
        case Kind.LOG | Kind.STRAY:
            return note("message", {"level": "info", "data": here})
        case Kind.CHANGED:
            return note("tools/list_changed", {"_meta": here})
        case Kind.ASK:
            return {
                "id": f"s{number}",
                "method": "elicitation/create",
                "params": {"message": f"{climb.run} {number}"},
            }


def note(what: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": f"notifications/{what}", "params": params}


def answer(climb: Climb = CLIMB, id: Any = 1, **changed: Any) -> dict[str, Any]:
    asked = [number for number in range(1, climb.rungs + 1) if climb.kind(number) is Kind.ASK]
    text = json.dumps({"run": climb.run, "rungs": climb.rungs, "answers": asked, **changed})
    return {"jsonrpc": "2.0", "id": id, "result": {"content": [{"type": "text", "text": text}]}}


def account(*messages: dict[str, Any], stream: int = 0, climb: Climb = CLIMB) -> Account:
    made = Account(climb, 1)
    for message in messages:
        made.take(message, stream)
    return made


# Asking ---------------------------------------------------------------------------------------------------


def test_a_climb_is_a_call_of_the_tool_ladder_whose_progress_token_is_its_run() -> None:
    assert Climb("r", 3, 0.5, (Kind.LOG, Kind.STRAY)).request(7) == {
        "jsonrpc": "2.0",
        "id": 7,
        "method": "tools/call",
        "params": {
            "name": "ladder",
            "arguments": {"run": "r", "rungs": 3, "delay": 0.5, "kinds": ["log", "stray"]},
            "_meta": {"progressToken": "r"},
        },
    }
    assert Climb("r", 3, 0.5, pad=9).request(7)["params"]["arguments"]["pad"] == 9


def test_how_often_it_was_begun_is_asked_of_the_tool_runs() -> None:
    assert runs_request(8, "r")["params"] == {"name": "runs", "arguments": {"run": "r"}}


def test_the_kinds_take_turns_from_the_first_rung_on() -> None:
    assert [CLIMB.kind(number) for number in range(1, 8)] == [*ALL, Kind.PROGRESS, Kind.LOG]


def test_what_a_standard_server_sends_on_the_calls_own_stream_is_of_the_call() -> None:
    assert [kind for kind in Kind if kind.of_the_call] == [Kind.PROGRESS, Kind.LOG, Kind.ASK]


# Counting -------------------------------------------------------------------------------------------------


def test_a_climb_of_every_kind_that_arrives_whole_is_complete_and_faultless() -> None:
    whole = account(*map(rung, range(1, 11)), answer())
    assert whole.complete
    assert whole.answered
    assert (whole.missing, whole.repeated, whole.reordered) == ([], [], [])


@pytest.mark.parametrize("kind", Kind)
def test_a_rung_of_each_kind_that_does_not_arrive_is_missing(kind: Kind) -> None:
    climb = Climb("r", 3, 0.0, (kind,))
    short = account(rung(1, climb), rung(3, climb), answer(climb), climb=climb)
    assert short.missing == [2]
    assert not short.complete


def test_without_its_answer_a_climb_is_not_complete() -> None:
    assert not account(*map(rung, range(1, 11))).complete


def test_every_repeat_is_counted_and_a_second_answer_is_one() -> None:
    again = account(rung(1), rung(2), rung(1), rung(1), answer(), answer(), answer())
    assert again.repeated == [1, 1, 0, 0]


def test_a_rung_after_a_later_one_of_its_stream_is_reordered() -> None:
    assert account(rung(1), rung(3), rung(2), rung(4)).reordered == [2]
    assert account(rung(1), rung(4), rung(2), rung(3), rung(5)).reordered == [2, 3]


def test_streams_have_no_order_among_each_other() -> None:
    two = Account(CLIMB, 1)
    for number, stream in ((4, 0), (1, 1), (5, 0), (2, 1), (3, 1)):
        two.take(rung(number), stream)
    assert two.reordered == []
    assert two.missing == [6, 7, 8, 9, 10]


def test_a_repeat_is_not_reordered_as_well() -> None:
    assert account(rung(1), rung(2), rung(3), rung(1), rung(2), rung(4)).reordered == []


def test_the_first_answer_counts() -> None:
    twice = account(answer(), {"id": 1, "error": {"code": 0, "message": "late"}})
    assert twice.answered


@pytest.mark.parametrize(
    "last",
    [
        {"id": 1, "error": {"code": -32000, "message": "outcome unknown"}},
        answer(answers=[3]),  # a question's answer was lost
        answer(answers=[3, 8, 8]),
        answer(rungs=9),
        answer(run="other"),
        {"id": 1, "result": {"content": [{"type": "text", "text": "Error executing tool"}]}},
        {"id": 1, "result": {"content": []}},
        {"id": 1, "result": {"content": [{"text": 3}]}},
        {"id": 1, "result": {"content": None}},
        {"id": 1, "result": None},
        {"id": 1, "result": "done"},
        {"id": 1},
    ],
)
def test_an_answer_that_is_not_the_climbs_own_end_is_a_result_but_no_answer(last: dict[str, Any]) -> None:
    ended = account(*map(rung, range(1, 11)), last)
    assert ended.complete
    assert not ended.answered


def test_rungs_after_the_answer_are_late_on_its_own_stream_and_nowhere_else() -> None:
    two = Account(CLIMB, 1)
    for message, stream in (
        (rung(1), 1),
        (rung(4), 0),
        (answer(), 1),
        (rung(2), 1),
        (rung(1), 1),
        (rung(5), 0),
    ):
        two.take(message, stream)
    assert (two.before, two.late) == (2, [2])
    assert account(rung(1)).late == []
    assert account(rung(1)).before is None


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        ({"code": -32000, "data": {"reason": "outcome-unknown"}}, True),
        ({"code": -32000, "data": {"reason": "outcome-unknown", "cause": "closed"}}, True),
        ({"code": -32603, "data": {"reason": "outcome-unknown"}}, False),
        ({"code": -32000, "data": {"reason": "backend-lost"}}, False),
        ({"code": -32000, "data": None}, False),
        ({"code": -32000}, False),
        (None, False),
    ],
)
def test_of_which_outcome_nobody_knows_is_said_in_the_error_s_data(error: Any, unknown: bool) -> None:
    assert account({"id": 1, "error": error}).outcome_unknown is unknown
    assert not account(rung(1)).outcome_unknown


# What is of no concern -------------------------------------------------------------------------------------

OTHER = Climb("resume-1-bb", 10, 0.01, ALL)


@pytest.mark.parametrize("number", range(1, 6))
def test_rungs_of_another_run_are_not_counted(number: int) -> None:
    assert account(rung(number, OTHER)).rungs == []


@pytest.mark.parametrize("id", [2, "1", None, [1]])
def test_an_answer_to_something_else_is_not_the_climbs(id: Any) -> None:
    assert account(answer(id=id)).result is None


def test_a_request_of_the_server_under_the_same_id_is_no_answer() -> None:
    assert account({"id": 1, "method": "ping"}).result is None


RUN = CLIMB.run
STRANGE: list[dict[str, Any]] = [
    {},
    {"id": None},
    {"method": None},
    {"method": 3, "id": {}},
    {"method": ["notifications/progress"]},
    note("progress", None),
    note("progress", [RUN, 1]),
    note("progress", "1"),
    note("progress", {}),
    note("progress", {"progressToken": RUN}),
    note("progress", {"progressToken": RUN, "progress": "1"}),
    note("progress", {"progressToken": RUN, "progress": None}),
    note("progress", {"progressToken": RUN, "progress": True}),
    note("progress", {"progressToken": RUN, "progress": [1]}),
    note("progress", {"progressToken": RUN, "progress": 0}),
    note("progress", {"progressToken": RUN, "progress": 0.5}),
    note("progress", {"progressToken": RUN, "progress": 1.5}),
    note("progress", {"progressToken": RUN, "progress": -1}),
    note("progress", {"progressToken": RUN, "progress": 11}),
    note("progress", {"progressToken": RUN, "progress": 1e308}),
    note("progress", {"progressToken": RUN, "progress": float("inf")}),
    note("progress", {"progressToken": RUN, "progress": float("nan")}),
    note("progress", {"progressToken": {"run": RUN}, "progress": 1}),
    note("message", None),
    note("message", {"data": None}),
    note("message", {"data": f"{RUN} 1"}),
    note("message", {"data": [RUN, 1]}),
    note("message", {"data": {"run": RUN}}),
    note("message", {"data": {"rung": 1}}),
    note("message", {"data": {"run": RUN, "rung": {}}}),
    note("tools/list_changed", None),
    note("tools/list_changed", {"_meta": None}),
    note("tools/list_changed", {"_meta": [1]}),
    {"id": 5, "method": "elicitation/create"},
    {"id": 5, "method": "elicitation/create", "params": {"message": None}},
    {"id": 5, "method": "elicitation/create", "params": {"message": RUN}},
    {"id": 5, "method": "elicitation/create", "params": {"message": f"{RUN} one"}},
    {"id": 5, "method": "elicitation/create", "params": {"message": f"{RUN} -1"}},
    {"id": 5, "method": "elicitation/create", "params": {"message": f"{RUN} ²"}},
    {"id": 5, "method": "elicitation/create", "params": {"message": f"{RUN} {'9' * 5000}"}},
]


@pytest.mark.parametrize("message", STRANGE, ids=lambda message: str(message)[:60])
def test_what_a_strange_server_sends_is_no_rung_and_raises_nothing(message: dict[str, Any]) -> None:
    ledger = Ledger()
    strange = ledger.start(CLIMB, 1)
    ledger.take(message)
    assert strange.rungs == []
    assert strange.result is None
    assert ledger.count == 1


def test_progress_in_floating_point_is_a_rung() -> None:
    assert account(note("progress", {"progressToken": RUN, "progress": 1.0})).rungs == [1]


# A session's ledger ----------------------------------------------------------------------------------------


def test_a_question_of_the_climb_is_replied_to_with_its_rung() -> None:
    ledger = Ledger()
    ledger.start(OTHER, 2)
    ledger.start(CLIMB, 1)
    assert ledger.take(rung(3)) == {
        "jsonrpc": "2.0",
        "id": "s3",
        "result": {"action": "accept", "content": {"rung": 3}},
    }


def test_any_other_request_is_replied_to_with_nothing_in_it() -> None:
    ledger = Ledger()
    ledger.start(CLIMB, 1)
    assert ledger.take({"id": 1, "method": "ping"}) == {"jsonrpc": "2.0", "id": 1, "result": {}}
    assert ledger.take(rung(3, OTHER)) == {"jsonrpc": "2.0", "id": "s3", "result": {}}


def test_notifications_and_answers_want_no_reply() -> None:
    ledger = Ledger()
    ledger.start(CLIMB, 1)
    assert [ledger.take(message) for message in (rung(1), rung(2), rung(4), answer())] == [None] * 4


def test_a_message_is_counted_once_however_many_climbs_there_are() -> None:
    ledger = Ledger()
    first, second = ledger.start(CLIMB, 1), ledger.start(OTHER, 2)
    for message in (rung(1), rung(1, OTHER), rung(2, OTHER), note("message", {})):
        ledger.take(message)
    assert (ledger.count, ledger.rungs) == (4, 3)
    assert (first.rungs, second.rungs) == ([1], [1, 2])


def test_a_ledger_is_answered_and_complete_when_all_its_climbs_are() -> None:
    ledger = Ledger()
    ledger.start(CLIMB, 1)
    ledger.start(OTHER, 2)
    for message in (*map(rung, range(1, 11)), answer()):
        ledger.take(message)
    assert not ledger.answered
    ledger.take({"id": 2, "error": {}})
    assert ledger.answered
    assert not ledger.complete
    for number in range(1, 11):
        ledger.take(rung(number, OTHER))
    assert ledger.complete


# Numbers for people ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2], "1–2"),
        ([9, 3, 4, 5], "3–5, 9"),
        ([1, 1, 2, 2], "1–2"),
        ([8, 9, 10, 11, 99, 100, 102], "8–11, 99–100, 102"),
    ],
)
def test_numbers_are_written_as_a_person_would(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words
