"""Injects faults into rings of processes and their checkpoints: make chaos.

Each round is a new ring of processes over torch.distributed (Gloo). Prints a table with one line per fault:

- injected: rounds with this fault;
- detected: ranks that raised an error which names the right rank or file, of the ranks that had to;
- time to detect: from the fault to that error, in seconds. Slow links and strangers are no faults: no rank may raise;
- recovered: rounds that continued as they should: with the survivors, with the next checkpoint, or after a restart;
- wrong results: results, before or after the fault, that differ from those of one undisturbed process.

Exits with 1 unless everything was detected and recovered, and no result was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import annulus
import annulus.torch as at
import kill_ranks
import torch
import torch.distributed.checkpoint  # once, before the ranks are forked
from support import process_ring
from torch import nn

SLOW_BYTES_PER_SECOND = 100_000  # a pass sends about 100 kB per rank
_SO_MAX_PACING_RATE = 47  # socket(7); Python has no name for it


@dataclasses.dataclass
class Outcome:
    """The outcome of one round."""

    detected: int
    expected: int
    times: list[float]
    recovered: bool
    wrong: int
    complaints: list[str]

    @property
    def good(self) -> bool:
        return self.detected == self.expected and self.recovered and not self.wrong


Said = list[dict | None]


def judge(said: Said, expected: int, results: Said, ring: process_ring.Ring) -> Outcome:
    """The outcome, from the lines of the ranks that had to detect a fault and of those that had to have results."""
    times = [line["seconds"] for line in said if line is not None and line["right"]]
    wrong = sum(line is not None and not line["right"] for line in results)
    complaints = [f"{line}" for line in said if line is not None and not line["right"]]
    complaints += [
        f"rank {r}: {rank.last('broke')}" for r, rank in enumerate(ring.ranks) if rank.last("broke")
    ]
    if None in said + results:
        complaints.append(f"not all came to an end: {[rank.said[-2:] for rank in ring.ranks]}")
    return Outcome(len(times), expected, times, None not in results, wrong, complaints)


# ---- rings that lose a rank


def lose(fault: str, ranks: int, choose: random.Random) -> Outcome:
    lost = kill_ranks.inflict(fault, ranks, 4.0, choose.choice(list(process_ring.SIZES)), choose)
    named = [rank for rank, name in lost.named.items() if name in lost.suspects]
    times = [lost.raised[rank] for rank in named]
    wrong = sum("wrong" in text for text in lost.complaints) + (
        lost.reformed is not None and not lost.right
    )
    return Outcome(len(named), ranks - 1, times, lost.reformed is not None, wrong, lost.complaints)


# ---- slow links, and strangers


def compute(rank: int, say: Callable, passes: int, slow: bool) -> None:
    group = torch.distributed.group.WORLD
    wanted = process_ring.expected(group, "short")
    process_ring.both_ways(group, 60.0, "short")
    if slow:
        for connection in process_ring.connections():
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, SLOW_BYTES_PER_SECOND)
    say("ready")
    correct = all(
        [process_ring.right(process_ring.both_ways(group, 60.0, "short"), wanted) for _ in range(passes)]
    )
    say("result", right=correct)


def listening(processes: list[int]) -> set[int]:
    """Ports on which these processes listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{process}/fd/{name}"))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


class Strangers:
    """A thread that connects to all ports of a ring, from before the ring begins."""

    def __init__(self, ring: process_ring.Ring, port: int, greeting: Callable[[], bytes]):
        self._processes = [rank.process for rank in ring.ranks]
        self._port, self._greeting = port, greeting
        self._open: list[socket.socket] = []
        self.calls = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._talk)
        self._thread.start()

    def _talk(self) -> None:
        while not self._done.wait(0.02):
            for port in {self._port} | listening(self._processes):
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection(("127.0.0.1", port), 1)
                    self._open.append(stranger)
                    stranger.sendall(self._greeting())
                    self.calls += 1
            while len(self._open) > 30:  # the others stay open for a while
                self._open.pop(0).close()

    def leave(self) -> None:
        self._done.set()
        self._thread.join()
        for stranger in self._open:
            stranger.close()


