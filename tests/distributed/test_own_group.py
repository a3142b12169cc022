"""A script's own process group: its ranks, used and left as they are."""

import pytest
import torch
import torch.distributed as dist

from gpubound.distributed import join
from gpubound.distributed.ranks import ranks_of
from tests.distributed.processes import RankFailed, on_ranks
from tests.messages import message


def own_group():
    dist.init_process_group("gloo")
    with join("cpu") as ranks:
        x = torch.tensor([1.0 + ranks.rank])
        ranks.sum(x)
    odd_even = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = ranks_of(odd_even[dist.get_rank() % 2], "cpu")
    y = torch.tensor([10.0**half.rank])
    half.sum(y)
    return ranks.rank, ranks.world, x.item(), (half.rank, half.world, half.of_first(dist.get_rank()), y.item())


def test_a_process_group_that_is_there_is_used_and_left():
    assert on_ranks(4, own_group) == [(rank, 4, 10.0, (rank // 2, 2, rank % 2, 11.0)) for rank in range(4)]


def wrong_engine():
    dist.init_process_group("gloo")
    with join("cuda"):
        pass


def test_a_group_that_cannot_add_up_on_the_device_is_refused():
    with pytest.raises(RankFailed) as error:
        on_ranks(2, wrong_engine)
    assert message("parallel/own_group:a_group_that_cannot_add").within(str(error.value))
