"""Metrics for Prometheus, computed from the stream's totals at each scrape."""

import os

from annulus import _core
from annulus.monitor import _events
from annulus.monitor._readers import optional


class PrometheusExporter:
    """Answers scrapes at http://address:port/metrics until `close`. Needs the package prometheus-client.

    Metrics are computed from `totals` at each scrape. They are exact even if the stream has overwritten events, and
    their size is bounded. `port` 0 takes a free port (see the attribute `port`). `registry`: a registry of
    prometheus_client, to which the metrics are added; by default a new one.
    """

    def __init__(self, port: int = 0, address: str = "127.0.0.1", registry=None):
        client = optional("prometheus_client", "prometheus-client", type(self).__name__)
        port = _events.check_whole(type(self).__name__, "port", port, 0, 65535)
        self.registry = client.CollectorRegistry() if registry is None else registry
        self._collector = _Collector()
        self.registry.register(self._collector)
        try:
            self._server, self._thread = client.start_http_server(
                port, addr=address, registry=self.registry
            )
        except BaseException:
            self.registry.unregister(self._collector)
            raise
        _events.start()  # only if the port was free
        self._process = os.getpid()
        self.port: int = self._server.server_port
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stops the server and removes the metrics from the registry. Idempotent."""
        if self._server is None:
            return
        if os.getpid() != self._process:  # a forked child has no server thread, for which shutdown() would wait
            self._server.socket.close()
            self._server = None
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = None
        self.registry.unregister(self._collector)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Collector:
    def collect(self):
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ("rank", "kind", "name")
        count = CounterMetricFamily("annulus_events", "Number of events", labels=labels)
        failures = CounterMetricFamily(
            "annulus_event_failures", "Number of events that ended with an exception", labels=labels
        )
        seconds = CounterMetricFamily(
            "annulus_event_seconds", "Duration of events, as measured by the host", labels=labels
        )
        sent = CounterMetricFamily(
            "annulus_sent_bytes", "Bytes of messages, by link", labels=("rank", "peer")
        )
        received = CounterMetricFamily(
            "annulus_received_bytes", "Bytes of messages, by link", labels=("rank", "peer")
        )
        sums: dict[tuple, list] = {}  # messages have a total per peer
        links: dict[tuple, int] = {}
        for total in _events.totals():
            row = sums.setdefault((str(total.rank), total.kind, total.name), [0, 0, 0.0])
            row[0] += total.count
            row[1] += total.failures
            row[2] += total.seconds
            if total.kind in ("send", "receive"):
                link = (total.kind, str(total.rank), str(total.peer))
                links[link] = links.get(link, 0) + total.bytes
        for key, (n, failed, time) in sums.items():
            count.add_metric(key, n)
            failures.add_metric(key, failed)
            seconds.add_metric(key, time)
        for (kind, rank, peer), value in links.items():
            (sent if kind == "send" else received).add_metric((rank, peer), value)
        waited = GaugeMetricFamily(
            "annulus_waited_ratio", "Share of the passes' time that was spent waiting", labels=("rank",)
        )
        for rank, row in _events.summary().items():
            waited.add_metric((str(rank),), row["waited"])
        cached = GaugeMetricFamily(
            "annulus_cached_bytes", "Bytes of executors that annulus.attention keeps between calls"
        )
        cached.add_metric((), _core.cache_info()["bytes"])
        yield from (count, failures, seconds, sent, received, waited, cached)
