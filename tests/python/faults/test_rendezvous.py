"""How ranks find each other and, after a loss, the survivors. Ranks are threads and their store is a dictionary, so
that tests can choose the order of events."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
import uuid
from collections.abc import Callable

import pytest
from support import comes_true
from support.launch import need_gloo

need_gloo()

import torch.distributed as dist
from annulus.torch.faults import _reunion
from annulus.torch.faults._places import Place
from annulus.torch.faults._reunion import Reunion
from annulus.torch.ring import _standby
from annulus.torch.ring._rendezvous import Missing, new_name, within

PREFIX = "annulus/test"


def on_ranks(ranks: list[int], function: Callable[[int], object]) -> list:
    """What the function returns or raises on each rank."""
    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(function, rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]


# Seconds. A test that waits for LONG has found a hang. Ranks that are present come within SHORT, also on a busy
# machine.
SHORT, LONG = 2.0, 120.0


def seconds_since(begin: float) -> float:
    return time.monotonic() - begin


# ---- a ring's name


def test_a_ring_has_one_name_and_never_the_same_again() -> None:
    store = dist.HashStore()
    names = [on_ranks([0, 1, 2], lambda rank: new_name(store, PREFIX, rank, 3, LONG)) for _ in range(5)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 5


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_an_absent_rank_is_named_by_all(absent: int) -> None:
    store = dist.HashStore()
    here = [rank for rank in range(3) if rank != absent]
    found = on_ranks(here, lambda rank: new_name(store, PREFIX, rank, 3, SHORT))
    assert all(isinstance(error, Missing) and error.ranks == [absent] for error in found), found


def test_rank_0_tells_present_ranks_who_is_absent() -> None:
    store = dist.HashStore()
    patience = {0: SHORT, 1: LONG}
    begin = time.monotonic()
    found = on_ranks([0, 1], lambda rank: new_name(store, PREFIX, rank, 3, patience[rank]))
    assert all(isinstance(error, Missing) and error.ranks == [2] for error in found), found
    assert seconds_since(begin) < LONG


def test_a_rank_that_gives_up_before_rank_0_names_the_same() -> None:
    store = dist.HashStore()
    on_ranks([0, 1, 2], lambda rank: new_name(store, PREFIX, rank, 3, LONG))  # then, all were there
    patience = {0: 2 * SHORT, 1: SHORT, 2: SHORT}
    for absent in (2, 1):  # rank 2 comes now, and rank 1 came before, in vain
        here = [rank for rank in range(3) if rank != absent]
        found = on_ranks(here, lambda rank: new_name(store, PREFIX, rank, 3, patience[rank]))
        assert isinstance(found[1], Missing) and found[1].ranks == [absent], found


def test_an_earlier_attempt_does_not_answer_the_next() -> None:
    store = dist.HashStore()
    for absent in (2, 1, 0):
        here = [rank for rank in range(3) if rank != absent]
        found = on_ranks(here, lambda rank: new_name(store, PREFIX, rank, 3, SHORT))
        assert [error.ranks for error in found] == [[absent]] * 2, found
    # What ranks wrote in earlier attempts is still in the store.
    found = on_ranks([0, 1, 2], lambda rank: new_name(store, PREFIX, rank, 3, LONG))
    assert isinstance(found[0], str) and len(set(found)) == 1, found
    begin = time.monotonic()
    found = on_ranks([0], lambda rank: new_name(store, PREFIX, rank, 3, 0.3))
    assert isinstance(found[0], Missing) and found[0].ranks == [1], "an old request was taken"
    assert seconds_since(begin) >= 0.3


def test_only_one_key_of_each_rank_stays_in_the_store() -> None:
    store = dist.HashStore()
    numbers = []
    for _ in range(3):
        on_ranks([0, 1, 2], lambda rank: new_name(store, PREFIX, rank, 3, LONG))
        numbers.append(store.num_keys())
    assert numbers == [numbers[0]] * 3


def test_all_meet_under_the_name_of_the_first_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNULUS_STANDBY_STORE", "0")

    class Group:
        pass

    groups = [Group() for _ in range(3)]  # one object per rank
    store = dist.HashStore()
    for ring, complete_on in (("one", [1]), ("two", [0, 1]), ("three", [0, 1, 2])):
        cards = [_standby.card(group, store).encode() for group in groups]
        for rank in complete_on:
            _standby.remember(groups[rank], ring, cards)
    assert [_standby.meeting_of(group).name for group in groups] == ["one"] * 3


# ---- who is left


def meet(
    store: dist.Store, rank: int, size: int, lost: int, seconds: float, least: int = 1, make: Callable | None = None
) -> tuple[list[int], str] | str:
    """The group that a rank gets, as (ranks, name), or why it gets none. All ranks meet at one store."""
    make = make or (lambda left, name, store: (left, name))
    return Reunion(rank, size, lost, least, seconds, {-1: Place("", store)}, make).hold("annulus/test")


def test_present_ranks_agree_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = uuid.uuid4

    def thought_about() -> uuid.UUID:
        time.sleep(0.1)  # so that all ranks have seen all others before one decides
        return usual()

    monkeypatch.setattr(_reunion.uuid, "uuid4", thought_about)
    store = dist.HashStore()
    begin = time.monotonic()
    found = on_ranks([0, 1, 2, 3], lambda rank: meet(store, rank, 4, -1, LONG))
    assert found == [found[0]] * 4 and found[0][0] == [0, 1, 2, 3]
    assert seconds_since(begin) < LONG


def test_a_rank_that_one_has_lost_is_not_waited_for() -> None:
    store = dist.HashStore()
    begin = time.monotonic()
    found = on_ranks([0, 1, 3], lambda rank: meet(store, rank, 4, 2 if rank == 3 else -1, LONG))
    assert found == [found[0]] * 3 and found[0][0] == [0, 1, 3]
    assert _reunion._GRACE <= seconds_since(begin) < LONG


def test_ranks_that_any_rank_has_lost_are_not_waited_for() -> None:
    store = dist.HashStore()
    begin = time.monotonic()
    found = on_ranks([0, 1, 2], lambda rank: meet(store, rank, 5, 4 if rank == 2 else 3, LONG))
    assert found == [found[0]] * 3 and found[0][0] == [0, 1, 2]
    assert seconds_since(begin) < LONG


def test_a_rank_that_is_lost_to_some_may_come_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_reunion, "_GRACE", LONG)
    store = dist.HashStore()

    def come(rank: int) -> tuple[list[int], str] | str:
        if rank == 2:
            time.sleep(0.2)
        return meet(store, rank, 3, 2, 2 * LONG)

    begin = time.monotonic()
    found = on_ranks([0, 1, 2], come)
    assert found == [found[0]] * 3 and found[0][0] == [0, 1, 2]
    assert seconds_since(begin) < LONG, "all are present, and it waited nevertheless"


def test_a_missing_rank_that_is_not_lost_is_waited_for_until_the_timeout() -> None:
    store = dist.HashStore()
    begin = time.monotonic()
    found = on_ranks([0, 2], lambda rank: meet(store, rank, 3, -1, 3))
    assert found == [found[0]] * 2 and found[0][0] == [0, 2]
    assert seconds_since(begin) >= 3
    late = meet(store, 1, 3, -1, 30)
    assert isinstance(late, str) and "continued without this rank, as [0, 2]" in late


def test_too_few_ranks_decide_nothing_and_may_try_again() -> None:
    store = dist.HashStore()
    alone = meet(store, 2, 5, 1, 0.3, least=3)
    assert isinstance(alone, str) and "only ranks [2] are left, fewer than 3" in alone
    # Rank 2 has left again, so the others do not count it.
    found = on_ranks([0, 3], lambda rank: meet(store, rank, 5, 1, 3, least=3))
    assert all("only ranks [0, 3] are left" in str(each) for each in found), found
    found = on_ranks([0, 2, 3], lambda rank: meet(store, rank, 5, 1, 4, least=3))
    assert found == [found[0]] * 3 and found[0][0] == [0, 2, 3]


def test_a_group_that_not_all_could_make_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(_reunion.dist, "destroy_process_group", dropped.append)
    store = dist.HashStore()
    names: list[str] = []
    others = threading.Barrier(3, timeout=LONG)

    def make(rank: int, left: list[int], name: str) -> tuple[list[int], str]:
        if name not in names:
            names.append(name)
        if name == names[0]:
            others.wait()
            if rank == 1:
                time.sleep(0.3)  # the others mostly have their group by then
                raise RuntimeError("Connection refused")
        return left, name

    found = on_ranks(
        [0, 1, 2],
        lambda rank: meet(store, rank, 3, -1, LONG, make=lambda left, name, _: make(rank, left, name)),
    )
    assert found == [([0, 1, 2], names[1])] * 3
    assert comes_true(lambda: len(dropped) == 2)
    assert dropped == [([0, 1, 2], names[0])] * 2


def test_a_group_that_is_made_after_its_round_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(_reunion.dist, "destroy_process_group", dropped.put)
    store = dist.HashStore()
    names: list[str] = []
    began, next_round = threading.Event(), threading.Event()

    def make(rank: int, left: list[int], name: str) -> tuple[list[int], str]:
        if name not in names:
            names.append(name)
        if name != names[0]:
            next_round.set()
        elif rank == 0:
            began.wait(LONG)
            raise RuntimeError("Connection refused")
        else:
            began.set()
            next_round.wait(LONG)
        return left, name

    found = on_ranks(
        [0, 1],
        lambda rank: meet(store, rank, 2, -1, LONG, make=lambda left, name, _: make(rank, left, name)),
    )
    assert found == [([0, 1], names[1])] * 2
    assert dropped.get(timeout=LONG) == ([0, 1], names[0])


def test_a_rank_that_cannot_make_groups_reports_it_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reunion.dist, "destroy_process_group", lambda group: None)
    store = dist.HashStore()

    def make(rank: int, left: list[int], name: str) -> tuple[list[int], str]:
        if rank == 1:
            raise TypeError("no such backend")
        return left, name

    found = on_ranks(
        [0, 1, 2],
        lambda rank: meet(store, rank, 3, -1, 2 * SHORT, make=lambda left, name, _: make(rank, left, name)),
    )
    assert "of ranks [0, 1, 2] cannot be made here: TypeError: no such backend" in found[1]
    assert found[0] == found[2] and found[0][0] == [0, 2]


# ---- patience


def test_within_gives_results_errors_and_time() -> None:
    assert within(LONG, lambda: 7, "counting") == 7
    with pytest.raises(ZeroDivisionError):
        within(LONG, lambda: 1 // 0, "dividing")
    over = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="waiting took longer than 0.2 s"):
        within(0.2, lambda: over.wait(LONG), "waiting")
    assert seconds_since(begin) >= 0.2
    over.set()
