"""What a run comes to: a structure for programs, command lines that repeat it, and a page by itself."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from typing import Any

import pytest
import typer.main

from gapless.cli import app
from gapless.cli.target import Aim, aim
from gapless.torture.experiments import EXPERIMENTS
from gapless.torture.page import page
from gapless.torture.report import report
from gapless.torture.schedule import Schedule, format_schedule, parse_schedule
from gapless.torture.trial import Bytes, Entry, Trial, Violation
from gapless.torture.trials import Result

RESUME = EXPERIMENTS["resume"]
URL = "http://127.0.0.1:8000/mcp"


def failed(seed: int = 17, schedule: Schedule | None = None, detail: str = "rungs 3–5 of 60 (log)") -> Trial:
    """A failed trial with a little of everything on its timeline."""
    trial = Trial("resume", seed, RESUME().plan(seed) if schedule is None else schedule)
    trial.measure("recovery", 12.0)
    trial.counts["resumes"] += 2
    trial.trace.entries.extend(
        [
            Entry(0.1, "wire", "1 POST /mcp"),
            Entry(0.2, "event", "1.1.aa notifications/progress"),
            Entry(0.3, "fault", "reset"),
            Entry(0.4, "client", "resumes from 1.1.aa"),
            Entry(0.5, "event", "4.1.ab answer"),
        ]
    )
    trial.trace.bytes.extend(
        [Bytes(0.1, 1, False, 300), Bytes(0.2, 1, True, 9000), Bytes(0.3, 1, True, 0), Bytes(0.4, 2, True, 1)]
    )
    trial.find(Violation.MISSING, detail, 3)
    trial.seconds = 0.6
    return trial


def result(*trials: Trial, well: int = 0, shrunk: dict[int, str] | None = None) -> Result:
    made = Result(RESUME, seconds=3.21)
    for trial in [*trials, *(Trial("resume", 90 + number, ()) for number in range(well))]:
        made.add(trial)
    made.shrunk = {seed: parse_schedule(text) for seed, text in (shrunk or {}).items()}
    return made


def reported(
    *results: Result, target: Aim | None = None, left_out: dict[str, str] | None = None
) -> dict[str, Any]:
    target = target or Aim(URL, ())
    return report(str(target), target.words, results, left_out or {})


# For programs -----------------------------------------------------------------------------------------------


def test_a_report_has_these_keys_and_is_json() -> None:
    told = reported(
        result(failed(), well=2, shrunk={17: "12:reset"}), left_out={"boundary": "no session view"}
    )
    assert json.loads(json.dumps(told)) == told
    assert told == {
        "target": URL,
        "violations": 3,
        "experiments": [
            {
                "name": "resume",
                "about": RESUME.about,
                "trials": 3,
                "failed trials": 1,
                "seconds": 3.2,
                "violations": {"missing": 3},
                "counts": {"resumes": 2},
                "measures": {"recovery": {"count": 1, "median": 12.0, "p99": 12.0, "most": 12.0}},
                "failures": [
                    {
                        "seed": 17,
                        "schedule": format_schedule(RESUME().plan(17)),
                        "shrunk": "12:reset",
                        "again": f"gapless torture -e resume --seed 17 --trials 1 --schedule 12:reset {URL}",
                        "findings": [
                            {
                                "violation": "missing",
                                "meaning": Violation.MISSING.meaning,
                                "detail": "rungs 3–5 of 60 (log)",
                                "amount": 3,
                            }
                        ],
                    }
                ],
            }
        ],
        "left out": {"boundary": "no session view"},
    }


def test_violations_are_summed_over_experiments() -> None:
    assert reported(result(failed(1), failed(2)), result(failed(3)), result(well=1))["violations"] == 9
    assert reported(result(well=5))["violations"] == 0
    assert reported()["experiments"] == []


def test_measures_are_median_99th_percentile_and_most() -> None:
    trial = Trial("resume", 1, ())
    for value in range(200, 0, -1):
        trial.measure("recovery", value / 3)
    (experiment,) = reported(result(trial))["experiments"]
    assert experiment["measures"]["recovery"] == {"count": 200, "median": 33.5, "p99": 66.33, "most": 66.67}


# Command lines ----------------------------------------------------------------------------------------------

TARGETS = (
    Aim(URL, ()),
    Aim("http://h/mcp?key=a b&c='d'", ()),
    Aim(None, ("examples.ladder_server:server",)),
    Aim(None, ("--", "python", "server.py")),
    Aim(None, ("--", "/opt/my server", "--seed", "3", "it's", "$HOME", "-e", "")),
)


def parsed(line: str) -> dict[str, Any]:
    """What the command makes of a command line."""
    program, name, *args = shlex.split(line)
    assert (program, name) == ("gapless", "torture")
    command = typer.main.get_command(app).commands["torture"]  # type: ignore[attr-defined]
    return command.make_context("torture", args).params


def again(
    trial: Trial, target: Aim, shrunk: dict[int, str] | None = None
) -> tuple[dict[str, Any], Schedule | None]:
    """The command line that repeats a trial as the command reads it, and the schedule it has then."""
    told = reported(result(trial, shrunk=shrunk), target=target)
    params = parsed(told["experiments"][0]["failures"][0]["again"])
    assert aim(params["target"] or [], params["app"]) == target
    schedule = params["schedule"]
    return params, RESUME().plan(params["seed"]) if schedule is None else parse_schedule(schedule)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("shrunk", [None, "", "12:reset", "3:split 12:cut-result"])
def test_the_command_line_of_a_failure_repeats_it(target: Aim, shrunk: str | None) -> None:
    params, schedule = again(failed(), target, None if shrunk is None else {17: shrunk})
    assert (params["experiment"], params["seed"], params["trials"]) == (["resume"], 17, 1)
    assert schedule == (RESUME().plan(17) if shrunk is None else parse_schedule(shrunk))


def test_a_trial_that_went_on_from_others_is_repeated_with_them() -> None:
    trial = failed(19)
    trial.since = 17
    params, _ = again(trial, TARGETS[1])
    assert (params["seed"], params["trials"]) == (17, 3)


def test_a_schedule_that_is_its_seeds_own_need_not_be_given() -> None:
    params, _ = again(failed(), TARGETS[0])
    assert params["schedule"] is None
    params, _ = again(failed(), TARGETS[0], {17: format_schedule(RESUME().plan(17))})
    assert params["schedule"] is None


def test_a_schedule_that_was_given_is_given_again() -> None:
    _, schedule = again(failed(schedule=parse_schedule("1:outage")), TARGETS[0])
    assert schedule == parse_schedule("1:outage")
    _, schedule = again(failed(schedule=()), TARGETS[0])
    assert schedule == ()
    # Shrunk to what the seed would have drawn, it is the seed's own.
    _, schedule = again(failed(schedule=()), TARGETS[0], {17: format_schedule(RESUME().plan(17))})
    assert schedule == RESUME().plan(17)


# The page ---------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "hr", "img", "input", "link", "col"}
IMPLIED = {"html", "tr", "th", "td", "li", "p"}
"""Elements whose end may be left out."""
ACTIVE = {
    "script",
    "iframe",
    "object",
    "embed",
    "link",
    "base",
    "form",
    "img",
    "image",
    "use",
    "foreignobject",
}


class Page(HTMLParser):
    """Reads a page as a browser would, and stops at what is not in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.style = ""
        self.feed(text)
        self.close()
        assert [tag for tag in self.open if tag not in IMPLIED] == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag:
            assert self.open.pop() in IMPLIED, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.style += data
        else:
            self.texts.append(data)

    def count(self, tag: str, kind: str) -> int:
        return len([1 for name, attrs in self.elements if name == tag and attrs.get("class") == kind])

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def shown(*results: Result, **told: Any) -> Page:
    return Page(page(reported(*results, **told), results))


