"""Every rule of the protocol has a test, and every test's rule is there; and what checks that does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.rules import read_rules

ROOT = Path(__file__).resolve().parent.parent

PAGE = """\
## 2. The two logs

- **L1** Events are numbered.
- **N1** *(not built yet)* A session has an owner.
"""
TEST = """\
import pytest


@pytest.mark.rule("L1")
def test_events_are_numbered(): ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project in which everything fits."""
    write(tmp_path, "docs/reference/protocol.md", PAGE)
    write(tmp_path, "tests/test_log.py", TEST)
    write(tmp_path, "src/log.py", '"""Numbers events (L1), as §2 has it."""\n')
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_rules_and_tests_fit() -> None:
    assert read_rules().check() == []


def test_the_command_says_so_and_lists_them() -> None:
    checked = subprocess.run(
        [sys.executable, "tools/rules.py"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert "\nU3 " in checked.stdout


def test_a_project_in_which_all_fits_has_no_problems(project: Path) -> None:
    found = read_rules(project)
    assert found.check() == []
    assert found.tests == {"L1": ["tests/test_log.py::test_events_are_numbered"]}
    assert (
        "L1   1 tests\n       tests/test_log.py::test_events_are_numbered\nN1   0 tests, not built yet"
        in (found.table())
    )


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("docs/reference/protocol.md", PAGE + "- **L2** Durable first.\n", "L2: no test names it"),
        ("docs/reference/protocol.md", PAGE + "- **L1** Again.\n", "L1 is there twice"),
        ("docs/reference/protocol.md", "nothing\n", "no rules"),
        ("tests/test_more.py", TEST.replace("L1", "L7"), "names L7, which"),
        ("tests/test_more.py", TEST.replace('"L1"', "7"), "a rule is named by a string"),
        ("tests/test_more.py", TEST.replace("def test_", "def "), "this marker is on no test"),
        ("src/more.py", "x = 1  # kept here (U3)\n", "src/more.py:1: cites U3"),
        ("src/more.py", '"""A module.\n\nIt does L1–L3.\n"""\n', "src/more.py:3: cites L3"),
        ("src/more.py", 'x = 1\n"""Of x: C4."""\n', "src/more.py:2: cites C4"),
        ("src/more.py", "# see §7\n", "src/more.py:1: cites §7"),
    ],
)
def test_what_does_not_fit_is_told(project: Path, name: str, text: str, told: str) -> None:
    write(project, name, text)
    assert any(told in problem for problem in read_rules(project).check())


@pytest.mark.parametrize(
    "text",
    [
        'x = "L9 in a value is none"\n',
        "# SHA-256, W3C, 2L1 and x.L9 are none\n",
        "# L1, (L1) and L1's are one\n",
    ],
)
def test_only_prose_is_read_and_only_whole_numbers(project: Path, text: str) -> None:
    write(project, "src/more.py", text)
    assert read_rules(project).check() == []


def test_markers_of_a_class_and_of_a_whole_module_count(project: Path) -> None:
    write(
        project,
        "tests/test_more.py",
        'pytestmark = pytest.mark.rule("N1")\n\n\n'
        '@pytest.mark.rule("L1")\nclass TestLog:\n    async def test_numbers(self): ...\n',
    )
    found = read_rules(project)
    assert found.check() == []
    assert found.tests["N1"] == ["tests/test_more.py::TestLog::test_numbers"]
    assert "tests/test_more.py::TestLog::test_numbers" in found.tests["L1"]
