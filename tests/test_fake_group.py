"""A group of torch's fake backend: one process stands for all ranks of a trial."""

import pytest
import torch
import torch.distributed as dist

from trainer.launch.rendezvous import Launch
from trainer.parallel.fake_group import FakeGroup, NotYetSent, join_fake_group


def test_other_ranks_hold_what_this_one_does() -> None:
    world = join_fake_group(Launch(rank=3, world_size=1024))
    try:
        assert (world.rank, world.size) == (3, 1024)
        assert world.max_values([True, 2]) == [1, 2]
        assert world.all_gather_values("here") == ["here"] * 1024
        world.all_reduce_sum_(torch.ones(2)).wait()
    finally:
        dist.destroy_process_group()


def test_a_rank_waits_for_the_trial_of_who_sends() -> None:
    FakeGroup.mail.clear()
    first = join_fake_group(Launch(rank=0, world_size=2))
    with pytest.raises(NotYetSent) as needed:
        first.broadcast_value(None, source=1)
    assert needed.value.rank == 1
    first.send_value({"shape": [2, 3]}, peer=1)
    dist.destroy_process_group()
    second = join_fake_group(Launch(rank=1, world_size=2))
    assert second.receive_value(peer=0) == {"shape": [2, 3]}
    assert second.broadcast_value("loss", source=1) == "loss"
    dist.destroy_process_group()
    first = join_fake_group(Launch(rank=0, world_size=2))
    assert first.broadcast_value(None, source=1) == "loss"
    dist.destroy_process_group()
    FakeGroup.mail.clear()
