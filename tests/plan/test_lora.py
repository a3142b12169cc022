"""What a plan says that a step of adapters holds is what its objects hold: weights, codes, adapters, sums and moments."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.lora_train import CASES as MEASURED
from benchmarks.lora_worker import RANK
from benchmarks.shapes import SHAPES
from gpubound.models.llama.decoder import PRESETS, Decoder, DecoderConfig
from gpubound.models.llama.weights import hf_config
from gpubound.plan.cards import CARDS, GIGA, Network
from gpubound.plan.cases import LORA_CASES, RANK as PLANNED_RANK, lora_setting_of_case
from gpubound.plan.lora import LoraSetting, adapted
from gpubound.plan.memory import held, memory
from gpubound.plan.pace import pace
from gpubound.plan.propose import FREE, proposals
from gpubound.plan.reading import META, outlined, setting_of
from gpubound.plan.setting import Setting
from gpubound.train import AdamW, AdamW8bit, TrainStep
from gpubound.train.adapters import Lora
from gpubound.train.precision import precision as precision_named
from gpubound.train.recipe import Recipe

CONFIG = DecoderConfig(64, 128, 2, 4, 2, 256)
H200, NODE = CARDS["h200"], Network()
EIGHT_B = lora_setting_of_case("8b", 4096, 1, None)


def setting(lora: Lora, precision: str = "bf16", optimizer: AdamW | None = None, config: DecoderConfig = CONFIG) -> LoraSetting:
    model = Decoder(config, device=META)
    return adapted(Setting(outlined(model), optimizer or AdamW(), precision, 16, 1, 1), lora, model)


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW8bit()], ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp32"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_adapters_sums_and_moments_are_those_of_a_step(optimizer, precision, targets):
    model, lora = Decoder(CONFIG, dtype=precision_named(precision).dtype), Lora(8, targets=targets)
    lora.add(model)
    step = TrainStep(model, "next_token", optimizer, precision=precision, graph="off")
    predicted = held(setting(lora, precision, optimizer))
    step.close()
    assert {name: predicted["adapters" if name == "weights" else name] for name in step.memory} == step.memory


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base", [None, "nf4", "int8", "fp8"])
def test_frozen_weights_and_codes_are_those_of_a_model(base, tied):
    config = replace(CONFIG, tied=tied, qkv_bias=True, qk_norm=True)
    model, lora = Decoder(config, dtype=torch.bfloat16), Lora(8, base=base)
    lora.add(model)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    read_by = sum(buffer.nbytes for buffer in model.buffers())
    predicted = held(setting(lora, config=config))
    assert (predicted["frozen weights"], predicted["what codes are read by"]) == (frozen, read_by)


def gib(**changes) -> int:
    return sum(memory(replace(EIGHT_B, **changes)).values())


def seconds(network: Network = NODE, **changes) -> float:
    return sum(pace(replace(EIGHT_B, **changes), H200, network).values())


def test_fewer_bits_and_shards_and_recomputing_take_less_memory():
    of = {base: sum(memory(lora_setting_of_case("8b", 4096, 1, base)).values()) for base in (None, "int8", "fp8", "nf4")}
    assert of["nf4"] < of["fp8"] < of["int8"] < of[None]
    assert gib(recompute="blocks") < gib(recompute="16") < gib(recompute="cheap") < gib(recompute="none")
    assert gib(sharded=True, world=64) < gib(sharded=True, world=8) < gib(world=8)


def test_frozen_steps_are_faster_than_those_that_train_all():
    whole = Setting(EIGHT_B.outline, AdamW(), "bf16", EIGHT_B.seq, EIGHT_B.rows, 1)
    products = [pace(one, H200, Network())["matrix products"] for one in (whole, EIGHT_B)]
    assert products[0] / products[1] == pytest.approx(6 / 4, rel=0.04)  # a product that adds is a little slower
    assert EIGHT_B.flops_per_token < whole.flops_per_token
    assert seconds(recompute="none") < seconds() < seconds(recompute="blocks")
    assert seconds(world=8) < seconds(Network(nvlink=GIGA / 10), world=8)


def test_a_large_rank_is_bound_by_its_operations():
    """Rank 16 costs what its passes over memory cost, however few its ranks are; rank 1,024 far more."""
    small, half, large = (pace(setting_with(rank), H200, Network())["adapters"] for rank in (16, 8, 1024))
    assert small == half and large > 3 * small


def setting_with(rank: int) -> LoraSetting:
    projections = {name: replace(p, rank=rank) for name, p in EIGHT_B.projections.items()}
    return replace(EIGHT_B, projections=projections)


def test_a_checked_case_is_the_one_that_the_benchmark_measures():
    assert RANK == PLANNED_RANK
    for name, asked in LORA_CASES.items():
        case, found = MEASURED[name], lora_setting_of_case(*asked)
        shape, c = SHAPES[case.shape], found.config
        assert (case.seq, case.micro, case.accumulate, case.recompute) == (
            found.seq, found.rows, found.accumulate, found.recompute,
        )  # fmt: skip
        assert case.ours == ("ours" if found.base is None else f"ours-{found.base}")
        assert (c.hidden, c.intermediate, c.layers, c.heads, c.kv_heads, c.vocabulary, c.tied) == (
            shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.vocab, shape.tied,
        )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with the config of 8b and no weights."""
    path = tmp_path_factory.mktemp("8b")
    (path / "config.json").write_text(json.dumps(hf_config(PRESETS["8b"], torch.bfloat16)))
    return path


