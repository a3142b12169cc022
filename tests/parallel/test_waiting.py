"""How long a rank of a sharded model waits for the others: every collective of a step is noted, and nothing beside it."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import gpubound as gb
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.parallel import join
from gpubound.parallel.dealt import groups_of
from gpubound.parallel.sharded import shard
from gpubound.parallel.waiting import NEEDED, Waits
from gpubound.train.recompute import blocks_of
from tests.messages import message
from tests.parallel.processes import on_ranks
from tests.parallel.test_sharded import WORDS, batch

CONFIG = DecoderConfig(64, 128, 3, 4, 2, WORDS)
EACH = 2
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def stepped(frozen: bool) -> list:
    """[(ns noted in FSDP's calls by a clock that goes on by one at each reading, seconds of the step's whole wait), ...] and
    what FSDP's collectives are behind the step's end."""
    with join("cpu") as ranks:
        torch.manual_seed(0)
        model = Decoder(CONFIG)
        if frozen:
            gb.lora.add(model, rank=4)
        shard(model, blocks_of(model), ranks, torch.float32)
        step = gb.TrainStep(model, "next_token", accumulate=EACH, precision="fp32", graph="off", ranks=ranks)
        step._held.sharded.waits._clock = itertools.count().__next__
        found = []
        for number in range(2):
            result = step([batch(number, i) for i in range(EACH)])
            step.within(lambda: None)  # gathers the head for somebody else
            found.append((result._before.ns, result.read().waited_s))
        groups = [group for unit in step._held.sharded.units for group in groups_of(unit)]
        step.close()
        again = [
            type(getattr(group, name)).__name__ for group in groups for name in ("_all_gather_comm", "_reduce_scatter_comm")
        ]
        return [found, sorted(set(again))]


@pytest.mark.parametrize("frozen", [False, True], ids=["rows", "frozen rows"])
def test_every_collective_of_a_step_is_noted_and_no_other(frozen):
    """Blocks are gathered forward and backward, the rest once. The first step sums with each micro-batch, the second once; and
    it runs the model forward twice more, to try how it is best asked for a loss."""
    units = CONFIG.layers + 1
    gathers = [EACH * (2 * CONFIG.layers + 1) + tries * units for tries in (2, 0)]
    sums = [0, 0] if frozen else [EACH * units, units]
    for found, again in on_ranks(2, partial(stepped, frozen)):
        assert [ns for ns, _ in found] == [gathered + summed for gathered, summed in zip(gathers, sums)]
        assert all(waited is not None and waited >= ns / 1e9 for ns, waited in found)
        assert again == ["DefaultAllGather", "DefaultReduceScatter"], "what was changed in FSDP is as it was"


def stepped_on_gpus(frozen: bool) -> list[tuple[int, float | None]]:
    """(waits noted inside FSDP, seconds waited) of three steps."""
    with join("cuda") as ranks:
        torch.manual_seed(0)
        model = Decoder(CONFIG).to(ranks.device)
        if frozen:
            gb.lora.add(model, rank=4)
        shard(model, blocks_of(model), ranks, torch.bfloat16)
        step = gb.TrainStep(model, "next_token", accumulate=EACH, precision="bf16", ranks=ranks)
        found = []
        for number in range(3):
            result = step([{name: t.to(ranks.device) for name, t in batch(number, i).items()} for i in range(EACH)])
            waited = result.read().waited_s
            found.append((len(result._before.between), waited))
        step.close()
        return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("frozen", [False, True], ids=["rows", "frozen rows"])
def test_two_gpus_note_every_gather_that_they_wait_for(frozen):
    for found in on_ranks(2, partial(stepped_on_gpus, frozen)):
        for noted, waited in found:
            assert noted >= EACH * (2 * CONFIG.layers + 1) and waited is not None and waited > 0


class Stream:
    """Writes down what it is told to do, in order."""

    def __init__(self):
        self.done = []

    def wait_event(self, event):
        self.done.append(f"wait {event}")


class Timed:
    """An event on that stream, which comes when it is the stream's n-th doing."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = len(stream.done)
        stream.done.append("note")

    def elapsed_time(self, later):
        return later.at - self.at


class Group:
    """What FSDP's group of parameters is to Waits, of a torch that keeps one sum in flight or several."""

    def __init__(self, stream, several):
        self._all_gather_comm = self._reduce_scatter_comm = self._all_gather_result = self._post_reduce_event = None
        self.reshard_after_backward = self.reduce_grads = True
        self._training_state = SimpleNamespace(name="FORWARD")
        due = SimpleNamespace(event="sum before")
        if several:
            self.comm_ctx = SimpleNamespace(reduce_scatter_states=[due], _last_post_reduce_events={1: "last sum"})
        else:
            self.comm_ctx = SimpleNamespace(reduce_scatter_state=due)
            self._post_reduce_event = "last sum"
        self._stream = stream

    def wait_for_unshard(self):
        self._stream.done.append("FSDP copies")

    def reshard(self):
        self._stream.done.append("FSDP frees")

    def finalize_backward(self):
        self._stream.done.append("FSDP ends")


@pytest.fixture
def stream(monkeypatch):
    made = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "Event", Timed)
    return made


@pytest.mark.parametrize("several", [False, True], ids=["torch 2.11", "since"])
def test_on_a_gpu_notes_lie_around_the_wait_alone(stream, several):
    group = Group(stream, several)
    waits = Waits([group], GPU)
    group.wait_for_unshard()
    assert stream.done == ["FSDP copies"], "outside of a step nothing is noted"
    stream.done.clear()
    with waits.noting() as waited:
        group.wait_for_unshard()  # there already
        group._all_gather_result = SimpleNamespace(all_gather_event="gathered")
        group.wait_for_unshard()
        group.reshard()
        group._training_state.name = "POST_BACKWARD"
        group.reshard()
        group.finalize_backward()
    assert stream.done == [
        "FSDP copies", "note", "wait gathered", "note", "FSDP copies", "FSDP frees", "FSDP frees", "note", "wait sum before",
        "note", "note", "wait last sum", "note", "FSDP ends",
    ]  # fmt: skip
    assert waited.seconds() == pytest.approx(3 * 2e-3)
    waits.release()
    assert not {"wait_for_unshard", "reshard", "finalize_backward"} & vars(group).keys()


def test_a_wait_that_nobody_notes_makes_the_whole_unknown(stream):
    group = Group(stream, several=True)
    waits = Waits([group], GPU)
    group._all_gather_result = SimpleNamespace(all_gather_event=None)  # a gather that somebody began by itself
    with waits.noting() as waited:
        group.wait_for_unshard()
    assert waited.seconds() is None
    group._all_gather_result, group.reshard_after_backward = None, False
    with waits.noting() as waited:
        group.finalize_backward()
    assert waited.seconds() is None


def test_a_torch_that_does_not_show_its_waits_is_said_in_one_line(stream, capsys):
    group = Group(stream, several=True)
    del group._all_gather_result
    with Waits([group], GPU).noting() as waited:
        group.wait_for_unshard()
    assert waited.seconds() is None and stream.done == ["FSDP copies"]
    said = f"the fully_shard of torch {torch.__version__} has no _all_gather_result"
    assert message("parallel/waiting:a_torch_that_does_not_sh", said).within(capsys.readouterr().err)


def test_what_is_needed_of_this_torch_is_there():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    methods = ("wait_for_unshard", "reshard", "finalize_backward")
    assert all(hasattr(FSDPParamGroup, name) for name in methods) and set(methods) < set(NEEDED)
