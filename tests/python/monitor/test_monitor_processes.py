"""Exporters at the end of a program, in several processes, and after a fork."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap

from support import HANG


def in_a_process(program: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )


def test_the_end_of_a_program_writes_all_events(tmp_path: pathlib.Path) -> None:
    program = """
        import sys
        from annulus import monitor
        monitor.set_log_level("info", ranks=4)
        lines = monitor.JsonLines(sys.argv[1], interval=float("inf"))
        full = monitor.JsonLines("/dev/full" if sys.argv[2] == "full" else sys.argv[1] + "2", interval=1000)
        monitor.record("cache", "evict", rank=2, bytes=7)
    """
    full = "full" if os.path.exists("/dev/full") else "none"
    ended = in_a_process(program, tmp_path / "lines", full)
    assert "annulus: [rank 2/4] cache evict: 0.00 ms, 7 bytes" in ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = (tmp_path / "lines").read_text().splitlines()
    assert json.loads(line)["name"] == "evict"


def test_processes_may_append_to_one_file(tmp_path: pathlib.Path) -> None:
    program = """
        import sys
        from annulus import monitor
        with monitor.JsonLines(sys.argv[1], interval=1000) as lines:
            for _ in range(20):
                for i in range(1000):
                    monitor.record("cache", "evict", rank=int(sys.argv[2]), bytes=i + 1)
                lines.flush()
    """
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [process.wait(timeout=HANG) for process in processes] == [0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for rank in range(2):
        assert [row["bytes"] for row in rows if row["rank"] == rank] == list(range(1, 1001)) * 20


def test_forked_children_leave_exporters_to_their_parent(tmp_path: pathlib.Path) -> None:
    program = """
        import contextlib, os, sys
        from annulus import monitor
        with contextlib.ExitStack() as stack:
            if sys.argv[2] == "prometheus":
                stack.enter_context(monitor.PrometheusExporter())
            stack.enter_context(monitor.JsonLines(sys.argv[1], interval=1000))
            monitor.record("cache", "hit")
            child = os.fork()
            if child == 0:
                sys.exit(3)  # through the end of the block
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """
    found = importlib.util.find_spec("prometheus_client") is not None
    in_a_process(program, tmp_path / "lines", "prometheus" if found else "without")
    assert len((tmp_path / "lines").read_text().splitlines()) == 1