def test_a_page_needs_nothing_but_itself() -> None:
    made = shown(result(failed(), well=3), left_out={"boundary": "no session view"})
    for tag, attrs in made.elements:
        assert tag not in ACTIVE
        assert not {"src", "href", "xlink:href", "srcset", "style"} & set(attrs)
        assert not [name for name in attrs if name.startswith("on")]
    assert "@import" not in made.style
    assert "url(" not in made.style
    assert ("meta", {"charset": "utf-8"}) in made.elements


def test_a_page_tells_what_the_report_does() -> None:
    trial = failed()
    made = shown(result(trial, well=3, shrunk={17: "12:reset"}), left_out={"boundary": "no session view"})
    for words in (
        URL,
        "3 violations",
        RESUME.about,
        "missing 3",
        "recovery 12 (p99 12)",
        "resumes 2",
        "boundary: no session view",
        "resume, seed 17",
        ": rungs 3–5 of 60 (log)",
        Violation.MISSING.meaning,
        format_schedule(trial.schedule),
        "12:reset",
        f"gapless torture -e resume --seed 17 --trials 1 --schedule 12:reset {URL}",
        "   0.400  client  resumes from 1.1.aa",
    ):
        assert words in made.text, words


def test_a_page_says_if_it_fails_without_any_fault() -> None:
    made = shown(result(failed(), shrunk={17: ""}))
    assert re.search(r"shrunk to\s+none\b", made.text)
    assert "shrunk" not in shown(result(failed())).text


