"""`idler.py PORT MANNER`: a server that, once on its lifeline, never reads its stdin.

Its manner is to `listen` (and say nothing), to `hang-up` (close its stdout) or to `chatter`: write 1
MB of messages, and say on its lifeline that it has.
"""

import os
import socket
import sys

line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.sendall(b"idler\n")
match sys.argv[2]:
    case "hang-up":
        os.close(1)
    case "chatter":
        for n in range(5_000):
            print('{"jsonrpc":"2.0","method":"n","params":{"n":%d,"pad":"%s"}}' % (n, "x" * 150))  # noqa: UP031
        sys.stdout.flush()
        line.sendall(b"written\n")
line.recv(1)  # the test has ended, should nothing else have ended us
