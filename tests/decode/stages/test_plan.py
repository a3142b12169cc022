"""Which layers go to which device, by sizes alone."""

from itertools import combinations

import pytest
import torch

from gpubound.decode.placement.plan import DeviceMemory, StageBytes, lanes, plan
from tests.messages import message, refusal

GB = 10**9


def rooms(*free: float) -> list[DeviceMemory]:
    return [DeviceMemory(torch.device("cuda", number), int(size * GB)) for number, size in enumerate(free)]


def cut(sizes: StageBytes, *free: float) -> list[int]:
    """How many layers each device gets."""
    stages = plan(sizes, rooms(*free))
    assert [n for stage in stages for n in stage.layers] == list(range(len(sizes.weights)))
    assert [stage.device.index for stage in stages] == list(range(len(free)))
    return [len(stage.layers) for stage in stages]


def even(count: int, weights: float = 1.0, kept: float = 0.0, ends: float = 0.0, read: float = 0.0) -> StageBytes:
    return StageBytes([int(weights * GB)] * count, [int(kept * GB)] * count, int(ends * GB), int(read * GB))


def test_the_busiest_device_reads_as_little_as_any_plan_lets_it():
    """Beside all ways to cut eleven layers of different sizes in three."""
    weights = [3, 9, 2, 7, 7, 1, 4, 8, 2, 6, 5]
    read = 6
    stages = plan(StageBytes(weights, [0] * 11, 9, read), rooms(1, 1, 1))
    reads = [sum(weights[n] for n in stage.layers) for stage in stages]
    reads[0] += read
    least = min(max(sum(weights[:a]) + read, sum(weights[a:b]), sum(weights[b:])) for a, b in combinations(range(1, 11), 2))
    assert max(reads) == least


def test_the_head_counts_for_the_first_device_and_the_embedding_only_where_it_lies():
    assert cut(even(32), 100, 100) == [16, 16]
    assert cut(even(32, ends=4, read=4), 100, 100) == [14, 18]
    assert cut(even(32, ends=8, read=4), 100, 100) == [14, 18]
    assert cut(even(6), 100) == [6]


def test_what_does_not_fit_goes_where_there_is_room():
    assert cut(even(8, kept=1), 100, 6.5) == [5, 3]
    assert cut(even(8, ends=2), 5.5, 100, 100) == [2, 3, 3]


def test_too_many_devices():
    assert refusal(ValueError, lambda: plan(even(2), rooms(9, 9, 9))) == message("decode/stages/plan:too_many_devices")


def test_a_stage_that_does_not_fit():
    assert refusal(ValueError, lambda: plan(even(4, kept=0.5, ends=3), rooms(4, 9))) == message(
        "decode/stages/plan:a_stage_that_does_not_fi"
    )
    with pytest.raises(ValueError, check=message("decode/stages/plan:a_stage_that_does_not_fi.2")):
        plan(even(4, kept=0.5), rooms(9, 1))


def test_a_model_that_does_not_fit():
    assert refusal(ValueError, lambda: plan(even(10), rooms(4, 4.5))) == message("decode/stages/plan:a_model_that_does_not_fi")


@pytest.mark.parametrize("rows, count", [(1, 2), (2, 2), (3, 2), (16, 2), (7, 3), (5, 8)])
def test_rows_in_lanes(rows, count):
    found = lanes(rows, count)
    assert [row for lane in found for row in lane] == list(range(rows))
    assert len(found) == min(rows, count) and max(map(len, found)) - min(map(len, found)) <= 1