def junk(choose: random.Random) -> bytes:
    """Random bytes. Half of them begin like a client of a TCPStore: query 0, with its magic number."""
    begin = b"\0" + (0x3C85F7CE).to_bytes(4, "little") if choose.random() < 0.5 else b""
    return begin + choose.randbytes(choose.randrange(1, 999))


def use_store(port: int) -> None:
    """A stranger that speaks the protocol and sets keys of its own in the ring's store."""
    until = time.monotonic() + 2 * process_ring.PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):  # the store does not exist yet, or any more
            store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
            for number in range(100):
                store.set(f"stranger{number}", "x" * number)
                store.add("stranger", 1)
            store.wait(["never"])


def undisturbed(fault: str, ranks: int, choose: random.Random) -> Outcome:
    """No rank may raise, and results must be right."""
    port = process_ring.free_port()
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(process_ring.joined_ring(ranks, compute, 5, fault == "slow", port=port))
        strangers = None
        if fault != "slow":
            body = lambda rank, say, orders: use_store(port)  # noqa: E731
            stack.enter_context(process_ring.Ring(1, body))
            greeting = (lambda: b"") if fault == "stranger" else lambda: junk(choose)
            strangers = Strangers(ring, port, greeting)
        ring.wait("result", list(range(ranks)), process_ring.PATIENCE)
        if strangers is not None:
            strangers.leave()
        outcome = judge([], 0, [rank.last("result") for rank in ring.ranks], ring)
        if strangers is not None and strangers.calls < 3:
            outcome.complaints.append("the strangers could not connect")
            outcome.recovered = False
        return outcome


# ---- checkpoints


