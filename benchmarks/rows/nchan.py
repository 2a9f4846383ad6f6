"""Row 9: what it costs to deliver an event, beside Nchan, a publish-subscribe module of nginx written in C.

One session (one channel) with 50 and 500 event streams, each of which gets every event; then 50 and 500
sessions (channels) with a WebSocket each, which get their own. Nchan keeps its messages in memory, and is
published to by WebSocket, a message to a frame; Gapless commits them to SQLite with `synchronous=FULL`. Where
there are many sessions the stdio servers of ours are as many processes, whose CPU is not counted, as that of
Nchan's publisher is not.

nginx and the module are Debian's packages, unpacked into `benchmarks/.build`. The module insists on the
directory that nginx is installed with, which is made where it is not there.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import BUILD, SERVER_CORE, Bench, Figure, NotMeasured, Server, ratio
from benchmarks.load import Conn, Gapless, check, frame, read_all, request
from benchmarks.rows.emit import microseconds
from benchmarks.servers.child import line

__all__ = ["delivered"]

PACKAGES = ("nginx", "libnginx-mod-nchan")
SIBLINGS = {50: 1000, 500: 200}
"""Events by how many streams there are of one session."""
SESSIONS = {50: 500, 500: 100}
"""Events of each by how many sessions there are."""

OWN = Path("/var/lib/nginx")

CONFIG = """
load_module {module};
worker_processes 1;
worker_cpu_affinity {mask:b};
daemon off;
master_process off;
pid nginx.pid;
error_log stderr crit;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  nchan_shared_memory_size 512M;
  nchan_message_buffer_length 2000;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server {{
    listen 127.0.0.1:{port};
    location ~ ^/sub/(\\w+)$ {{
      nchan_subscriber eventsource websocket;
      nchan_channel_id $1;
      nchan_subscriber_first_message newest;
    }}
    location ~ ^/pub/(\\w+)$ {{ nchan_publisher websocket; nchan_channel_id $1; }}
  }}
}}
"""

UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
}


def delivered(bench: Bench) -> list[Figure]:
    """CPU per delivered event, ours ÷ Nchan's."""
    figures: list[Figure] = []
    with _nginx(bench) as nginx:
        for readers, events in SIBLINGS.items():
            with bench.gapless() as ours:
                taken = bench.take(
                    {
                        "ours": _siblings(ours, readers, events),
                        "nchan": _subscribers(nginx, f"one{readers}", readers, events, "eventsource"),
                    }
                )
            what = f"one session, {readers} event streams"
            figures.append(ratio(what, taken["ours"], taken["nchan"], 1, "at most", microseconds))
        for sessions, events in SESSIONS.items():
            if bench.quick and sessions > 50:
                continue  # as many processes take a minute to start
            with bench.gapless() as ours:
                taken = bench.take(
                    {
                        "ours": _sessions(ours, sessions, events),
                        "nchan": _subscribers(nginx, f"many{sessions}", sessions, events, "websocket"),
                    }
                )
            what = f"{sessions} sessions, a WebSocket each"
            figures.append(ratio(what, taken["ours"], taken["nchan"], 1, "at most", microseconds))
    return figures


def drain(conns: Sequence[Conn], events: int) -> None:
    """Read every connection up to its last event; check that each had all of them.

    Raises:
        WrongEvents: one had not.
    """
    last = b'"n":%d,' % (events - 1)
    for got in read_all(conns, lambda parts: last in b"".join(parts[-2:])):
        check(got, events)


# Ours ---------------------------------------------------------------------------------------------------


def _siblings(server: Server, readers: int, events: int) -> Callable[[], float]:
    client = Gapless(server.port)
    client.initialize()
    conns = [client.listen() for _ in range(readers)]

    def work() -> None:
        client.call("burst", count=events)
        drain(conns, events)

    return lambda: server.spent(work)[0] / (events * readers)


def _sessions(server: Server, count: int, events: int) -> Callable[[], float]:
    clients = [Gapless(server.port) for _ in range(count)]
    conns: list[Conn] = []
    for client in clients:
        client.initialize()
        conns.append(client.upgrade())
    asking = [Conn(server.port) for _ in clients]

    def work() -> None:
        for client, conn in zip(clients, asking, strict=True):
            conn.send(client.calling("burst", count=events))
        drain(conns, events)

    def measure() -> float:
        for at, conn in enumerate(asking):
            conn.close()
            asking[at] = Conn(server.port)
        return server.spent(work)[0] / (events * count)

    return measure


# Nchan --------------------------------------------------------------------------------------------------


def _subscribers(server: Server, name: str, readers: int, events: int, wire: str) -> Callable[[], float]:
    shared = wire == "eventsource"
    channels = [name] if shared else [f"{name}x{n}" for n in range(readers)]
    publishers = [_publisher(server.port, channel) for channel in channels]
    conns = [_subscriber(server.port, channels[0 if shared else n], wire) for n in range(readers)]
    published = b"".join(frame(line(n).rstrip()) for n in range(events))

    def work() -> None:
        # A slice at a time: a server that is not read meanwhile would stop taking what is published.
        step = len(published) // 10 + 1
        for at in range(0, len(published), step):
            for conn in publishers:
                conn.send(published[at : at + step])
        drain(conns, events)

    def measure() -> float:
        spent, _ = server.spent(work)
        for conn in publishers:  # what it answers to each frame
            conn.discard()
        return spent / (events * readers)

    return measure


def _publisher(port: int, channel: str) -> Conn:
    conn = Conn(port)
    status, _, _ = conn.head(request("GET", f"/pub/{channel}", port, UPGRADE))
    if status != 101:
        raise NotMeasured(f"Nchan answered a publisher with {status}")
    return conn


def _subscriber(port: int, channel: str, wire: str) -> Conn:
    conn = Conn(port)
    headers = UPGRADE if wire == "websocket" else {"Accept": "text/event-stream"}
    status, _, _ = conn.head(request("GET", f"/sub/{channel}", port, headers))
    if status not in (101, 200):
        raise NotMeasured(f"Nchan answered a subscriber with {status}")
    return conn


@contextmanager
def _nginx(bench: Bench) -> Iterator[Server]:
    root = _unpacked()
    module = root / "usr/lib/nginx/modules/ngx_nchan_module.so"
    with bench.directory() as directory:
        (directory / "logs").mkdir()

        def command(port: int) -> list[str]:
            config = CONFIG.format(module=module, port=port, mask=1 << SERVER_CORE)
            (directory / "nginx.conf").write_text(config)
            program = str(root / "usr/sbin/nginx")
            return [program, "-e", "stderr", "-p", str(directory), "-c", str(directory / "nginx.conf")]

        with bench.serving(command) as server:
            yield server


def _unpacked() -> Path:
    """Where nginx and the module are, fetched on first use."""
    root = BUILD / "nchan"
    try:
        OWN.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise NotMeasured(f"Nchan wants {OWN}: make it, or have nginx installed") from None
    if (root / ".ready").exists():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NotMeasured("needs Debian's packages of nginx and Nchan, and there is no apt-get")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    done = subprocess.run(
        ["apt-get", "download", "-q", *PACKAGES], cwd=root, capture_output=True, timeout=120, check=False
    )
    if done.returncode:
        raise NotMeasured(f"`apt-get download {' '.join(PACKAGES)}` failed")
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=root, check=True, timeout=60)
    (root / ".ready").touch()
    return root
