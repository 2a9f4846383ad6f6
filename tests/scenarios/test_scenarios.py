"""Both machines do what the scenario files say. `runner` says how to read one, and how one is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.runner import COMMANDS, ScenarioError, check

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "reference" / "protocol.md"

SCENARIO = """\
# The client reads what is emitted.
open policy=never
emit 2
----
server → client   stream: events 1–2
client            cursor 0 → 2
= server SSE_ACTIVE, log 1–2, acked 0 | client streaming, cursor 2

# Then nothing happens.
tick 1s
----
(nothing)
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("u1_cover_or_refuse", marks=pytest.mark.rule("U1")),
        pytest.param("u1_unquiesced_upgrade", marks=pytest.mark.rule("U1")),
        pytest.param("u2_101_without_a_cursor", marks=pytest.mark.rule("U2")),
        pytest.param("u2_the_101_says_where_it_starts", marks=pytest.mark.rule("U2")),
        pytest.param("u3_the_gap_in_order", marks=pytest.mark.rule("U3")),
        pytest.param("u4_nothing_above_c_before_its_ack", marks=pytest.mark.rule("U4")),
        pytest.param("u5_acks_while_bound", marks=pytest.mark.rule("U5")),
        pytest.param("u6_upgrades_that_never_arrive", marks=pytest.mark.rule("U6")),
        pytest.param("u7_one_negotiation_at_a_time", marks=pytest.mark.rule("U7")),
        pytest.param("u7_second_acceptance", marks=pytest.mark.rule("U7")),
        pytest.param("u8_before_and_after_the_commit_point", marks=pytest.mark.rule("U8")),
        pytest.param("u9_when_a_client_goes_to_the_door", marks=pytest.mark.rule("U9")),
        pytest.param("u10_streams_end_at_u", marks=pytest.mark.rule("U10")),
        pytest.param("b1_idle_stream_at_the_boundary", marks=pytest.mark.rule("B1")),
        pytest.param("b1_resume_at_the_boundary", marks=pytest.mark.rule("B1")),
        pytest.param("b2_resume_below_the_boundary", marks=pytest.mark.rule("B2")),
        pytest.param("b3_repeating_the_handshake", marks=pytest.mark.rule("B3")),
        pytest.param("b4_an_ended_session", marks=pytest.mark.rule("B4")),
        pytest.param("b5_nobody_waits_for_the_server", marks=pytest.mark.rule("B5")),
        pytest.param("b6_a_probe_tells", marks=pytest.mark.rule("B6")),
        pytest.param("b7_when_the_socket_goes", marks=pytest.mark.rule("B7")),
        pytest.param("b8_a_takeover_by_number", marks=pytest.mark.rule("B8")),
        pytest.param("b9_expiry_and_delete", marks=pytest.mark.rule("B9")),
        pytest.param("c3_echoed_cursor", marks=pytest.mark.rule("C3")),
        pytest.param("n1_a_message_is_handed_over_once", marks=pytest.mark.rule("N1")),
        pytest.param("n2_a_backend_is_gone", marks=pytest.mark.rule("N2")),
        pytest.param("n3_ids_stay_apart", marks=pytest.mark.rule("N3")),
    ],
)
def test_both_machines_do_what_the_file_says(name: str, rewritten: list[str] | None) -> None:
    difference = check(HERE / f"{name}.txt", rewriting=rewritten is not None)
    if rewritten is None:
        assert not difference, f"review this, then write it with --rewrite-scenarios:\n{difference}"
    elif difference:
        rewritten.append(f"tests/scenarios/{name}.txt")


def shown() -> dict[str, set[str]]:
    """Each file that the test above names, and the rules it is marked with."""
    (parametrize,) = getattr(test_both_machines_do_what_the_file_says, "pytestmark")  # noqa: B009
    return {
        case.values[0]: {rule for mark in case.marks for rule in mark.args} for case in parametrize.args[1]
    }


