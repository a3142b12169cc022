"""Predicted memory beside measured peaks, and runs that are proposed by it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpubound.cli.train_options import from_file
from gpubound.device import CONTEXT, memory_size
from gpubound.layers.linear_product import LEAST_BYTES
from gpubound.models.llama.checkpoint import hf_config, load_hf, outline
from gpubound.models.llama.decoder import PRESETS, Decoder, DecoderConfig
from gpubound.plan.costs import collectives, in_host_memory, memory, phases, saved, seconds, total
from gpubound.plan.propose import FREE, proposals, summed_once
from gpubound.plan.step import GPUS, LINK, META, StepConfig, outlined, step_of
from gpubound.train import AdamW, AdamW8bit, Muon, TrainStep
from gpubound.train.fields import Lora
from gpubound.train.objectives.word_loss import NextToken
from gpubound.train.offload import recompute_from
from gpubound.train.precision import precision as precision_named
from gpubound.train.recipe import Recipe
from gpubound.train.recipe_checks import MOST_ACCUMULATE
from tests.messages import refusal
from tests.models.quantized.cases import write

ROWS, SEQ = 1, 16
PLAIN = DecoderConfig(64, 96, 2, 4, 2, 256, tied=True)
NORMED = DecoderConfig(64, 80, 2, 4, 4, 192, head_width=32, qk_norm=True)
ADAPTED = DecoderConfig(64, 128, 3, 4, 2, 256, tied=True)


def predicted(config: DecoderConfig, precision: str = "bf16", optimizer=None, **options) -> StepConfig:
    return outlined(Decoder(config, device=META), optimizer or AdamW(), precision, SEQ, ROWS, **options)


def saved_by_autograd(model: Decoder) -> int:
    """Return the bytes of all storages that autograd saves in a forward, without parameters, buffers and the batch."""
    batch = {name: torch.randint(model.config.vocabulary, (ROWS, SEQ)) for name in ("input_ids", "labels")}
    objective, scale = NextToken(), torch.ones(())
    objective.prepare(model, batch)
    angles = model.model.rope.first(SEQ, torch.device("cpu"))  # the model's own table
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch.values(), *angles, scale)}
    storages: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in known:
            storages[address] = tensor
        return tensor

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patch.setenv("TRITON_INTERPRET", "1")  # what a layer saves is what its kernels save
        loss, _ = objective(model, batch, scale=scale)
    size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    del loss
    return size


def measured(config: DecoderConfig, precision: str, recompute: str, least: float, lora: Lora | None = None) -> int:
    torch.manual_seed(0)
    model = Decoder(config, dtype=precision_named(precision).dtype if lora else None).train()
    if lora is not None:
        lora.add(model)
    step = TrainStep(model, "next_token", precision=precision, recompute=recompute, graph="off")
    if recompute == "cheap":
        recompute_from(model, least)
    if precision == "fp8":
        step._fp8.states[..., 0] = 0.01  # any scale will do
    size = saved_by_autograd(model)
    step.close()
    return size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision", "recompute", "least"),
    [
        (PLAIN, "bf16", "cheap", LEAST_BYTES),  # results so small are saved
        (PLAIN, "bf16", "cheap", 0),
        (PLAIN, "bf16", "none", LEAST_BYTES),
        (PLAIN, "fp32", "1", LEAST_BYTES),
        (PLAIN, "fp32", "blocks", LEAST_BYTES),
        (PLAIN, "fp8", "cheap", LEAST_BYTES),
        (NORMED, "fp32", "cheap", 0),
    ],
)
def test_saved_bytes_are_those_of_autograd(config, precision, recompute, least):
    assert saved(predicted(config, precision, recompute=recompute), least) == measured(config, precision, recompute, least)


@pytest.mark.slow
@pytest.mark.parametrize("least", [0, LEAST_BYTES], ids=["recomputed", "saved"])
def test_shards_save_the_same_bytes(least):
    """And the head's gradient, which the plan counts among those that are not summed yet."""
    torch.manual_seed(0)
    model = Decoder(PLAIN).train()
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
    recompute_from(model, least)
    step = predicted(PLAIN, "fp32", world=2, sharded=True)
    assert saved_by_autograd(model) == saved(step, least) + 4 * PLAIN.vocabulary * PLAIN.hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision", "recompute", "least", "options"),
    [
        (ADAPTED, "bf16", "cheap", LEAST_BYTES, {}),
        (ADAPTED, "fp32", "1", LEAST_BYTES, {}),
        (NORMED, "fp32", "cheap", 0, {}),
        (ADAPTED, "bf16", "cheap", 0, {"base": "nf4"}),
        (ADAPTED, "bf16", "cheap", 0, {"base": "fp8"}),
        (ADAPTED, "fp32", "cheap", 0, {"targets": ("q_proj", "v_proj")}),
        (ADAPTED, "fp32", "cheap", LEAST_BYTES, {"targets": ("q_proj", "v_proj")}),
    ],
)
def test_saved_bytes_of_adapters_are_close(config, precision, recompute, least, options):
    """The first block saves less, for no gradient enters it. A plan counts all blocks alike."""
    lora = Lora(4, **options)
    want = measured(config, precision, recompute, least, lora)
    got = saved(predicted(config, precision, recompute=recompute, lora=lora), least)
    assert want <= got <= 1.2 * want


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW8bit(), Muon()], ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "bf16-split", "fp32"])
def test_weights_and_moments_are_those_of_a_step(optimizer, precision):
    if isinstance(optimizer, Muon) and precision in ("bf16-pure", "bf16-split"):
        pytest.skip("refused by the recipe")
    step = TrainStep(Decoder(ADAPTED), "next_token", optimizer, precision=precision, graph="off")
    parts = memory(predicted(ADAPTED, precision, optimizer))
    step.close()
    assert {name: parts.get(name, 0) for name in step.memory} == step.memory


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base", [None, "nf4", "int8", "fp8"])
def test_frozen_weights_adapters_and_moments_are_those_of_a_step(base, tied):
    config, lora = replace(ADAPTED, tied=tied, qkv_bias=True, qk_norm=True), Lora(8, base=base, targets=("q_proj", "down_proj"))
    model = Decoder(config, dtype=torch.bfloat16)
    lora.add(model)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    scales = sum(buffer.nbytes for buffer in model.buffers())
    step = TrainStep(model, "next_token", precision="bf16", graph="off")
    parts = memory(predicted(config, lora=lora))
    step.close()
    assert (parts["frozen weights"], parts.get("scales of quantised weights", 0)) == (frozen, scales)
    assert {name: parts.get("adapters" if name == "weights" else name, 0) for name in step.memory} == step.memory


