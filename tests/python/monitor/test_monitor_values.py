"""Events as values that go to other processes, and what monitoring refuses."""

from __future__ import annotations

import copy
import math
import pickle
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import annulus
import pytest
from annulus import monitor

pytestmark = pytest.mark.usefixtures("monitoring_off_afterwards")


FIELDS = ("kind", "name", "sequence", "begin_ns", "end_ns", "seconds", "rank", "step", "peer")
FIELDS += ("bytes", "failed")


def record_two() -> list[monitor.Event]:
    monitor.start()
    place = monitor.read()[1]
    monitor.record("send", "Zeile \u00e4", rank=1, step=2, peer=3, bytes=4, begin_ns=5, end_ns=60)
    monitor.record("recovery", "x" * 30, failed=True)
    return monitor.read(place)[0]


def test_events_are_values() -> None:
    for event in record_two():
        copies = [copy.copy(event), copy.deepcopy(event)]
        copies += [
            pickle.loads(pickle.dumps(event, protocol))
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
        ]
        for again in copies:
            assert again == event and hash(again) == hash(event) and again is not event
            assert repr(again) == repr(event)
            for field in FIELDS:
                assert getattr(again, field) == getattr(event, field)
    first, second = record_two()
    assert first != second and first != "send" and len({first, second, copy.copy(first)}) == 2


def test_totals_are_values() -> None:
    record_two()
    for total in monitor.totals():
        again = pickle.loads(pickle.dumps(total))
        assert again == total == copy.deepcopy(total) and hash(again) == hash(total)
        for field in ("kind", "name", "rank", "peer", "count", "failures", "seconds", "bytes"):
            assert getattr(again, field) == getattr(total, field)
    assert len(set(monitor.totals())) == 2


def test_other_processes_read_events() -> None:
    """Processes that have not imported annulus yet."""
    events = record_two()
    code = "import pickle, sys; print([repr(e) for e in pickle.load(sys.stdin.buffer)])"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(events), capture_output=True, check=True
    )
    assert eval(done.stdout) == [repr(event) for event in events]


def test_invalid_pickled_events_are_refused() -> None:
    event = record_two()[0]
    state = event.__getstate__()
    for wrong in ((), None, ("nothing", *state[1:]), (*state[:2], -1, *state[3:]), state[:-1]):
        again = type(event).__new__(type(event))
        with pytest.raises((TypeError, annulus.ConfigError)):
            again.__setstate__(wrong)


@pytest.mark.parametrize(
    "capacity", [0, -1, True, 1.5, math.nan, "9", 2**24 + 1, 2**62, 2**70], ids=repr
)
def test_streams_of_no_or_endless_capacity_are_refused(capacity: object) -> None:
    """The kernel would grant the memory of 2**33 events, and other processes would lose theirs."""
    monitor.start(100)
    with pytest.raises(annulus.ConfigError, match="start: capacity is .* from 1 to 16777216"):
        monitor.start(capacity)
    assert monitor.running() and monitor.capacity() == 100


def _json_lines(interval: object) -> object:
    return monitor.JsonLines("/dev/null", interval)


@pytest.mark.parametrize("interval", [0, -1.0, True, "1", None, math.nan], ids=repr)
@pytest.mark.parametrize("make", [_json_lines, monitor.profile_memory])
def test_invalid_intervals_are_refused(make: Callable, interval: object) -> None:
    with pytest.raises(annulus.ConfigError, match="interval is .*seconds above 0"):
        make(interval)
    assert not monitor.running()


@pytest.mark.parametrize("level", [None, ["info"], "loud", 10], ids=repr)
def test_unknown_log_levels_are_refused(level: object) -> None:
    with pytest.raises(annulus.ConfigError, match="level is .*expected one of debug"):
        monitor.set_log_level(level)


def test_an_event_does_not_begin_before_the_clock() -> None:
    """The duration would overflow, too."""
    monitor.start()
    with pytest.raises(annulus.ConfigError, match="begin_ns is -1"):
        monitor.record("cache", "old", begin_ns=-1, end_ns=2**63 - 1)


def test_an_exporter_that_cannot_listen_leaves_monitoring_as_it_was() -> None:
    pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")
    for port in (-1, 65536, True, 1.5, "80", None):
        with pytest.raises(annulus.ConfigError, match="port is .*from 0 to 65535"):
            monitor.PrometheusExporter(port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(OSError, match="in use"):
            monitor.PrometheusExporter(other.getsockname()[1])
    assert not monitor.running()


def test_addresses_have_colons_only_within_brackets() -> None:
    pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with monitor.PrometheusExporter(address="::1") as exporter:
        with urllib.request.urlopen(exporter.url, timeout=120) as answer:
            assert b"annulus_cached_bytes" in answer.read()