def test_a_timeline_shows_bytes_events_what_the_client_did_and_what_was_done_to_it() -> None:
    made = shown(result(failed()))
    assert (made.count("rect", "up"), made.count("rect", "down")) == (1, 2)
    assert made.count("circle", "event") == 2
    assert made.count("rect", "mark") == 2
    assert (made.count("line", "fault"), made.count("line", "violation")) == (1, 1)
    for words in ("0.200 s: 9000 bytes to the client", "0.300 s: reset", "link 2", "0.60 s"):
        assert words in made.text, words


def test_what_is_later_is_further_right_and_what_is_shown_is_in_the_picture() -> None:
    trial = failed()
    trial.trace.entries[-1] = Entry(0.59, "fault", "VIOLATION missing: late")
    made = shown(result(trial))
    ((_, svg),) = [(tag, attrs) for tag, attrs in made.elements if tag == "svg"]
    width, height = map(float, str(svg["viewbox"]).split()[2:])
    places = [
        (float(str(attrs.get("x") or attrs.get("cx") or attrs.get("x1"))), attrs)
        for tag, attrs in made.elements
        if tag in ("rect", "circle", "line", "text")
    ]
    assert all(0 <= x <= width for x, _ in places)
    assert all(0 <= float(str(a.get("y") or a.get("cy") or a.get("y2"))) <= height for _, a in places)
    events = [x for x, attrs in places if attrs.get("class") == "event"]
    assert events == sorted(events)
    assert events[0] < events[1]


@pytest.mark.parametrize("numbers", [(), (7,), (0, 0), (1, 2, 3), (1, 10**17)], ids=str)
def test_any_number_of_events_makes_a_timeline(numbers: tuple[int, ...]) -> None:
    trial = failed()
    trial.trace.entries.clear()
    trial.trace.bytes.clear()
    trial.trace.entries.extend(Entry(0.0, "event", f"{number}.0.aa x") for number in numbers)
    trial.trace.entries.append(Entry(0.0, "event", "None x"))
    trial.seconds = 0.0
    assert shown(result(trial)).count("circle", "event") == len(numbers) + 1


def test_where_nothing_failed_there_is_no_timeline() -> None:
    made = shown(result(well=2))
    assert "nothing was lost" in made.text
    assert "No trial failed" in made.text
    assert not [tag for tag, _ in made.elements if tag == "svg"]


HOSTILE = (
    "<script>alert(1)</script>",
    "'><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "</pre></title></style></code><h1>",
    "<!-- ",
    "&lt;b&gt; &amp;amp;",
    "$target ${rows} $$",
    "]]>",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_server_says_is_text_on_the_page_and_nothing_else(text: str) -> None:
    plain = shown(result(failed(detail="x")))
    trial = failed(detail=text)
    for lane in ("wire", "event", "client", "fault"):
        trial.trace.note(lane, text)
    target = Aim(None, ("--", text))
    made = shown(result(trial), target=target, left_out={text: text})
    assert made.text.count(text) >= 12
    assert {tag for tag, _ in made.elements} - {tag for tag, _ in plain.elements} <= {"ul", "li"}
    assert {name for _, attrs in made.elements for name in attrs} == {
        name for _, attrs in plain.elements for name in attrs
    }
