"""Reunion: how the remaining ranks of a group meet, agree on the members, and make a new group, also if more are lost.

They meet at a store that one of them serves: that of the lowest rank that answers. There they hold rounds. In a round,
every rank reports that it is present. The first rank that sees all expected ranks writes the decision. Its members make
the group. The outcome is good when all members have the group, and bad if one of them is found to be gone. After a bad
outcome the next round begins. Decision and outcome are written once, by compare-and-set, so that all ranks read the
same.

Ranks may disagree about which store answers, because a rank was stopped or is very busy. So a waiting rank also looks
at its own store and at those of missing ranks. If it finds ranks there, it moves all to that store: always to that of a
higher rank, so that no rank moves back. If the store is lost, all go to the next one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from annulus.torch.faults._places import Place
from annulus.torch.ring._rendezvous import within

# All in seconds. When all other ranks are present, those reported as lost get this long to come nevertheless.
_GRACE = 0.2
_LOOK = 0.25  # from one search for missing ranks to the next
_LONGEST_LOOK = 1.0  # limit of one search; other ranks may come meanwhile
_ROUND = 2.0  # minimum of each round after the first, so that a slightly late rank is not left out
_SILENCE = 3.0  # until a store that did not answer is asked again
_SLACK = 2.0  # that a store may take to answer, in addition to the wait
_NAP = 0.005

_TRIES = 5  # attempts to make a group of ranks that are all present

Make = Callable[[list[int], str, dist.Store], dist.ProcessGroup]


class Reunion:
    """One rank's part in a meeting of the remaining ranks of a group."""

    def __init__(
        self,
        me: int,
        size: int,
        lost: int,
        least: int,
        seconds: float,
        places: dict[int, Place],
        make: Make,
    ):
        self._me, self._size, self._least, self._seconds = me, size, least, seconds
        self._until = time.monotonic() + seconds
        self._places, self._make = places, make
        self._missed = {lost}  # ranks that are not waited for
        self._gone: set[int] = set()  # ranks whose processes have ended
        self._silent: dict[int, float] = {}  # ranks whose stores did not answer: time of the next attempt
        self._keys: dist.Store | None = None  # keys of the current round
        self._opened: dict[int, dist.Store] = {}  # open stores, by place
        self._why = ""  # why this rank could not make the last group
        self.at_fault = lost

    def hold(self, prefix: str) -> dist.ProcessGroup | str:
        """Meets the other ranks. Returns the new group, or the reason why there is none."""
        # Not at the place of the lost rank: if it is stopped, all would wait for it there.
        queue = [rank for rank in sorted(self._places) if rank != self.at_fault]
        if not queue:
            queue = list(self._places)
        while True:
            for place in queue:
                store = self._store_at(place)
                if store is None:
                    continue
                try:
                    result = self._hold_at(place, prefix, store)
                except (RuntimeError, TimeoutError):  # the rank that served this store is lost, too
                    self._opened.pop(place, None)
                    continue
                if not isinstance(result, int):
                    return result
                queue = [rank for rank in sorted(self._places) if rank >= result]
                break
            else:
                again = any(self._places[place].may_answer() for place in queue)
                if not again or time.monotonic() >= self._until:
                    return "no other rank can be reached"

    def _store_at(self, rank: int) -> dist.Store | None:
        if rank not in self._opened:
            store = self._places[rank].open()
            if store is None:
                return None
            self._opened[rank] = store
        return self._opened[rank]

    def _hold_at(self, place: int, prefix: str, store: dist.Store) -> dist.ProcessGroup | str | int:
        """Like hold, at one place. A number is the place to which all ranks have moved."""
        failures = 0
        for number in itertools.count():
            here = f"{prefix}/{number}"
            keys = self._keys = dist.PrefixStore(here, store)
            if number > 0:
                self._until = max(self._until, time.monotonic() + _ROUND)
            limit = max(0.0, self._until - time.monotonic()) + _SLACK
            agree = functools.partial(self._agree, keys, place, here)
            decision = within(limit, agree, "agreeing on the remaining ranks")
            if isinstance(decision, int):
                return decision
            left, name = decision
            if self._me not in left:
                if keys.check(["outcome"]) and keys.get("outcome") == b"bad":
                    continue  # with the next round
                self.at_fault = self._me
                return f"the other ranks have continued without this rank, as {left}"
            if len(left) < self._least:
                return f"only ranks {left} are left, fewer than {self._least}"
            gone, self._why = len(self._gone), ""
            become = functools.partial(self._become, keys, place, left, name)
            made = within(self._seconds + _SLACK, become, "making a group")
            if made is not None:
                return made
            # Another member was lost meanwhile, or the cause persists. Only the second counts as a failure.
            failures += self._why != "" and len(self._gone) == gone
            if failures == _TRIES:
                self.at_fault = self._me
                return f"a group of ranks {left} cannot be made here: {self._why}"
        raise AssertionError

    def _agree(self, keys: dist.Store, place: int, here: str) -> tuple[list[int], str] | int:
        """The remaining ranks and the name of their group, or a place to move to. The first rank that sees all expected
        ranks decides."""
        keys.set(f"here/{self._me}", json.dumps(sorted(self._missed)))
        present = {self._me}
        since = None
        looked = time.monotonic()
        while not keys.check(["decision"]):
            for peer in set(range(self._size)) - present - self._gone:
                if keys.check([f"here/{peer}"]):
                    present.add(peer)
                    self._missed |= set(json.loads(keys.get(f"here/{peer}")))
            now = time.monotonic()
            if since is None and present >= set(range(self._size)) - self._missed:
                since = now
            complete = len(present) == self._size or (since is not None and now >= since + _GRACE)
            enough = len(present) >= self._least
            if (complete or now >= self._until) and not enough:
                # No decision: other ranks may still come, and this rank may try again.
                keys.delete_key(f"here/{self._me}")
                return sorted(present), ""
            if self._keys is not keys:  # the store took too long to answer, and this rank has moved
                return sorted(present), ""
            if complete or now >= self._until:
                keys.compare_set("decision", "", json.dumps([sorted(present), uuid.uuid4().hex]))
                break
            if looked + _LOOK <= now < self._until - _SLACK:
                self._look(keys, place, here, present)
                looked = time.monotonic()
            time.sleep(_NAP)
        return json.loads(keys.get("decision"))

    def _look(self, keys: dist.Store, place: int, here: str, present: set[int]) -> None:
        """Looks for missing ranks. Each rank looks at its own place; the lowest present rank also looks at all
        others."""
        if place < self._me and self._move_to(self._me, keys, here):
            return
        first = min(present)
        if first != self._me:
            if self._is_gone(first):
                present.discard(first)  # the next rank looks from now on
            return
        stop = time.monotonic() + _LONGEST_LOOK
        missing = [rank for rank in range(self._size) if rank not in present | self._missed]
        for rank in missing:
            if time.monotonic() < stop:
                self._is_gone(rank)
        # Other ranks may meet, or have met, at the place of a rank that was given up.
        for rank in [r for r in self._places if r > place and r not in present]:
            if time.monotonic() < stop and self._move_to(rank, keys, here):
                return

    def _move_to(self, rank: int, keys: dist.Store, here: str) -> bool:
        """Moves all present ranks to the place of that rank if there are ranks. Returns whether it did."""
        if not self._has_ranks_at(rank, here):
            return False
        keys.compare_set("decision", "", json.dumps(rank))
        return True

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of that rank has ended. If so, the rank is no longer waited for."""
        if rank in self._places and self._places[rank].is_gone():
            self._missed.add(rank)
            self._gone.add(rank)
        return rank in self._gone

    def _has_ranks_at(self, rank: int, here: str) -> bool:
        if rank not in self._places or time.monotonic() < self._silent.get(rank, 0.0):
            return False
        store = self._store_at(rank)
        if store is not None:
            keys = dist.PrefixStore(here, store)
            with contextlib.suppress(RuntimeError):
                signs = ["decision"] + [f"here/{peer}" for peer in range(self._size)]
                return any(keys.check([sign]) for sign in signs)
            del self._opened[rank]
        self._silent[rank] = time.monotonic() + _SILENCE
        return False

    def _become(
        self, keys: dist.Store, place: int, left: list[int], name: str
    ) -> dist.ProcessGroup | None:
        """The group, once all members have it. None: a member is gone, and all members know that the round failed."""
        made: list[dist.ProcessGroup | None] = []
        lock = threading.Lock()
        over = False

        def make() -> None:
            # A separate connection to the store, because this may wait for a rank that never comes.
            store = self._places[place].open()
            group = None
            try:
                group = None if store is None else self._make(left, name, store)
            except Exception as error:  # reported by hold()
                self._why = f"{type(error).__name__}: {error}"
            with lock:
                if not over:
                    made.append(group)
                    return
            if group is not None:  # no longer wanted
                dist.destroy_process_group(group)

        if not keys.check(["outcome"]):
            threading.Thread(target=make, name="annulus new group", daemon=True).start()
        until = time.monotonic() + self._seconds
        looked = time.monotonic()
        told = False
        while not keys.check(["outcome"]):
            now = time.monotonic()
            if made and not told:
                told = True
                if made[0] is not None:
                    keys.set(f"made/{self._me}", "")
            bad = now >= until or (told and made[0] is None)
            if now >= looked + _LOOK:
                bad = any([self._is_gone(rank) for rank in left if rank != self._me]) or bad
                looked = time.monotonic()
            if bad:
                keys.compare_set("outcome", "", "bad")
            elif told and all(keys.check([f"made/{rank}"]) for rank in left):
                keys.compare_set("outcome", "", "good")
            else:
                time.sleep(_NAP)
        with lock:
            over = True
        if keys.get("outcome") == b"good" and made:
            return made[0]
        if made and made[0] is not None:
            dist.destroy_process_group(made[0])
        return None
