"""A device notes the time itself, in the order of its work."""

import pytest
import torch

from gpubound.kernels.peer_exchange import Stamps, can_stamp


def test_times_go_on_and_each_has_its_place():
    stamps = Stamps(torch.device("cpu"), 3)
    stamps.put(2)
    stamps.put(0)
    last, none, first = stamps.times.tolist()
    assert 0 < first <= last and none == 0 and can_stamp(torch.device("cpu"))


@pytest.mark.gpu
def test_a_gpu_notes_when_it_comes_to_a_point_also_in_a_graph():
    """Between two notes it sleeps for so many cycles: twice as many take longer, in each replay anew."""
    device = torch.device("cuda", torch.cuda.current_device())
    stamps = Stamps(device, 2)
    stamps.put(0)  # compiles
    graph, took = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        stamps.put(0)
        torch.cuda._sleep(20_000_000)  # 10 ms or so
        stamps.put(1)
    for _ in range(2):
        graph.replay()
        first, last = stamps.times.tolist()
        took.append((first, last))
    assert all(last - first > 1e6 for first, last in took) and took[1][0] >= took[0][1]
