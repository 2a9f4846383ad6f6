"""Writes the bytes it is given in hex, as one write; then answers every line of stdin with itself."""

import sys

stdout = sys.stdout.buffer
stdout.write(bytes.fromhex(sys.argv[1]))
stdout.flush()
for line in sys.stdin.buffer:
    stdout.write(line)
    stdout.flush()
