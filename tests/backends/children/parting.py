"""Reads to the end, then says goodbye on stdout, and notes in a file whether anybody listened."""

import sys

print('{"jsonrpc":"2.0","method":"ready"}', flush=True)
sys.stdin.read()
try:
    print('{"jsonrpc":"2.0","method":"goodbye"}', flush=True)
except BrokenPipeError:
    outcome = "broken pipe"
else:
    outcome = "said"
with open(sys.argv[1], "w") as file:
    file.write(outcome)
