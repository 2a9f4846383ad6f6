"""The documentation says what is so: links lead somewhere, code compiles, what is made is up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gapless.protocol.refusal import Reason, Refusal
from gapless.protocol.settings import Limits
from tools import cli, diagrams

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_to_a_file_and_a_heading_in_it(page: Path) -> None:
    wrong: list[str] = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        leads = target.is_relative_to(ROOT) and target.exists()
        if not leads or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    reached = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(index))}
    assert [name(page) for page in PAGES if page != index and page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_in_the_pages_compiles(page: Path) -> None:
    for language, code in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, name(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def test_the_readmes_first_command_is_within_its_first_30_lines() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30]
    assert any(re.match(r"(make|pip|gapless) ", line) for line in lines)


def test_every_make_target_that_the_pages_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z]+)\b", text, re.MULTILINE))
        assert named <= targets, name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tests_that_the_pages_name_exist(page: Path) -> None:
    missing: list[str] = []
    for path, test in _TEST.findall(page.read_text(encoding="utf-8")):
        file = ROOT / path
        if not file.exists() or (test and f"def {test}(" not in file.read_text(encoding="utf-8")):
            missing.append(f"{path}::{test}")
    assert missing == []


def test_every_row_of_the_promises_names_a_test_or_a_command() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows
    assert [row for row in rows if not _TEST.search(row) and "`make " not in row] == []


def test_the_table_of_limits_has_each_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE))
    expected = {
        field.name: f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        for field in fields(Limits)
    }
    assert rows == expected
    told = set(re.findall(r"`([a-z-]+)` \((\d{3})", page))
    assert told
    assert {(reason, int(status)) for reason, status in told} <= {
        (reason.value, Refusal(reason, "", own=own).status) for reason in Reason for own in (False, True)
    }


def test_the_layout_in_the_architecture_names_every_module() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    (layout,) = [code for _, code in _FENCE.findall(page) if code.startswith("src/gapless/")]
    named = set[str]()
    packages: list[str] = []
    for line in layout.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        if not 0 < depth <= len(packages) + 1:
            continue  # what is beside the package, or the rest of a description
        name = line.split()[0]
        del packages[depth - 1 :]
        named.add("".join(packages) + name)
        if name.endswith("/"):
            packages.append(name)
    source = ROOT / "src" / "gapless"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    modules = {m for m in modules if m == "__init__.py" or not m.endswith(("__init__.py", "__main__.py"))}
    assert modules - named == set()
    assert {n for n in named if n.endswith(".py")} - modules == set()


def test_the_diagrams_are_what_the_code_runs_on() -> None:
    assert diagrams.drawn(page := diagrams.PAGE.read_text(encoding="utf-8")) == page, (
        "run python tools/diagrams.py"
    )


def test_the_command_lines_reference_is_what_its_help_says() -> None:
    assert cli.written() == cli.PAGE.read_text(encoding="utf-8"), "run python tools/cli.py"


@pytest.mark.parametrize("tool", ["diagrams", "cli"])
def test_a_tool_that_checks_writes_nothing_and_exits_0(tool: str) -> None:
    done = subprocess.run([sys.executable, f"tools/{tool}.py", "--check"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0


def test_a_page_without_a_place_for_a_diagram_is_refused() -> None:
    with pytest.raises(ValueError, match="client"):
        diagrams.drawn("<!-- generated: door -->\n<!-- end -->\n")
