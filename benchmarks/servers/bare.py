"""The floor: a loop that writes events' bytes to a file, syncs it, and sends them; nothing else.

What one asks for is a line: `burst COUNT BATCH PAUSE` sends the blocks of `COUNT` events, made before, after
one `write` and one `fdatasync` for each `BATCH`; `tick COUNT SECONDS` one event at a time, at that rate.

    python bare.py PORT FILE
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time

from benchmarks.servers.child import line


def block(n: int, at: int = 0) -> bytes:
    """An event as Gapless has it on the wire and in the log."""
    return b"id: %d.0.0123456789abcdef\ndata: %b\n" % (n + 1, line(n, at))


@functools.cache
def batches(count: int, batch: int) -> list[bytes]:
    """The blocks 0 to `count - 1`, as they are written."""
    made = [block(n) for n in range(count)]
    return [b"".join(made[at : at + batch]) for at in range(0, count, batch)]


def serve(conn: socket.socket, file: int) -> None:
    """One connection, until it hangs up."""
    for asked in conn.makefile("r"):
        what, count, *rest = asked.split()
        if what == "burst":
            for data in batches(int(count), int(rest[0])):
                os.write(file, data)
                os.fdatasync(file)
                conn.sendall(data)
                if float(rest[1]):
                    time.sleep(float(rest[1]))
        else:
            due = time.monotonic()
            for n in range(int(count)):
                due += float(rest[0])
                time.sleep(max(0.0, due - time.monotonic()))
                data = block(n, time.monotonic_ns())
                os.write(file, data)
                os.fdatasync(file)
                conn.sendall(data)
        conn.sendall(b'"emitted "')


def main() -> None:
    """Serve connections one after the other."""
    file = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listening:
        while True:
            conn, _ = listening.accept()
            conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with conn:
                serve(conn, file)


if __name__ == "__main__":
    main()
