"""Processes under torchrun, connected by Gloo. They run torch_worker.py."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import Ranks, need_gloo, run_program

need_gloo()

WORKER = pathlib.Path(__file__).with_name("torch_worker.py")


# Starting processes that import PyTorch is most of the time, so that cases share a start.
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, ["alone", "equals_one_process", "padding_is_the_mask"]),
        (
            2,
            [
                "bad_luck_is_everybodys",  # first: an instruction set is chosen once
                "equals_one_process",
                "gradients_of_sinks_add_up",
                "shared_keys_take_part_once",
                "additional_keys_of_modules",
                "masks_of_the_whole_sequence",
                "dropout_equals_one_process",
                "seeds_are_everybodys",
                "drawn_seeds_beside_masks",
                "layers_drop_whatever_the_shards_draw",
                "padding_is_the_mask",
                "masks_that_change",
                "masks_with_holes_are_everybodys",
                "errors_beside_masks_are_everybodys",
                "padding_is_reproducible",
                "masks_of_other_ranks_change_under_checkpoints",
                "memory_is_everybodys",
                "compiled_equals_eager",
                "arguments_are_everybodys",
                "closing_lets_messages_arrive",
                "two_threads",
                "fully_sharded",
                "ranks_agree_on_the_transport_of_device_memory",
                "forked_children_end",
                "rings_are_made_anew",
                "group_made_again",
            ],
        ),
        (
            3,
            [
                "bad_luck_is_everybodys",
                "equals_one_process",
                "compiled_equals_eager",
                "shared_keys_take_part_once",
                "shared_keys_are_everybodys",
                "known_calls_are_compared",
                "memory_for_gradients_of_shared_keys_is_everybodys",
                "dropout_equals_one_process",
                "additional_keys_of_modules",
                "masks_of_the_whole_sequence",
                "padding_is_the_mask",
                "ignored_keys_are_not_sent",
                "masks_that_change",
                "masks_with_holes_are_everybodys",
                "errors_beside_masks_are_everybodys",
                "padding_is_reproducible",
                "padding_with_keys_of_other_lengths",
                "lengths_of_your_own",
                "placements_of_your_own",
                "lengths_that_change",
                "documents_that_change",
                "nothing_gives_nothing",
                "errors_are_everybodys",
                "memory_is_everybodys",
                "arguments_are_everybodys",
                "an_unexpected_error_ends_the_ring",
                "messages_are_few",
                "two_threads",
                "unshard_and_its_gradient",
                "resharding_moves_the_fewest_bytes",
                "groups_that_not_everybody_is_in",
                "rings_are_made_anew",
            ],
        ),
        (
            4,
            [
                "equals_one_process",
                "gradients_of_sinks_add_up",
                "padding_is_the_mask",
                "masks_that_change",
                "lengths_of_your_own",
                "resharding_moves_the_fewest_bytes",
                "groups_beside_data_parallelism",
            ],
        ),
    ],
)
def test_processes(processes: int, cases: list[str]) -> None:
    out = run_program(WORKER, *cases, ranks=processes)
    assert out.count("done") == processes * len(cases), out


@pytest.mark.parametrize("how", ["killed", "gave_up", "silent"])
def test_a_lost_rank_is_a_transport_error(how: str) -> None:
    with Ranks(3, WORKER, f"death_{how}") as ranks:
        for rank in (0, 2):
            out = ranks.output_of(rank)
            assert f"rank {rank} lost rank 1" in out, out
            assert out.count(f"rank {rank} misses rank 1") == 2, out
