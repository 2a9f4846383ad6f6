"""Another session beside the one that is measured: 5,000 events a second, read and forgotten.

python bystander.py PORT
"""

from __future__ import annotations

import sys

from benchmarks.load import Standard

SECONDS = 300


def main() -> None:
    """Read for at most five minutes."""
    client = Standard(int(sys.argv[1]))
    client.burst(10)
    print("reading", flush=True)
    for _ in range(SECONDS):
        client.burst(5000, batch=50, pause=0.01)


if __name__ == "__main__":
    main()