@pytest.mark.parametrize("name", ["gptq", "gptq-asymmetric", "gptq-act-order", "fp8-blocks", "nf4", "bnb-int8"])
def test_a_quantised_folder_is_counted_as_it_is_read(tmp_path, name):
    write(tmp_path, name)
    model, lora = load_hf(tmp_path, dtype=torch.bfloat16), Lora(8)
    numel = sum(p.numel() for p in outline(tmp_path).parameters())
    lora.add(model)
    held = sum(t.nbytes for t in model.parameters() if not t.requires_grad) + sum(t.nbytes for t in model.buffers())
    planned = step_of(Recipe(model=str(tmp_path), data=("x.jsonl",), seq=16, micro_batch=1, lora={"rank": 8}))
    parts = memory(planned)
    assert parts["frozen weights"] + parts.get("scales of quantised weights", 0) == held <= 2 * numel
    assert planned.adapters.published and planned.adapters.base.lower() in str(planned).lower()
    with pytest.raises(ValueError, match="do not train"):
        step_of(Recipe(model=str(tmp_path), data=("x.jsonl",), seq=16, micro_batch=1))


BASE = step_of(Recipe(model="350m", seq=1024, micro_batch=4, accumulate=64), 8)


def test_more_rows_take_more_memory_and_recomputing_and_sharding_take_less():
    def size(**changes) -> int:
        return total(replace(BASE, **changes))

    assert size(rows=2) < size(rows=4) < size(rows=8)
    assert size(recompute="blocks") < size(recompute="12") < size(recompute="cheap") < size(recompute="none")
    assert size(sharded=True) < size(sharded=True, world=2) < size(world=8)
    assert size() < size(average=True) and size(optimizer=AdamW8bit()) < size()


def test_offloaded_state_is_counted_in_host_memory():
    """And two buffers of a part on the GPU, here all of it. Few bytes between parameters are not counted."""
    optimizer, options = AdamW8bit(), {"precision": "bf16-split"}
    step = TrainStep(Decoder(PLAIN), "next_token", optimizer, **options, graph="off", offload_optimizer=True)
    planned = predicted(PLAIN, "bf16-split", optimizer, offload=True)
    found = memory(planned)
    assert in_host_memory(planned) == pytest.approx(sum(step.host_memory.values()), rel=1e-2)
    for part in ("weights", "gradient", "buffers of offloaded state"):
        assert found[part] == pytest.approx(step.memory[part], rel=2e-2), part
    assert not {"masters", "moments"} & (found.keys() | step.memory.keys())
    there, here = (seconds(replace(planned, offload=flag), GPUS["h200"]) for flag in (True, False))
    assert there["host link"] == pytest.approx(in_host_memory(planned) / LINK) and "host link" not in here