def test_each_file_is_shown_under_the_rule_that_it_is_named_for() -> None:
    assert shown() == {path.stem: {path.stem.partition("_")[0].upper()} for path in HERE.glob("*.txt")}


def test_each_rule_of_the_door_and_of_the_boundary_has_a_file() -> None:
    rules = set(re.findall(r"^- \*\*([UB][0-9]+)\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rules
    assert rules <= set().union(*shown().values())


def test_each_command_is_used_in_a_file() -> None:
    """Or it is one that nobody has seen work."""
    parts = [part for path in HERE.glob("*.txt") for part in path.read_text(encoding="utf-8").split("\n\n")]
    commands = [line for part in parts for line in part.partition("----")[0].splitlines()]
    assert COMMANDS.keys() <= {line.split()[0] for line in commands}


# The runner -----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A scenario file that says what happens."""
    path = tmp_path / "u0_a_scenario.txt"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_file_that_says_what_happens_passes(file: Path) -> None:
    assert check(file) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("events 1–2", "events 1–3"),
        ("client            cursor 0 → 2\n", ""),
        ("(nothing)", "(nothing)\nmore"),
    ],
)
def test_whatever_else_a_file_says_is_told_as_a_diff(file: Path, old: str, new: str) -> None:
    replace(file, old, new)
    assert re.search(r"^[-+][^-+]", check(file), re.MULTILINE)


def test_rewriting_keeps_prose_and_commands_and_says_what_happens_now(file: Path) -> None:
    replace(file, "events 1–2", "events 1–3")
    replace(file, "----\n(nothing)\n", "")
    assert check(file, rewriting=True)
    assert file.read_text(encoding="utf-8") == SCENARIO


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tick 1s", "tack 1s", ":10: tack 1s: there is no such command"),
        ("tick 1s", "tick 1", ":10: tick 1: a time reads like"),
        ("tick 1s", "tick 1s soon", ":10: tick 1s soon: tick does not take soon"),
        ("emit 2", "emit two", ":3: emit two: "),
        ("emit 2", "emit", ":3: emit: emit what?"),
        ("open policy=never", "open policy=maybe", ":2: open policy=maybe: policy is"),
        ("open policy=never", "open loss=maybe", ":2: open loss=maybe: loss is"),
        ("open policy=never", "open colour=red", ":2: open colour=red: open does not take colour=red"),
        ("open policy=never", "tick 1s", ":2: tick 1s: a scenario begins with open"),
        ("tick 1s", "resume cursor=3", ":10: resume cursor=3: there is no event 3 yet"),
        ("tick 1s", "upgrade cursor=2", ":10: upgrade cursor=2: upgrade nonce=what?"),
        ("tick 1s", "drop socket", ":10: drop socket: client has no socket"),
        ("tick 1s", "drop stream at=nobody", ":10: drop stream at=nobody: "),
        ("tick 1s", "release stream", ":10: release stream: stream is not held"),
        ("tick 1s", "answer 1", ":10: answer 1: the backend has no request 1"),
        ("tick 1s", "hold steam", ":10: hold steam: 'steam' is none of"),
        ("tick 1s", "emit 1\nopen", ":11: open: this begins a paragraph"),
        ("tick 1s", "lose 101", ":10: never lost: 101"),
        ("----\n(nothing)\n", "", ":10: nothing is said of what happens"),
        (SCENARIO, "# Prose alone.\n", ": no commands"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_its_line(
    file: Path, old: str, new: str, told: str
) -> None:
    replace(file, old, new)
    with pytest.raises(ScenarioError, match=re.escape(file.name + told)):
        check(file)


def test_what_a_machine_raises_is_told_with_the_line_that_led_to_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def illegal(*_: Any) -> None:
        raise KeyError("illegal here")

    monkeypatch.setattr("gapless.protocol.session.Session.evict", illegal)
    with pytest.raises(ScenarioError, match=r":3: emit 2: KeyError\('illegal here'\)"):
        check(file)
