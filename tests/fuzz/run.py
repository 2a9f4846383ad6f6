"""Fuzz with atheris: each target for a while, from its seeds on, led by what the code does with them.

::

    python tests/fuzz/run.py                                # each target for a minute
    python tests/fuzz/run.py --target bodies --seconds 600
    python tests/fuzz/run.py --target bodies --repeat FILE  # one input again; needs no atheris

Inputs that crashed, or led somewhere new, are kept in build/fuzz. Exits with 1 if a target crashed, with 2
if atheris is not there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

__all__ = ["main"]

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT: Final = ROOT / "build" / "fuzz"

_SLOWEST: Final = 20
"""Seconds after which an input counts as a hang."""
_CHATTER: Final = re.compile(rb"INFO: |WARNING: Failed to find|#\d+\s+(NEW|REDUCE|RELOAD)|###|\"")
"""What libFuzzer says beside its progress and its findings."""
_ABSENT: Final = """\
atheris is not installed here. It has wheels for Linux on x86-64 only:
    {python} -m pip install -r requirements-fuzz.txt
Elsewhere, `make test` runs the same targets on inputs of its own.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the targets; 0 if none crashed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--seconds", type=int, default=60, help="how long each of them is run")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="run one input on one target")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _fuzz(*options.child)
    targets = _targets()
    names: list[str] = options.target or list(targets)
    unknown = set(names) - set(targets)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(targets)}")
    if options.repeat is not None:
        if len(names) != 1:
            parser.error("--repeat needs one --target")
        targets[names[0]].call(options.repeat.read_bytes())
        print(f"{names[0]}: nothing came of it")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(_ABSENT.format(python=sys.executable), end="", file=sys.stderr)
        return 2
    return max([_run(name, targets[name].seeds, options.seconds) for name in names])


def _targets() -> dict[str, Target]:
    sys.path[0] = str(ROOT)
    from tests.fuzz.targets import TARGETS

    return TARGETS


def _run(name: str, seeds: tuple[bytes, ...], seconds: int) -> int:
    """One target in a process of its own, for libFuzzer ends the one that it is in; 1 if it crashed."""
    corpus, crashes = KEPT / name / "corpus", KEPT / name / "crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for n, seed in enumerate(seeds):
        (corpus / f"seed-{n}").write_bytes(seed)
    began = time.time()
    print(f"\n{name}: {seconds} s", flush=True)
    flags = [f"-max_total_time={seconds}", f"-timeout={_SLOWEST}", "-max_len=4096", "-print_final_stats=1"]
    child = [sys.executable, __file__, "--child", name, str(corpus), f"-artifact_prefix={crashes}/", *flags]
    with subprocess.Popen(child, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout or ():
            if _CHATTER.match(line) is None:
                print(line.decode(errors="replace"), end="", flush=True)
    code = process.returncode
    if code == 0:
        print(f"{name}: no crash", flush=True)
        return 0
    print(f"{name}: crashed (libFuzzer's exit status is {code})", flush=True)
    for path in sorted(path for path in crashes.iterdir() if path.stat().st_mtime >= began - 1):
        again = [sys.executable, __file__, "--target", name, "--repeat", str(path)]
        print(f"to repeat it: {shlex.join(again)}", flush=True)
    return 1


def _fuzz(name: str, *flags: str) -> None:
    """The child: libFuzzer ends this process."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["gapless"]):
        target = _targets()[name]
    atheris.Setup([name, *flags], target.call)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