SHAPES = {
    "135m": (576, 1536, 30, 9, 3, 49152), "350m": (1024, 4096, 24, 16, 4, 32768), "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256), "8b": (4096, 14336, 32, 32, 8, 128256),
}  # fmt: skip


QLORA = {"lora": Lora(rank=16, base="nf4"), "recompute": "20"}
SMALL = {"optimizer": AdamW8bit(), "precision": "bf16-split", "in_backward": True, "recompute": "blocks"}


@pytest.mark.parametrize(
    ("shape", "rows", "seq", "options", "place", "make", "steps"),
    [
        ("135m", 1, 1024, {}, 0.42, 2.35, 3.30),
        ("350m", 16, 1024, {}, 1.0, 7.34, 17.41),
        ("350m", 4, 1024, SMALL | {"recompute": "cheap"}, 0.99, 2.70, 5.6),
        ("350m", 4, 1024, {"optimizer": AdamW8bit()}, 0.99, 4.94, 7.81),
        ("350m", 4, 1024, {"lora": Lora(rank=16)}, 0.99, 1.04, 4.06),
        ("350m", 4, 1024, {"lora": Lora(rank=16, base="nf4")}, 0.48, 0.54, 3.48),
        ("1b", 2, 2048, SMALL | {"recompute": "cheap"}, 2.95, 8.24, 13.13),
        ("1b", 8, 1024, {"lora": Lora(rank=16)}, 2.95, 2.59, 10.6),
        ("8b", 1, 4096, {"lora": Lora(rank=16)}, 16.24, 15.76, 29.3),
        ("8b", 1, 2048, {"lora": Lora(rank=16), "recompute": "20"}, 16.14, 15.76, 19.46),
        ("3b", 1, 1024, SMALL, None, 19.99, 20.92),
        ("8b", 1, 2048, SMALL | {"offload": True}, 16.14, 18.91, 19.48),
        ("8b", 1, 2048, SMALL | {"optimizer": AdamW(), "recompute": "cheap"}, None, 92.55, None),
        pytest.param("8b", 1, 2048, QLORA, 6.59, 6.11, 10.34, marks=pytest.mark.slow),  # it quantises a block
    ],
)
@pytest.mark.slow
def test_the_peaks_of_phases_are_those_measured_on_an_h200(shape, rows, seq, options, place, make, steps):
    """GiB of placed models in bf16: allocated, of steps reserved, by `gpubound bench memory`, `train` and `lora`."""
    model = Decoder(DecoderConfig(*SHAPES[shape], tied=shape in ("135m", "1b", "3b")), device=META)
    found = phases(outlined(model, **{"optimizer": AdamW(), "precision": "bf16", "seq": seq, "rows": rows} | options), stored=2)
    wanted = {"place": place, "make step": make, "first step": steps, "steps": steps}
    for phase, gib in wanted.items():
        assert gib is None or found[phase] == pytest.approx(gib * 2**30, rel=0.05), phase


