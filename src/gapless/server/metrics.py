"""What is counted, for Prometheus."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gapless.protocol.delivery import Medium
from gapless.protocol.refusal import Reason
from gapless.protocol.seam import SessionState
from gapless.protocol.session import Session
from gapless.server.lease import Lease

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LAGS: Final = (0, 1, 10, 100, 1_000, 10_000, 100_000)


class Metrics:
    """The counters of one server, and what is read off its sessions when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.events = Counter("gapless_events", "Events made durable.", registry=registry)
        self.messages = Counter("gapless_messages", "Client messages made durable.", registry=registry)
        self.commits = Histogram(
            "gapless_commit_seconds", "How long a commit took.", buckets=_SECONDS, registry=registry
        )
        self.storage_faults = Counter(
            "gapless_storage_faults", "Commits that the log refused, each try.", registry=registry
        )
        self.turns = Counter(
            "gapless_turns", "Turns of sessions' transports.", ["turn", "view"], registry=registry
        )
        self.refusals = Counter("gapless_refusals", "Refusals told.", ["reason"], registry=registry)
        self.upgrades = Counter(
            "gapless_upgrades", "Handshakes, by what came of them.", ["outcome"], registry=registry
        )
        self.resumes = Counter(
            "gapless_resumes",
            "Clients that asked to go on after an event, by what came of it.",
            ["medium", "outcome"],
            registry=registry,
        )
        self.pauses = Histogram(
            "gapless_upgrade_pause_seconds",
            "From a handshake's acceptance until its client had acknowledged the whole gap.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.evicted_unacked = Counter(
            "gapless_evicted_unacked_events",
            "Events evicted before any ack.",
            registry=registry,
        )
        for reason in Reason:  # so that a rate is there before the first refusal
            self.refusals.labels(reason.value)
        for medium in Medium:
            self.resumes.labels(medium.value, "resumed")

    def read_off(self, sessions: Callable[[], Iterable[Session]], lease: Callable[[], Lease]) -> None:
        """Read sessions, connections and the lease off these, whenever somebody asks."""
        self.registry.register(_Now(sessions, lease))

    def text(self) -> bytes:
        """Everything, in Prometheus's text format; of the event loop that it is asked in, the tasks."""
        return generate_latest(_Plain(self.registry))


class _Plain(Collector):
    """A registry's metrics without the time that each was made, which would be a family beside each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Now(Collector):
    def __init__(self, sessions: Callable[[], Iterable[Session]], lease: Callable[[], Lease]) -> None:
        self._sessions = sessions
        self._lease = lease

    def collect(self) -> Iterator[Metric]:
        states = Tally(dict.fromkeys(SessionState, 0))
        media, lags, requests = Tally[Medium](), list[int](), 0
        for machine in self._sessions():
            states[machine.door.state] += 1
            requests += len(machine.inbox.open)
            for delivery in machine.connections.values():
                media[delivery.medium] += 1
                lags.append(machine.outbox.committed - delivery.position)
        found = GaugeMetricFamily("gapless_sessions", "Sessions that this process serves.", labels=["state"])
        for state, count in states.items():
            found.add_metric([state.name], count)
        yield found
        found = GaugeMetricFamily("gapless_connections", "Connections that deliver.", labels=["medium"])
        for medium in Medium:
            found.add_metric([medium.value], media[medium])
        yield found
        yield GaugeMetricFamily("gapless_requests_open", "Requests that are not settled.", value=requests)
        buckets = [(str(float(most)), float(sum(n <= most for n in lags))) for most in _LAGS]
        buckets.append(("+Inf", float(len(lags))))
        text = "Events that connections have yet to be sent, now."
        yield HistogramMetricFamily("gapless_lag_events", text, buckets=buckets, sum_value=float(sum(lags)))
        lease, text = self._lease(), "Times that this process was taken for dead."
        yield GaugeMetricFamily("gapless_lease_held", "Whether this process may write.", value=lease.held)
        yield CounterMetricFamily("gapless_lease_losses", text, value=lease.lost)
        tasks = len(asyncio.all_tasks())
        yield GaugeMetricFamily("gapless_tasks", "Tasks of the event loop.", value=tasks)
