"""How fast it is, beside what else there is and beside the bare loop: `make bench`.

Each row of the table is a command of its own:

    python benchmarks/run.py 1 7 --quick

A whole run writes docs/reference/performance.md. Exit status 1 if a benchmark lost an event.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run from anywhere: the project's root is where `benchmarks` is imported from."""
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.bench import main as bench

    return bench()


if __name__ == "__main__":
    sys.exit(main())