RECIPES = sorted((Path(__file__).parents[2] / "examples" / "small_gpus").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_recipes_for_small_gpus_fit(file, tmp_path):
    """By the prediction for a model of the shape that the file's name has, with 2 % to spare."""
    options = from_file(str(file))
    shape = re.search(r"_(\d+b)_", file.stem)[1]
    save_config(tmp_path, DecoderConfig(*SHAPES[shape], tied=shape != "8b"))
    step = step_of(replace(options.recipe(), model=str(tmp_path), objective="next_token"))
    room = memory_size(options.memory) - CONTEXT
    assert max(phases(step, stored=2).values()) < 0.98 * room, {name: size / 2**30 for name, size in phases(step, 2).items()}


def save_config(folder: Path, config: DecoderConfig) -> None:
    """Write the config.json of a model, without weights."""
    (folder / "config.json").write_text(json.dumps(hf_config(config, torch.bfloat16)))


H200 = GPUS["h200"]


def test_proposals_keep_the_step_and_the_best_one_fits():
    recipe = Recipe(model="8b", vocabulary=128256, seq=4096, micro_batch=4, accumulate=512)
    for world in (1, 8):
        as_it_is, found = proposals(recipe, world, H200, H200.memory)
        assert all(p.step.tokens_per_step == recipe.tokens_per_step for p in [as_it_is, *found])
        best = found[0]
        if world == 1:
            assert not best.fits and all(p.bytes > H200.memory * (1 - FREE) for p in found)
        else:
            assert best.parallel == "fsdp" and best.fits and not as_it_is.fits
            assert all(p.tokens_per_s <= best.tokens_per_s / 0.98 for p in found if p.fits)


def test_a_model_that_fits_is_replicated_and_memory_decides_how_much_is_recomputed():
    recipe, small = Recipe(model="1b", vocabulary=128256, seq=2048, micro_batch=8, accumulate=64), 27 << 30
    _, found = proposals(recipe, 8, H200, H200.memory)
    assert found[0].parallel == "ddp" and found[0].step.recompute in ("none", "cheap")
    _, tight = proposals(recipe, 8, H200, small)
    some = [p for p in tight if p.step.recompute.isdecimal() and p.fits]
    assert some and all(p.bytes <= small * (1 - FREE) for p in some)
    assert total(replace(some[0].step, recompute=str(some[0].step.recomputed - 1))) > small * (1 - FREE)


def test_shards_sum_once_a_step_where_full_gradients_fit():
    recipe = Recipe(model="1b", vocabulary=128256, seq=2048, micro_batch=4, accumulate=64)
    _, found = proposals(recipe, 8, H200, H200.memory)
    several = [p for p in found if p.step.sharded and p.step.accumulate > 1]
    assert several and all(p.step.sum_once for p in several) and not any(p.step.sum_once for p in found if p not in several)
    for p in several:
        each = replace(p.step, sum_once=False)
        assert total(p.step) - total(each) == 4 * p.step.parameters
        before, after = ({call.what: call.times for call in collectives(step)} for step in (each, p.step))
        n, layers = p.step.accumulate, p.step.config.layers
        assert (before["gradient of a block"], after["gradient of a block"]) == (n * layers, layers)
        assert p.step_s < sum(seconds(each, H200).values())
        least = total(p.step)
        assert [summed_once(each, limit).sum_once for limit in (least - 1, least)] == [False, True]


def test_muon_is_not_sharded():
    recipe = Recipe(model="350m", seq=1024, micro_batch=4, accumulate=16, optimizer="muon")
    _, found = proposals(recipe, 8, H200, H200.memory)
    assert found and {p.parallel for p in found} == {"ddp"}


def test_no_proposal_is_beyond_what_train_takes():
    """A micro-batch of one row a step of 2^32 rows would have 2^32 of them."""
    recipe = Recipe(model="1m", seq=1, micro_batch=1 << 16, accumulate=MOST_ACCUMULATE)
    _, found = proposals(recipe, 1, H200, H200.memory)
    assert found and all(p.step.accumulate <= MOST_ACCUMULATE for p in found)
    for p in found:
        replace(recipe, micro_batch=p.step.rows, accumulate=p.step.accumulate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with the config of 8b and no weights."""
    path = tmp_path_factory.mktemp("8b")
    (path / "config.json").write_text(json.dumps(hf_config(PRESETS["8b"], torch.bfloat16)))
    return path


def adapted(folder, **lora) -> Recipe:
    return Recipe(model=str(folder), data=("texts",), lora={"rank": 16} | lora, seq=4096, micro_batch=2, accumulate=512)


@pytest.mark.slow
def test_a_base_that_fits_no_gpu_is_sharded_and_a_quantised_one_is_replicated(folder):
    size = 20 << 30
    _, full = proposals(adapted(folder), 8, H200, size)
    _, quantised = proposals(adapted(folder, base="nf4"), 8, H200, size)
    assert {p.parallel for p in full if p.fits} == {"fsdp"}
    assert {p.parallel for p in quantised if p.fits} == {"fsdp", "ddp"}
    assert all(p.step.tokens_per_step == 4096 * 1024 for p in full)


@pytest.mark.parametrize(
    ("lora", "facts"),
    [
        ({"dora": True}, ("lora", "dora")),
        ({"dropout": 0.1}, ("lora", "dropout")),
        ({"targets": ["q_proj", "embed_tokens"]}, ("targets", "blocks")),
        ({"targets": r".*\.[01]\.self_attn\.q_proj"}, ("targets", "blocks")),
        ({"targets": ["nose"]}, ("'nose'", "q_proj")),
    ],
)
def test_adapters_that_are_not_counted_are_refused(folder, lora, facts):
    said = refusal(ValueError, lambda: step_of(adapted(folder, **lora)))
    assert not [fact for fact in facts if fact not in said]
