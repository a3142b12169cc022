"""A run's model in shards: the weights of one process, of which no rank ever holds more than its rows and a block."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gpubound as gb
from gpubound.data import train_tokenizer
from gpubound.distributed import join
from gpubound.distributed.local_shard import gathered
from gpubound.errors import DataError
from gpubound.layers.quantized_base import Base
from gpubound.models.llama import Decoder, DecoderConfig, save_hf
from gpubound.models.llama.checkpoint import MODELS
from gpubound.models.richards.checkpoint import make as make_richards, save as save_richards
from gpubound.train.prepare import build_model, build_shards, choose_sharded, outline
from tests.distributed.processes import on_ranks
from tests.messages import message
from tests.train.runs import recipe, texts

CPU = torch.device("cpu")
DEEP = DecoderConfig(32, 96, 8, 2, 1, 320)  # 27 of 31 thousand numbers in its 8 blocks


def peak(profiled):
    """The most bytes that torch's allocator has had out at a time, of what it gave out while it was profiled."""
    events = (event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(size for _, size in sorted((event.start_ns(), event.nbytes()) for event in events)))


def shards(todo, tokenizer):
    """(by name: the weights, put together; the most bytes while they were made; the model's other facts)."""
    MODELS["deep"] = DEEP  # the process is this test's
    with join("cpu") as ranks:
        torch.manual_seed(todo.seed)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            model = build_shards(todo, tokenizer, CPU, ranks)
        facts = getattr(model, "generation", None), getattr(model, "name_or_path", None)
        return {name: p.numpy().copy() for name, p in gathered(dict(model.named_parameters()))}, peak(profiled), facts


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(), 300)


@pytest.fixture
def deep(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "deep", DEEP)
    return recipe("", tmp_path, model="deep")


def folder(kind, path):
    torch.manual_seed(3)
    if kind == "richards":
        made = make_richards("richards-tiny+dyt", 300, 32, CPU)
        return save_richards(made.bfloat16(), path)
    made = Decoder(replace(DEEP, tied=kind == "tied", vocabulary=321, qkv_bias=True)).bfloat16()
    made.generation = {"eos_token_id": 7}
    return save_hf(made, path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["named", "tied", "untied", "richards"])
def test_shards_have_the_weights_of_one_process(kind, deep, tokenizer, tmp_path):
    todo = deep if kind == "named" else replace(deep, model=str(folder(kind, tmp_path / "base")))
    torch.manual_seed(todo.seed)
    whole = build_model(todo, tokenizer, CPU)
    wanted = dict(whole.named_parameters())
    everything = sum(4 * p.numel() for p in wanted.values())
    for rank, (weights, most, facts) in enumerate(on_ranks(2, shards, todo, tokenizer)):
        assert weights.keys() == wanted.keys() and facts == (whole.generation, whole.name_or_path)
        for name, parameter in wanted.items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), parameter.data.float(), rtol=0, atol=0, msg=name)
        made_here = kind == "named" and rank == 0  # the first rank draws the whole model, and sends each its part
        if kind != "richards" and not made_here:  # of Richards two blocks are most
            mapped = sum(file.stat().st_size for file in tmp_path.glob("base/*.safetensors"))  # counted, and not held
            assert most < 0.75 * everything + mapped, "its half, and a block, or embedding and head, in whole"


def test_a_corpus_beyond_the_models_vocabulary_is_refused_before_rows_are_read(deep, tmp_path):
    todo = replace(deep, model=str(folder("tied", tmp_path / "base")))
    with pytest.raises(DataError, check=message("train/making:a_corpus_beyond_the_mode")):
        build_shards(todo, type("Tokenizer", (), {"vocab_size": 400})(), CPU, gb.distributed.ALONE)


class Two:
    """Two ranks, as far as a choice is made by them."""

    alone, world = False, 2

    def gather(self, value):
        return [value, value]


def test_rows_are_dealt_where_a_replica_does_not_fit(deep, tokenizer, monkeypatch, said):
    """By the outline alone: nobody has room for the model yet."""
    cuda, of_model = torch.device("cuda", 0), outline(deep, tokenizer)
    count = sum(p.numel() for p in of_model.parameters())
    for memory, dealt in ((18 * count, True), (30 * count, False)):
        properties = type("Properties", (), {"total_memory": memory})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        assert choose_sharded(replace(deep, precision="bf16"), lambda: of_model, cuda, Two()) is dealt
    told = said()
    assert message("train/making:rows_are_dealt_where_a_r").within(told)
    assert (
        ", 100% of its " in told and message("train/making:rows_are_dealt_where_a_r.2").within(told) and ", 60% of its " in told
    )
    assert choose_sharded(replace(deep, precision="bf16"), lambda: of_model, CPU, gb.distributed.ALONE) is False


@pytest.mark.parametrize("base", [None, "nf4", "int8", "fp8"])
def test_a_base_counts_as_what_it_takes(base, tokenizer, monkeypatch, tmp_path, said):
    """Frozen weights in 2 bytes or in codes, and 16 bytes a number of adapters."""
    made = save_hf(Decoder(DecoderConfig(128, 256, 4, 2, 1, 320)).bfloat16(), tmp_path / "base")
    todo = recipe("", tmp_path, model=str(made), precision="bf16", lora={"rank": 2} | ({"base": base} if base else {}))
    model = gb.models.load_hf(made)
    gb.lora.add(model, rank=2, base=base)
    trained = sum(p.numel() for p in gb.lora.parameters(model))
    coded = [t.nbytes for p in model.modules() if isinstance(p, Base) for t in (p._weight, *p.buffers())]
    plain = sum(p.numel() for p in model.parameters() if not p.requires_grad and p.is_floating_point())
    wanted = sum(coded) + 2 * plain + 18 * trained
    cuda = torch.device("cuda", 0)
    for share, dealt in ((0.78, False), (0.82, True)):
        properties = type("Properties", (), {"total_memory": wanted / share})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        assert choose_sharded(todo, partial(outline, todo, tokenizer), cuda, Two()) is dealt
    assert message("train/making:a_base_counts_as_what_it").within(said())