class Training:
    """The same on every rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def to(self, last: int, first: int = 1, after: Callable[[int], None] = lambda step: None) -> Training:
        for step in range(first, last + 1):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            after(step)
        return self

    def equals(self, other: Training) -> bool:
        pairs = zip(self.model.parameters(), other.model.parameters())
        return all(torch.equal(one, another) for one, another in pairs)


def save_two(checkpoints: at.Checkpoints) -> None:
    for step in (1, 2):
        checkpoints.save(step, Training().to(step).state)
    checkpoints.wait()
    torch.distributed.barrier()


def goes_on(training: Training, first: int, checkpoints: at.Checkpoints) -> bool:
    """Trains up to step 4. Whether the checkpoint of step 4 is that of an undisturbed training."""
    training.to(4, first, lambda step: checkpoints.step(step, training.state))
    checkpoints.wait()
    found = Training()
    return checkpoints.resume(found.state).step == 4 and found.equals(Training().to(4))


def fill_disk(rank: int, say: Callable, folder: pathlib.Path, victim: int) -> None:
    """Writes two checkpoints, fails to write the third, and then has room for the fourth."""
    training = Training().to(2)
    with at.Checkpoints(folder, 1) as checkpoints:
        save_two(checkpoints)
        filler = folder / "filler"
        real = os.path.ismount(folder)
        if real and rank == 0:
            filled = 1 << 20
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while filled:
                    filled = file.write(bytes(1 << 12))
        elif not real and rank == victim:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        torch.distributed.barrier()
        begin = time.monotonic()
        training.to(3, 3, lambda step: checkpoints.step(step, training.state))
        try:
            checkpoints.wait()
            say("detected", right=False, text="it was written")
        except at.CheckpointError as error:
            right = ("No space left" if real else f"rank {victim}: OSError") in str(error)
            say("detected", right=right, seconds=time.monotonic() - begin, text=str(error))
        torch.distributed.barrier()
        if real and rank == 0:
            filler.unlink()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        torch.distributed.barrier()
        say("result", right=goes_on(training, 4, checkpoints))


def damage(rank: int, say: Callable, folder: pathlib.Path, how: str, seed: int) -> None:
    """Damages the newest checkpoint. It must be passed over, and training continue from the one before."""
    with at.Checkpoints(folder, 1) as checkpoints:
        save_two(checkpoints)
        choose = random.Random(seed)
        path = choose.choice(sorted((folder / "step-00000002").glob("*")))
        place = choose.randrange(path.stat().st_size)
        torch.distributed.barrier()
        if rank == 0 and how == "truncate":
            os.truncate(path, place)
        elif rank == 0:
            data = bytearray(path.read_bytes())
            data[place] ^= 1 << choose.randrange(8)
            path.write_bytes(data)
        torch.distributed.barrier()
        training = Training()
        begin = time.monotonic()
        resumed = checkpoints.resume(training.state)
        said = [reason for name, reason in resumed.passed_over if name == "step-00000002"]
        right = resumed.step == 1 and len(said) == 1 and path.name in said[0]
        say("detected", right=right, seconds=time.monotonic() - begin, text=str(resumed))
        say("result", right=goes_on(training, resumed.step + 1, checkpoints) and path.exists())


def save_until_lost(rank: int, say: Callable, folder: pathlib.Path, last: int) -> None:
    """Writes a checkpoint after every step, until a rank is killed or the last step is done."""
    training = Training()
    with (
        contextlib.suppress(at.CheckpointError),
        at.Checkpoints(folder, 1, max_failures=0) as checkpoints,
    ):
        first = checkpoints.resume(training.state).step + 1

        def after(step: int) -> None:
            checkpoints.step(step, training.state)
            if step == first + 1:
                say("ready")

        try:
            training.to(last, first, after)
            checkpoints.wait()
            say("result", right=training.equals(Training().to(last)), first=first)
        except at.CheckpointError as error:
            say("detected", right=True, text=str(error))


def train_with_survivors(rank: int, say: Callable, folder: pathlib.Path, victim: int, last: int) -> None:
    """Trains; after the loss of the victim, the survivors continue from the newest checkpoint in the same processes."""
    group = torch.distributed.group.WORLD
    while True:
        training = Training()
        try:
            with at.Checkpoints(folder, 1, timeout=2.0, group=group) as checkpoints:
                first = checkpoints.resume(training.state).step + 1

                def after(step: int) -> None:
                    try:
                        process_ring.both_ways(group, 4.0, "short")
                    except annulus.TransportError as error:
                        say("detected", right=error.rank == victim, text=str(error))
                        raise
                    checkpoints.step(step, training.state)
                    if step == 3:
                        say("ready")

                training.to(last, first, after)
            break
        except annulus.TransportError:
            group = at.survivors(group, timeout=60.0)
    say("result", right=training.equals(Training().to(last)), first=first)


def lose_and_resume(fault: str, ranks: int, choose: random.Random) -> Outcome:
    victim = choose.randrange(ranks)
    survivors = [rank for rank in range(ranks) if rank != victim]
    last = 60
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with process_ring.joined_ring(ranks, train_with_survivors, folder, victim, last) as ring:
            ring.wait("ready", list(range(ranks)), process_ring.PATIENCE)
            time.sleep(choose.uniform(0, 0.3))
            begin = time.monotonic()
            getattr(ring, fault.removesuffix("_training"))(victim)
            ring.wait("result", survivors, process_ring.PATIENCE)
            said, results = (
                [ring.ranks[rank].last(what) for rank in survivors]
                for what in ("detected", "result")
            )
            return judge(said_with_seconds(said, begin), ranks - 1, results, ring)


def checkpoint_fault(fault: str, ranks: int, choose: random.Random) -> Outcome:
    everybody = list(range(ranks))
    victim = choose.randrange(ranks)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if fault == "kill_writing":
            return killed_writing(folder, ranks, victim, choose)
        if fault == "full_disk":
            mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
            if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
                stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            body, arguments = fill_disk, (folder, victim)
        else:
            body, arguments = damage, (folder, fault, choose.randrange(10**6))
        ring = stack.enter_context(process_ring.joined_ring(ranks, body, *arguments))
        ring.wait("result", everybody, process_ring.PATIENCE)
        said, results = (
            [rank.last(what) for rank in ring.ranks] for what in ("detected", "result")
        )
        return judge(said, ranks, results, ring)


def killed_writing(folder: pathlib.Path, ranks: int, victim: int, choose: random.Random) -> Outcome:
    """A rank is killed while it writes. Then all are started again."""
    survivors = [rank for rank in range(ranks) if rank != victim]
    with process_ring.joined_ring(ranks, save_until_lost, folder, 10**6) as ring:
        if not ring.wait("ready", list(range(ranks)), process_ring.PATIENCE):
            return judge([None], ranks - 1, [], ring)
        time.sleep(choose.uniform(0, 0.2))
        begin = time.monotonic()
        ring.kill(victim)
        ring.wait("detected", survivors, process_ring.PATIENCE)
        said = [ring.ranks[rank].last("detected") for rank in survivors]
        lost = judge(said_with_seconds(said, begin), ranks - 1, [], ring)
    reached = max((int(p.name[5:13]) for p in folder.glob("step-????????")), default=0)
    with process_ring.joined_ring(ranks, save_until_lost, folder, reached + 3) as ring:
        ring.wait("result", list(range(ranks)), process_ring.PATIENCE)
        results = [rank.last("result") for rank in ring.ranks]
        outcome = judge(said_with_seconds(said, begin), ranks - 1, results, ring)
    outcome.complaints += lost.complaints
    if any(line is not None and line["first"] != reached + 1 for line in results):
        outcome.complaints.append(f"did not go on after step {reached}: {results}")
        outcome.recovered = False
    return outcome


def said_with_seconds(said: Said, begin: float) -> Said:
    return [None if line is None else line | {"seconds": line["at"] - begin} for line in said]


# ---- the table

FAULTS: dict[str, tuple[str, Callable[[str, int, random.Random], Outcome], int]] = {
    "kill": ("a rank is killed", lose, 20),
    "stop": ("a rank is stopped", lose, 3),
    "cut": ("a rank's connections are cut", lose, 6),
    "kill_training": ("killed, survivors resume", lose_and_resume, 6),
    "stop_training": ("stopped, survivors resume", lose_and_resume, 2),
    "slow": ("slow links", undisturbed, 4),
    "stranger": ("strangers at all ports", undisturbed, 4),
    "junk": ("junk bytes at all ports", undisturbed, 4),
    "full_disk": ("disk full at a checkpoint", checkpoint_fault, 6),
    "truncate": ("file of a checkpoint truncated", checkpoint_fault, 6),
    "flip": ("bit of a checkpoint flipped", checkpoint_fault, 6),
    "kill_writing": ("a rank is killed while writing", checkpoint_fault, 10),
}


def line(name: str, outcomes: list[Outcome]) -> str:
    times = [each for o in outcomes for each in o.times]
    median, most_of_them, longest = (f"{kill_ranks.quantile(times, q):.3f}" if times else "-" for q in (0.5, 0.99, 1))
    expected = sum(o.expected for o in outcomes)
    detected = f"{sum(o.detected for o in outcomes)}/{expected}" if expected else "none to"
    return (
        f"{name:32} {len(outcomes):8} {detected:>9} {median:>8} {most_of_them:>7} "
        f"{longest:>7} {sum(o.recovered for o in outcomes):6}/{len(outcomes):<3} "
        f"{sum(o.wrong for o in outcomes):13}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--rounds", type=int, help="rounds of each fault; default: a few minutes in all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("annulus.checkpoints").setLevel(logging.CRITICAL)  # silent about the injected faults
    print(
        f"{'fault':32} {'injected':>8} {'detected':>9} {'median s':>8} {'p99 s':>7} {'max s':>7} {'recovered':>10} "
        f"{'wrong results':>13}"
    )
    good = True
    for fault in options.only:
        name, inflict, usual = FAULTS[fault]
        choose = random.Random(f"{options.seed} {fault}")
        outcomes = []
        for number in range(options.rounds or usual):
            outcome = inflict(fault, options.ranks[number % len(options.ranks)], choose)
            outcomes.append(outcome)
            for complaint in outcome.complaints:
                print(f"  {fault}, round {number}: {complaint}", file=sys.stderr, flush=True)
        print(line(name, outcomes), flush=True)
        good = good and all(outcome.good for outcome in outcomes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
