"""The protocol's rules and the tests that show them, checked both ways.

::

    python tools/rules.py            # print which tests show which rule
    python tools/rules.py --check    # exit 1, and say why, if the two do not fit

A rule is a list item `- **U3** …` of docs/reference/protocol.md; one that continues with
`*(not built yet)*` needs no test. A test names what it shows: `@pytest.mark.rule("U3", "C7")`.
Comments and docstrings of src cite rules by number, (U3), and sections of the page, §8.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Rules", "main", "read_rules"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/reference/protocol.md"

_RULE = re.compile(r"^- \*\*([A-Z][0-9]+)\*\*( \*\(not built yet\)\*)?", re.MULTILINE)
_SECTION = re.compile(r"^## ([0-9]+)\. ", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.§])([LCWUBMNS][1-9][0-9]?)(?![\w])")
_RANGE = re.compile(r"(?<![\w.§])([LCWUBMNS])([1-9][0-9]?)[–-](?:\1)?([1-9][0-9]?)(?![\w])")
_CITED = re.compile(r"§([0-9]+(?:\.[0-9]+)?)")


@dataclass
class Rules:
    """What the page, the tests and the code say of the rules."""

    rules: dict[str, bool] = field(default_factory=dict[str, bool])
    """Each rule of the page, in its order, and whether it is built."""
    sections: set[str] = field(default_factory=set[str])
    tests: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Each rule that a marker names, and the tests it is on."""
    problems: list[str] = field(default_factory=list[str])

    def check(self) -> list[str]:
        """Everything that does not fit, a line each."""
        problems = list(self.problems)
        for rule, built in self.rules.items():
            if built and not self.tests.get(rule):
                problems.append(f"{rule}: no test names it, and the page does not say (not built yet)")
        for rule, tests in self.tests.items():
            if rule not in self.rules:
                problems += [f"{test}: names {rule}, which {PAGE} does not have" for test in tests]
        return problems

    def table(self) -> str:
        """Each rule and its tests, for people."""
        lines: list[str] = []
        for rule, built in self.rules.items():
            tests = sorted(self.tests.get(rule, []))
            lines.append(f"{rule:<4} {len(tests)} tests{'' if built else ', not built yet'}")
            lines += [f"       {test}" for test in tests]
        shown = sum(1 for rule in self.rules if self.tests.get(rule))
        lines.append(f"{len(self.rules)} rules, {shown} of them shown by tests")
        return "\n".join(lines)


def read_rules(root: Path = ROOT) -> Rules:
    """Read the page, the tests and the code below `root`."""
    found = Rules()
    page = (root / PAGE).read_text(encoding="utf-8")
    found.sections.update(_SECTION.findall(page))
    for match in _RULE.finditer(page):
        if match[1] in found.rules:
            found.problems.append(f"{PAGE}: {match[1]} is there twice")
        found.rules[match[1]] = match[2] is None
    if not found.rules:
        found.problems.append(f"{PAGE}: no rules; they are list items that begin with - **U3**")
    for path in sorted((root / "tests").rglob("*.py")):
        _read_test(path, path.relative_to(root).as_posix(), found)
    for path in sorted((root / "src").rglob("*.py")):
        _read_source(path, path.relative_to(root).as_posix(), found)
    return found


def _read_test(path: Path, name: str, found: Rules) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), name)
    seen: set[ast.Call] = set()
    whole = [call for node in tree.body if _is_pytestmark(node) for call in _markers([node])]
    for test, decorators in _tests(tree.body, ""):
        for call in [*whole, *_markers(decorators)]:
            seen.add(call)
            for number in call.args:
                if isinstance(number, ast.Constant) and isinstance(number.value, str):
                    found.tests.setdefault(number.value, []).append(f"{name}::{test}")
                else:
                    found.problems.append(f"{name}:{number.lineno}: a rule is named by a string")
    for call in _markers([tree]):
        if call not in seen:
            found.problems.append(f"{name}:{call.lineno}: this marker is on no test")


def _tests(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, list[ast.AST]]]:
    """Every test function, and whatever marks it: its decorators, and those of its class."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, list(node.decorator_list)
        elif isinstance(node, ast.ClassDef):
            marks = [inner for inner in node.body if _is_pytestmark(inner)]
            for test, decorators in _tests(node.body, f"{node.name}::"):
                yield prefix + test, [*decorators, *node.decorator_list, *marks]


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    )


def _markers(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls of `pytest.mark.rule` anywhere below."""
    for top in nodes:
        for node in ast.walk(top):
            match node:
                case ast.Call(func=ast.Attribute(attr="rule") as marker):
                    if ast.unparse(marker) == "pytest.mark.rule":
                        yield node
                case _:
                    pass


def _read_source(path: Path, name: str, found: Rules) -> None:
    for line, text in _prose(path):
        numbers = _NUMBER.findall(text)
        for letter, first, last in _RANGE.findall(text):
            numbers += [f"{letter}{number}" for number in range(int(first), int(last) + 1)]
        for number in sorted(set(numbers) - found.rules.keys()):
            found.problems.append(f"{name}:{line}: cites {number}, which {PAGE} does not have")
        for cited in sorted(set(_CITED.findall(text))):
            section, _, item = cited.partition(".")
            if section not in found.sections or (item and f"S{item}" not in found.rules):
                found.problems.append(f"{name}:{line}: cites §{cited}, which {PAGE} does not have")


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, attributes' own ones included: a line number and its text each."""
    with tokenize.open(path) as file:
        text = file.read()
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                for offset, line in enumerate(value.splitlines()):
                    yield node.lineno + offset, line


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or check; the exit status is returned."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="say what does not fit, and exit 1 if anything")
    options = parser.parse_args(arguments)
    found = read_rules()
    if not options.check:
        print(found.table())
        return 0
    problems = found.check()
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else f"{len(found.rules)} rules and their tests fit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