def recipe(folder, lora: dict, **options) -> Recipe:
    options = {"seq": 4096, "micro_batch": 2, "accumulate": 512, "optimizer": "adamw"} | options
    return Recipe(model=str(folder), lora={"rank": 16} | lora, **options)


@pytest.mark.parametrize("world", [1, 8, 1024])
def test_proposals_keep_the_step_and_the_best_one_fits_in_any_world(folder, world):
    of_all = recipe(folder, {})
    as_it_is, found = proposals(of_all, world, H200, Network(), H200.memory)
    assert isinstance(as_it_is.setting, LoraSetting) and "adapters of rank 16" in str(as_it_is.setting)
    assert all(p.setting.tokens_per_step == of_all.tokens_per_step for p in found)
    assert found[0].fits and found[0].sharing == ("" if world == 1 else "ddp")
    assert {p.sharing for p in found} == ({""} if world == 1 else {"ddp", "fsdp"})


def test_a_base_that_fits_no_gpu_is_sharded_and_one_in_codes_fits_whole(folder):
    total = 20 << 30
    _, wide = proposals(recipe(folder, {}), 8, H200, Network(), total)
    _, narrow = proposals(recipe(folder, {"base": "nf4"}), 8, H200, Network(), total)
    assert {p.sharing for p in wide if p.fits} == {"fsdp"}
    assert {p.sharing for p in narrow if p.fits} == {"fsdp", "ddp"}
    assert all(p.bytes <= total * (1 - FREE) for p in [*wide, *narrow] if p.fits)


def test_products_with_adapters_cost_the_host_where_they_are_not_captured(folder):
    step = setting_of(recipe(folder, {}, seq=512, micro_batch=1, accumulate=1))
    captured, eager = (pace(replace(step, captured=on), H200, Network()) for on in (True, False))
    assert captured["launches"] < 0.01 and sum(eager.values()) >= 32 * 4 * 1.3e-3


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"dora": True}, "plan: lora: got dora, wanted plain adapters, whose kept bytes are counted; leave dora out to plan."),
        ({"dropout": 0.1}, "plan: lora: got dropout, wanted none: its cost is not counted; leave dropout out to plan."),
        (
            {"targets": ["q_proj", "embed_tokens"]},
            "plan: lora: targets: wanted linear layers of blocks, the same in each, because one block is counted and "
            "multiplied; name them by the ends of their names, such as q_proj.",
        ),
        (
            {"targets": r".*\.[01]\.self_attn\.q_proj"},
            "plan: lora: targets: wanted linear layers of blocks, the same in each, because one block is counted and "
            "multiplied; name them by the ends of their names, such as q_proj.",
        ),
        (
            {"targets": ["nose"]},
            "lora.add: no layer of Decoder is named 'nose'; those that can be adapted end in down_proj, embed_tokens, "
            "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj.",
        ),
    ],
)
def test_what_is_not_counted_is_refused_in_a_sentence(folder, lora, sentence):
    with pytest.raises(ValueError) as caught:
        setting_of(recipe(folder, lora))
    assert str(caught.value) == sentence
