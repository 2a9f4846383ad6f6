"""What the judges are made of, installed once under build/interop: packages of npm and of PyPI."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "Packages", "chromium", "npm", "python"]

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "interop"

_NODE: Final = "node@22"
_PATIENCE: Final = 600
"""Seconds that one installation may take."""


@dataclass(frozen=True, slots=True)
class Packages:
    """A directory with packages in it.

    Attributes:
        folder: where they are.
        program: the interpreter that finds them: node, or the Python of a virtual environment.
        versions: of the packages asked for, by name.
    """

    folder: Path
    program: str
    versions: dict[str, str]

    def script(self, package: str) -> list[str]:
        """The command that an npm package names first as its own."""
        at = self.folder / "node_modules" / package
        commands = json.loads((at / "package.json").read_text())["bin"]
        return [
            self.program,
            str(at / (commands if isinstance(commands, str) else next(iter(commands.values())))),
        ]


def npm(name: str, *packages: str) -> Packages:
    """npm packages, and a node of their own to run them.

    Raises:
        CalledProcessError, TimeoutExpired: they cannot be installed.
    """
    folder = BUILD / name
    if _stale(folder, packages):
        _tell(folder, packages)
        (folder / "package.json").write_text('{"private": true}\n')
        # The scripts of `node` put its binary in place; newer versions of npm run none that are not named.
        words = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder)]
        _run([*words, _NODE, *packages])
        _done(folder, packages)
    versions: dict[str, str] = {}
    for package in packages:
        called = package if "@" not in package[1:] else package[: package.rindex("@")]
        described = folder / "node_modules" / called / "package.json"
        versions[called] = json.loads(described.read_text())["version"]
    return Packages(folder, str(folder / "node_modules" / ".bin" / "node"), versions)


def python(name: str, *packages: str) -> Packages:
    """Python packages, in a virtual environment of their own.

    Raises:
        CalledProcessError, TimeoutExpired: they cannot be installed.
    """
    folder = BUILD / name
    program = folder / "bin" / "python"
    if _stale(folder, packages):
        _tell(folder, packages)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(program), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *packages])
        _done(folder, packages)
    names = [package.split("=")[0].split("<")[0].split(">")[0] for package in packages]
    asked = f"from importlib.metadata import version; print(*map(version, {names!r}))"
    found = subprocess.run([program, "-c", asked], check=True, capture_output=True, text=True, timeout=60)
    return Packages(folder, str(program), dict(zip(names, found.stdout.split(), strict=True)))


def chromium() -> Packages:
    """The Chromium of this machine.

    Raises:
        FileNotFoundError: there is none.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise FileNotFoundError("there is no chromium on the PATH: install it (apt-get install chromium)")
    asked = [program, "--version", "--no-sandbox"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60)
    return Packages(BUILD, program, {"chromium": found.stdout.split()[1]})


def _stale(folder: Path, packages: tuple[str, ...]) -> bool:
    mark = folder / "packages.json"
    return not mark.exists() or json.loads(mark.read_text()) != list(packages)


def _tell(folder: Path, packages: tuple[str, ...]) -> None:
    print(f"installing {' '.join(packages)}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)


def _done(folder: Path, packages: tuple[str, ...]) -> None:
    (folder / "packages.json").write_text(json.dumps(packages))


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=_PATIENCE, stdout=sys.stderr)
