"""A process, and a grandchild of ours, each on its lifeline.

`family.py PORT MANNER...`, of which: `stubborn`, neither SIGTERM nor the end of stdin ends them;
`leaves`, the parent exits with status 0 at the first line of stdin; `apart`, the grandchild is in a
session of its own. The parent says on stdout who its own parent is, once both are on their lines.
"""

import json
import os
import signal
import socket
import subprocess
import sys


def lifeline(name: str) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    line.sendall(name.encode() + b"\n")
    return line


manners = sys.argv[2:]
if "stubborn" in manners:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "grandchild" in manners:
    line = lifeline("grandchild")
    print("born", file=sys.stderr, flush=True)
    line.recv(1)  # the test has ended, should nothing else have ended us
else:
    grandchild = subprocess.Popen(
        [sys.executable, "-I", "-S", *sys.argv, "grandchild"],
        stderr=subprocess.PIPE,
        start_new_session="apart" in manners,
    )
    assert grandchild.stderr is not None
    grandchild.stderr.readline()
    line = lifeline("child")
    hello = {"jsonrpc": "2.0", "method": "hello", "params": {"parent": os.getppid()}}
    print(json.dumps(hello), flush=True)
    for _ in sys.stdin:
        if "leaves" in manners:
            os._exit(0)
    if "stubborn" in manners:
        line.recv(1)
