"""Writes, where `@` is in its argument, as many MB as it is told; then answers as `say.py` does."""

import sys

before, after = sys.argv[1].encode().split(b"@")
stdout = sys.stdout.buffer
stdout.write(before)
for _ in range(int(sys.argv[2])):
    stdout.write(b"x" * 1_000_000)
stdout.write(after + b"\n")
stdout.flush()
for line in sys.stdin.buffer:
    stdout.write(line)
    stdout.flush()
