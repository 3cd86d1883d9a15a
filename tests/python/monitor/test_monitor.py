"""The stream of events from Python, and its exporters. They are tested with the real packages if these are
installed."""

from __future__ import annotations

import http.client
import json
import logging
import os
import pathlib
import stat
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request

import annulus
import numpy as np
import pytest
from annulus import monitor
from support import HANG, comes_true, normal, on_ranks

pytestmark = pytest.mark.usefixtures("monitoring_off_afterwards")


def run_ring(ranks: int = 3, tokens: int = 48, **options: object) -> int:
    """Runs forward and backward. Returns the bytes that the transports have counted."""
    transports = annulus.make_in_process_ring(ranks)
    placement = annulus.Placement.striped(tokens, ranks)

    def body(transport: annulus.Transport) -> None:
        ring = annulus.RingAttention(
            annulus.Pattern.dense(2), placement, transport=transport, head_dim=8, **options
        )
        q = normal(1, tokens // ranks, 2, 8, seed=transport.rank())
        o, lse = ring.forward(q, q, q)
        ring.backward(q, q, q, o, lse, o)

    for outcome in on_ranks(transports, body):
        assert outcome is None, outcome
    return sum(transport.counters()["bytes_sent"] for transport in transports)


# ---- the stream


def test_nothing_is_recorded_until_started() -> None:
    _, place, _ = monitor.read()
    run_ring()
    monitor.record("cache", "evict")
    assert not monitor.running()
    assert monitor.read(place) == ([], place, 0)


@pytest.mark.parametrize("schedule", ["ring", "gather"])
def test_events_count_every_byte(schedule: str) -> None:
    monitor.start()
    counted = run_ring(schedule=schedule)
    events, _, dropped = monitor.read()
    assert dropped == 0
    assert sum(event.bytes for event in events if event.kind == "send") == counted
    assert sum(event.bytes for event in events if event.kind == "receive") == counted
    passes = [event for event in events if event.kind == "pass"]
    assert sorted((event.rank, event.name) for event in passes) == [
        (rank, name) for rank in range(3) for name in ("backward", "forward")
    ]
    for event in events:
        assert event.begin_ns <= event.end_ns <= time.monotonic_ns()
    summary = monitor.summary()
    assert list(summary) == [0, 1, 2]
    assert sum(row["bytes_sent"] for row in summary.values()) == counted
    for row in summary.values():
        assert row["passes"] == 2 and row["failed_passes"] == 0
        assert 0 < row["compute_seconds"] <= row["pass_seconds"]
        assert 0 < row["waited"] <= 1


def test_the_stream_is_bounded_and_totals_are_not_affected() -> None:
    monitor.start(capacity=16)
    try:
        for i in range(100):
            monitor.record("cache", "evict", rank=1, bytes=i)
        events, place, dropped = monitor.read()
        assert [event.bytes for event in events] == list(range(84, 100))
        assert dropped == 84
        assert monitor.read(place) == ([], place, 0)
        (total,) = monitor.totals()
        assert (total.kind, total.name, total.rank, total.count) == ("cache", "evict", 1, 100)
        assert total.bytes == sum(range(100))
    finally:
        monitor.start(capacity=65536)


def test_spans_last_as_long_as_their_block_and_record_failures() -> None:
    monitor.start()
    with monitor.span("recovery", "split heads", rank=2, bytes=5):
        time.sleep(0.01)
    with pytest.raises(MemoryError), monitor.span("recovery", "half precision", rank=2):
        raise MemoryError
    good, bad = monitor.read()[0]
    assert (good.name, good.rank, good.bytes, good.failed) == ("split heads", 2, 5, False)
    assert good.seconds >= 0.01
    assert (bad.name, bad.failed) == ("half precision", True)
    assert monitor.summary()[2]["recoveries"] == 2


def test_unknown_kinds_are_refused_also_while_off() -> None:
    with pytest.raises(annulus.ConfigError, match="'snack', expected one of pass, step"):
        monitor.record("snack", "crisps")


def test_wrong_spans_are_refused_before_their_block() -> None:
    monitor.start()
    for wrong in ({"kind": "snack"}, {"kind": "cache", "bytes": -1}):
        with pytest.raises(annulus.ConfigError), monitor.span(**wrong, name="crisps"):
            raise AssertionError("the block was entered")


@pytest.mark.parametrize("wrong", [{"bytes": -1}, {"begin_ns": 2, "end_ns": 1}])
def test_sums_never_fall(wrong: dict[str, int]) -> None:
    monitor.start()
    with pytest.raises(annulus.ConfigError, match="expected at"):
        monitor.record("cache", "evict", **wrong)
    assert monitor.totals() == []


def test_names_may_be_anything() -> None:
    monitor.start()
    for name in ("ü" * 30, "", 'a"b\\c\n', "漢字" * 10):
        monitor.record("cache", name)
    names = [event.name for event in monitor.read()[0]]
    assert names == ["ü" * 12, "", 'a"b\\c\n', "漢字" * 4]


# ---- files


def test_json_lines_have_every_event(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    before = time.time()
    with monitor.JsonLines(path, interval=0.01) as lines:
        counted = run_ring()
        lines.flush()
        flushed = path.read_text()
        monitor.record("recovery", "drop caches", rank=0, failed=True)
    assert flushed.count("\n") > 10, "flush writes"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(monitor.read()[0])
    assert sum(row["bytes"] for row in rows if row["kind"] == "send") == counted
    assert all(before - 1 <= row["time"] <= time.time() + 1 for row in rows)
    assert rows[-1]["failed"] is True and "peer" not in rows[-1]
    with monitor.JsonLines(path):
        monitor.record("cache", "miss")
    assert len(path.read_text().splitlines()) == len(rows) + 1, "files are appended to"


def test_json_lines_count_overwritten_events(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    monitor.start(capacity=8)
    try:
        with monitor.JsonLines(path, interval=1000):
            for _ in range(20):
                monitor.record("cache", "hit")
    finally:
        monitor.start(capacity=65536)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"dropped": 12}
    assert len(rows) == 9


def test_an_exporter_that_fails_ends_and_the_program_continues(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    lines = monitor.JsonLines("/dev/full", interval=0.01)
    with caplog.at_level(logging.WARNING, logger="annulus"):
        deadline = time.monotonic() + 120
        while not caplog.records and time.monotonic() < deadline:
            run_ring()
            time.sleep(0.01)
    assert "JsonLines stops" in caplog.text and "No space left" in caplog.text
    lines.close()  # the error was logged already and is not raised again
    run_ring()
    with monitor.JsonLines("/dev/full", interval=1000) as lines:
        run_ring()
        with pytest.raises(OSError, match="No space left"):
            lines.flush()  # flush() raises it


def tracks_of(trace: dict) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """(pid, tid) -> (begin, end, category) in nanoseconds."""
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append((begin, end, event["cat"]))
    return tracks


def assert_nothing_overlaps(trace: dict) -> None:
    for events in tracks_of(trace).values():
        open_ends: list[int] = []
        for begin, end, kind in sorted(events, key=lambda e: (e[0], -e[1], e[2])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or (kind == "step" and end <= open_ends[-1])
            open_ends.append(end)


@pytest.mark.parametrize("schedule", ["ring", "gather"])
def test_traces_have_a_track_per_rank_and_kind(schedule: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    monitor.start()
    run_ring(ranks=4, schedule=schedule)
    monitor.write_chrome_trace(path)
    trace = json.loads(path.read_text())
    assert_nothing_overlaps(trace)
    names = {
        (event["pid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    for rank in range(4):
        assert {(rank, kind) for kind in ("pass", "compute", "send", "receive", "wait")} <= names
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) == len(monitor.read()[0])
    assert trace["otherData"]["dropped_events"] == 0
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044 & ~_umask()
    path.chmod(0o600)
    monitor.write_chrome_trace(path, [])
    assert json.loads(path.read_text())["traceEvents"] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "a file keeps its permissions"
    assert os.listdir(tmp_path) == ["trace.json"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_tracks_are_distinct_for_perfetto(tmp_path: pathlib.Path) -> None:
    """Perfetto reads a negative pid as 0, and identifies threads by their tid, whatever their process."""
    monitor.start()
    for rank in (-1, 0, 1):
        monitor.record("pass", "forward", rank=rank)
        monitor.record("cache", "evict", rank=rank)
    monitor.write_chrome_trace(os.fsencode(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    pids = {row["args"]["name"]: row["pid"] for row in rows if row["name"] == "process_name"}
    assert (pids["rank 0"], pids["rank 1"]) == (0, 1) and pids["process"] > 1
    tids = [row["tid"] for row in rows if row["name"] == "thread_name"]
    assert len(set(tids)) == 6 and not set(tids) & set(pids.values())
    assert {row["tid"] for row in rows if row["ph"] == "X"} == set(tids)
    with pytest.raises(annulus.ConfigError, match="path is empty"):
        monitor.write_chrome_trace("")


def test_threads_that_call_at_once_do_not_overlap_in_a_trace(tmp_path: pathlib.Path) -> None:
    monitor.start()
    q = normal(1, 256, 2, 16)
    threads = [threading.Thread(target=annulus.attention, args=(q, q, q)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.write_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event.get("cat") == "pass" for event in trace["traceEvents"]) == 6
    assert_nothing_overlaps(trace)


# ---- Prometheus


def test_a_real_scrape_is_understood_by_prometheus_own_parser() -> None:
    pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    with monitor.PrometheusExporter() as exporter:
        counted = run_ring()
        monitor.record("recovery", 'a "quoted\\ name\n', rank=0, failed=True)

        def scrape() -> dict[tuple, float]:
            with urllib.request.urlopen(exporter.url, timeout=120) as answer:
                text = answer.read().decode()
            return {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }

        def label(metric: str, /, **labels: str) -> tuple:
            return (metric, *sorted(labels.items()))

        values = scrape()
        sent = [v for key, v in values.items() if key[0] == "annulus_sent_bytes_total"]
        assert sum(sent) == counted and len(sent) == 6
        for rank in ("0", "1", "2"):
            key = label("annulus_events_total", rank=rank, kind="pass", name="forward")
            assert values[key] == 1
            assert 0 < values[label("annulus_waited_ratio", rank=rank)] <= 1
        name = 'a "quoted\\ name\n'
        failed = label("annulus_event_failures_total", rank="0", kind="recovery", name=name)
        assert values[failed] == 1
        run_ring()
        again = scrape()
        assert again[label("annulus_events_total", rank="1", kind="pass", name="forward")] == 2
        assert all(
            again[key] >= value for key, value in values.items() if key[0].endswith("_total")
        ), "counters only grow"
    exporter.close()
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(exporter.url, timeout=5)


def test_metrics_can_stand_in_the_programs_own_registry() -> None:
    client = pytest.importorskip(
        "prometheus_client", reason="the package prometheus-client is not installed"
    )
    registry = client.CollectorRegistry()
    client.Counter("steps", "of the program", registry=registry).inc(3)
    with monitor.PrometheusExporter(registry=registry) as exporter:
        run_ring(ranks=1)
        with urllib.request.urlopen(exporter.url, timeout=120) as answer:
            text = answer.read().decode()
        assert "steps_total 3.0" in text and 'kind="pass"' in text
    assert "annulus" not in client.generate_latest(registry).decode(), "close() takes them out"


# ---- Weights & Biases


def records_of(log: bytes) -> list[bytes]:
    """The content of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    assert log[:4] == b":W&B"
    records, at, parts = [], 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # no room for a header: the rest of the block is empty
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        if kind == 0:
            break
        parts += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


@pytest.mark.slow
def test_weights_and_biases_offline_run_can_be_read(tmp_path: pathlib.Path) -> None:
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    # In a separate process, because wandb leaves threads and a service behind. No network, and no account.
    code = """
        import sys, annulus, numpy as np
        from annulus import monitor
        exporter = monitor.WandbExporter(project="annulus-test", mode="offline", dir=sys.argv[1])
        q = np.ones((1, 64, 2, 8), np.float32)
        for step in range(3):
            annulus.attention(q, q, q)
            metrics = exporter.log(step=step, loss=1.0 / (step + 1))
            assert metrics["annulus/rank0/passes"] == 1, metrics
        exporter.close()
        exporter.close()
        print(exporter.run.dir)
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    clean |= {"WANDB_SILENT": "true", "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=clean,
    )
    assert ran.returncode == 0, ran.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    history = []
    for data in records_of(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append(
                {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            )
    assert [row["loss"] for row in history] == pytest.approx([1.0, 0.5, 1 / 3])
    assert [row["annulus/rank0/passes"] for row in history] == [1, 1, 1]
    assert all(row["annulus/rank0/compute_seconds"] > 0 for row in history)
    assert wandb.__version__


class FakeRun:
    """A run of the program. WandbExporter calls only `log`."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict]] = []

    def log(self, metrics: dict, step: int | None = None) -> None:
        self.rows.append((step, metrics))


def test_weights_and_biases_log_what_happened_since_the_last_time() -> None:
    run = FakeRun()
    exporter = monitor.WandbExporter(run)
    run_ring(ranks=2)
    exporter.log(step=7)
    exporter.log(step=8)
    monitor.clear()
    run_ring(ranks=2)
    exporter.log(step=9)
    exporter.close()
    passes = [(step, row["annulus/rank1/passes"]) for step, row in run.rows if row]
    assert passes == [(7, 2), (8, 0), (9, 2)]
    assert run.rows[1][1]["annulus/rank0/waited"] == 0.0
    with pytest.raises(TypeError, match="found both: run, project"):
        monitor.WandbExporter(run, project="x")


@pytest.mark.parametrize(
    ("exporter", "module", "package"),
    [
        ("PrometheusExporter", "prometheus_client", "prometheus-client"),
        ("WandbExporter", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named(
    exporter: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{exporter} needs the package {package}: pip install"):
        getattr(monitor, exporter)()


# ---- log levels


@pytest.mark.parametrize(
    ("level", "told"),
    [
        ("debug", {"forward", "backward", "compute", "send", "evict", "drop caches"}),
        ("info", {"forward", "backward", "evict", "drop caches"}),
        ("warning", {"drop caches"}),
        ("error", set()),
        ("off", set()),
    ],
)
def test_log_levels_choose_events_and_lines_begin_with_the_rank(
    level: str, told: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    monitor.start()
    monitor.set_log_level(level, ranks=2)
    run_ring(ranks=2)
    monitor.record("cache", "evict", rank=1, bytes=7)
    monitor.record("recovery", "drop caches", rank=1)
    monitor.flush_log()
    text = "\n".join(caplog.messages)
    every = {"forward", "backward", "compute", "send", "evict", "drop caches"}
    assert {word for word in every if word in text} == told
    for line in caplog.messages:
        assert line.startswith(("[rank 0/2] ", "[rank 1/2] "))
    if level == "info":
        assert "[rank 1/2] cache evict: 0.00 ms, 7 bytes" in caplog.messages


def test_events_of_one_rank_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    monitor.set_log_level("info", rank=1)
    run_ring(ranks=3)
    monitor.flush_log()
    assert len(caplog.messages) == 2
    assert all(line.startswith("[rank 1] ") for line in caplog.messages)
    with pytest.raises(annulus.ConfigError, match="level is 'loud', expected one of debug, info"):
        monitor.set_log_level("loud")


def test_loggers_have_the_rank_in_front(caplog: pytest.LogCaptureFixture) -> None:
    monitor.set_log_level("info")
    monitor.logger(2, 4).info("step %d of %d", 3, 5)
    monitor.logger(2, 4).debug("not this")
    assert caplog.messages == ["[rank 2/4] step 3 of 5"]


def test_without_handlers_lines_go_to_standard_error() -> None:
    code = """
        import annulus, numpy as np
        from annulus import monitor
        monitor.set_log_level("info")
        q = np.ones((1, 16, 1, 8), np.float32)
        annulus.attention(q, q, q)
        monitor.flush_log()
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=HANG
    )
    assert ran.returncode == 0, ran.stderr
    assert "\nannulus: [rank 0] forward: " in "\n" + ran.stderr


# ---- memory


def test_profile_memory_sees_the_memory_of_a_block() -> None:
    with monitor.profile_memory(interval=0.005) as profile:
        block = np.ones(64 << 20, np.uint8)
        seen = len(profile.samples)
        assert comes_true(lambda: len(profile.samples) >= seen + 2)  # the first may have begun before
        del block
    report = profile.report()
    assert 60 << 20 <= profile.peak_bytes - profile.begin_bytes <= 90 << 20
    assert report["peak_bytes"] == profile.peak_bytes
    assert report["end_bytes"] < report["peak_bytes"] - (32 << 20)
    assert report["samples"] >= 2 and report["peak_device_bytes"] == 0
    profile.stop()  # idempotent


def test_profile_memory_keeps_a_bounded_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("annulus.monitor._memory._MOST_SAMPLES", 8)
    profile = monitor.profile_memory(interval=1000)
    profile.start()
    with pytest.raises(annulus.ConfigError, match="started already"):
        profile.start()
    for _ in range(100):
        profile._sample()
    assert len(profile.samples) <= 8 and profile.interval > 1000
    profile.stop()
    seconds = [sample.seconds for sample in profile.samples]
    assert seconds == sorted(seconds)


def test_profile_memory_refuses_what_it_cannot_do(torch) -> None:
    with pytest.raises(annulus.ConfigError, match="interval is 0"):
        monitor.profile_memory(interval=0)
    if not torch.cuda.is_available():
        with pytest.raises(annulus.ConfigError, match="no CUDA device here"):
            monitor.profile_memory(device="cuda:0")
