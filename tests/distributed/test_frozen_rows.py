"""Low-rank adapters that are whole on every rank, over a frozen model of which each has its rows: the steps of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

import gpubound as gb
from gpubound.distributed import ALONE, join
from gpubound.distributed.fsdp import shard, shard_deferred
from gpubound.errors import GraphError
from gpubound.kernels.accumulate import seen
from gpubound.lora.base import FORMATS, encode
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.place import place
from gpubound.train.adamw import AdamW8bit, Muon
from gpubound.train.offload import blocks_of
from tests.distributed.processes import each_on_ranks, on_ranks
from tests.distributed.test_fsdp import ADAMW, DTYPES, STEPS, WORDS, batch, counted_sums, distance, whole
from tests.messages import message, same_texts

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
FIRST = "model.layers.0.self_attn.q_proj"
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
RANKS = {"num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False}


def ours(seed, **how):
    """64 columns, which every format of codes takes."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(64, 128, 2, 4, 2, WORDS))
    gb.lora.add(model, **{"rank": 4, "alpha": 8, "init": False} | how)
    return model


def theirs(seed, placed=False, **how):
    """transformers' own, as it is or placed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | RANKS)).train()
    if placed:
        place(model, "cpu")
    gb.lora.add(model, **{"rank": 4, "alpha": 8, "init": False} | how)
    return model


def experts(seed):
    torch.manual_seed(seed)
    config = MixtralConfig(**SIZES | RANKS, num_local_experts=3, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).train()
    gb.lora.add(model, rank=2, targets=["gate_up_proj", "down_proj", "q_proj"], init=False)
    return model


def of_peft(seed, placed=False):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | RANKS)).train()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    if placed:
        place(model, "cpu")
    return model


def later(seed):
    """Adapters that are added to rows: `trained` makes the same model in both ways."""
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(64, 128, 2, 4, 2, WORDS))


def trained(
    world, each, make=ours, optimizer=ADAMW, precision="fp32", objective="next_token", added=None, codes=None, **options
):
    """Three steps of `world` ranks: what trains, the reports, the state, and what a rank holds and sums.

    added  options of gb.lora.add, behind the sharding of a frozen model that is read from another one's tensors
    codes  the format that its blocks are put into before
    """
    with counted_sums() as sums, join("cpu") if world > 1 else nullcontext(ALONE) as ranks:
        model, dtype = make(ranks.rank), DTYPES[precision]
        if world > 1 and added is not None:
            model = read(make(0).state_dict(), make, ranks, dtype, codes)
        elif world > 1:
            shard(model, blocks_of(model), ranks, dtype)
        elif codes is not None:
            gb.lora.quantize_base(model, codes)
        if added is not None:
            torch.manual_seed(7 + ranks.rank)
            gb.lora.add(model, **added)
        if world == 1:
            for p in model.parameters():
                if not p.requires_grad and p.is_floating_point():
                    p.data = p.data.to(dtype)
        step = gb.TrainStep(
            model, objective, optimizer, accumulate=each, clip=0.5, precision=precision, graph="off", ranks=ranks, **options
        )
        reports = []
        for number in range(STEPS):
            said = step([batch(number, ranks.rank + world * i) for i in range(each)]).read()
            reports.append((said.loss, said.grad_norm, said.tokens, said.skipped))
        state = {name: whole(tensor) for name, tensor in step.state_dict().items()}
        step.assert_alike()
        step.close()
        held = sum(p.to_local().nbytes for p in model.parameters() if hasattr(p, "to_local"))
        left = [seen(p).untyped_storage().nbytes() for p in model.parameters() if hasattr(p, "to_local")]
        weights = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
        return weights, reports, state, {"sums": sum(sums), "frozen": held, "left": sum(left)}


def read(stored, make, ranks, dtype, codes):
    """The frozen model, made without weights, each rank's rows taken from `stored`."""

    def fill(pieces):
        for name, piece in pieces.items():
            if name in stored:
                piece.local.copy_(stored[name][piece.slices])

    def bare(device):
        with device:
            return make(0)

    encodes = codes and (lambda block: encode(block, FORMATS[codes]))
    return shard_deferred(bare, blocks_of, ranks, dtype, fill=fill, frozen=True, encode=encodes)


CAUSAL = {"objective": "causal_lm"}
WAYS: dict[str, dict] = {
    "ours": {},
    "DoRA": {"make": partial(ours, dora=True)},
    "a table": {"make": partial(ours, targets=["q_proj", "down_proj", "embed_tokens"])},
    "a head": {"make": partial(theirs, targets=["v_proj", "lm_head"])} | CAUSAL,
    "nf4": {"make": partial(ours, base="nf4")},
    "int8": {"make": partial(ours, base="int8")},
    "fp8": {"make": partial(ours, base="fp8")},
    "recomputed": {"recompute": "blocks"},
    "8 bits": {"optimizer": AdamW8bit(1e-2, eps=1e-4)},
    "muon": {"optimizer": Muon(1e-2)},
    "transformers": {"make": theirs} | CAUSAL,
    "placed": {"make": partial(theirs, placed=True)} | CAUSAL,
    "experts": {"make": experts} | CAUSAL,
    "PEFT": {"make": of_peft} | CAUSAL,
    "PEFT, placed": {"make": partial(of_peft, placed=True)} | CAUSAL,
    "added to rows": {"make": later, "added": {"rank": 4, "init": False}},
    "added to rows of codes": {"make": later, "added": {"rank": 4, "init": False}, "codes": "int8"},
}


IN_16_BITS = [("ours", "bf16"), ("ours", "fp16"), ("nf4", "bf16"), ("placed", "bf16"), ("placed", "fp16")]
ROUNDED = {"fp8": 0.25, "8 bits": 1e-3, "muon": 3e-2}
"""How far two right runs may part, beside how far adapters move: where a last bit may end in another code.

Measured on a CPU: fp8 2e-2, 16 bits 7e-2, 8-bit moments 5e-5, all others at most 6e-6. Muon 5e-3 where its iterations are in
bf16, and 3e-6 where they are in fp32.
"""


def held_to_one_process(alone, ranks, began, off=1e-4):
    weights, reports, state, _ = alone
    moved = distance(weights, began) if began else 1.0
    for their_weights, said, their_state, held in ranks:
        for (loss, norm, *counts), (their_loss, their_norm, *their_counts) in zip(reports, said):
            assert their_loss == pytest.approx(loss, rel=off / 10)
            assert their_norm == pytest.approx(norm, rel=off)
            assert their_counts == counts
        assert distance(weights, their_weights) < off * moved
        assert state.keys() == their_state.keys()
        nothing_of_the_base(held)


def held_at_first(alone, ranks):
    """Weights are equal in the first step alone. Behind it gradients of a model 32 wide in bf16 are mostly rounding: one
    process had norms of 1.3 in one run and 1.7 in another, where fp32 has 0.6.
    """
    _, reports, state, _ = alone
    for _, said, their_state, held in ranks:
        assert said[0][:2] == pytest.approx(reports[0][:2], rel=0.05)
        for (loss, _, *counts), (their_loss, _, *their_counts) in zip(reports, said, strict=True):
            assert their_loss == pytest.approx(loss, rel=0.025)
            assert their_counts == counts
        assert state.keys() == their_state.keys()
        nothing_of_the_base(held)


def nothing_of_the_base(held):
    assert held["sums"] == 0, "no gradient of the base is made"
    assert held["left"] == 0, "what was gathered is given back"


def beginning(way):
    """What trains, before it has: None where `trained` adds it."""
    if "added" in way:
        return None
    return {name: whole(p) for name, p in way.get("make", ours)(0).named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def two_ranks():
    """What two ranks have of all ways, in 16 bits too, and in the other tests of two."""
    works: dict[str, Callable] = {name: partial(trained, 2, 1, **way) for name, way in WAYS.items()}
    for name, precision in IN_16_BITS:
        works[f"{name} in {precision}"] = partial(trained, 2, 1, **WAYS[name], precision=precision)
    for own in (True, False):
        works |= {f"stepped past {own}": partial(stepped_past, own), f"by hand {own}": partial(by_hand, own)}
    return each_on_ranks(2, works | {"outside": outside, "refusals": refusals, "seeds": seeds})


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_with_rows_of_the_base_are_one_process(name, two_ranks):
    way = WAYS[name]
    held_to_one_process(trained(1, 2, **way), two_ranks[name], beginning(way), ROUNDED.get(name, 1e-4))


@pytest.mark.parametrize(("name", "precision"), IN_16_BITS)
def test_in_16_bits(name, precision, two_ranks):
    """Frozen rows take 2 bytes a number, over all ranks."""
    way = WAYS[name] | {"precision": precision}
    ranks, alone = two_ranks[f"{name} in {precision}"], trained(1, 2, **way)
    if (name, precision) == ("placed", "bf16"):
        held_at_first(alone, ranks)
    else:
        held_to_one_process(alone, ranks, beginning(way), 0.25)
    if name == "ours":
        frozen = sum(p.numel() for p in ours(0).parameters() if not p.requires_grad)
        assert sum(held["frozen"] for *_, held in ranks) == 2 * frozen


@pytest.mark.parametrize("world, each", [(4, 1), (2, 3)])
def test_ranks_in_other_numbers_and_several_micro_batches(world, each):
    """Of 4 ranks the last has fewer rows of the table, and all sum their adapters once a step."""
    ranks = on_ranks(world, trained, world, each)
    held_to_one_process(trained(1, world * each), ranks, beginning({}))


def stepped_past(own):
    """Why a placed model's loop was left to transformers, in two steps of its TrainStep and in a call behind them."""
    with join("cpu") as ranks:
        model = theirs(0, placed=True)
        if own:
            shard(model, blocks_of(model), ranks, torch.float32)
        else:
            for unit in (*blocks_of(model), model):
                fully_shard(
                    unit,
                    ignored_params=set(gb.lora.parameters(model)),
                    mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
                )
        step = gb.TrainStep(model, "causal_lm", ADAMW, clip=0.5, precision="fp32", graph="off", ranks=ranks)
        reasons, found = model.model.delegated, []
        for call in (*(partial(step, [batch(number, ranks.rank)]) for number in range(2)), step.close):
            reasons.clear()
            call()
            found.append(dict(reasons))
        model(**batch(0, ranks.rank))
        return [*found, dict(reasons)]


@pytest.mark.parametrize("own", [True, False], ids=["shard", "fully_shard"])
def test_a_placed_loop_gathers_its_blocks_itself(own, two_ranks):
    """As modules, with FSDP's hooks, they would be called by transformers' loop: each add apart from its norm, and a mask that
    reads the device in each micro-batch. Behind the step of a script's own fully_shard it is that loop again."""
    hooks = {} if own else {"hooks on a layer": 1}
    assert two_ranks[f"stepped past {own}"] == [[{}, {}, {}, hooks]] * 2


def outside():
    """(what a model said whole, in rows, switched off, on again, and after its state was read back; of one rank)."""
    with join("cpu") as ranks:
        model, ids = ours(0), batch(0, 0)["input_ids"]
        wanted = [model(ids).detach()]
        with gb.lora.disable(model):
            wanted.append(model(ids).detach())
        shard(model, blocks_of(model), ranks, torch.float32)
        found = [model(ids).detach()]
        with gb.lora.disable(model):
            found.append(model(ids).detach())
        found.append(model(ids).detach())
        gb.lora.disable(model)
        gb.lora.enable(model)
        model.load_state_dict(model.state_dict())
        found.append(model(ids).detach())
        return [whole(t) for t in wanted], [whole(t) for t in found]


def test_adapters_over_rows_add_wherever_the_model_runs(two_ranks):
    for (on, off), found in two_ranks["outside"]:
        assert abs(on - off).max() > 0.01
        for got, wanted in zip(found, (on, off, on, on), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)


def by_hand(spare):
    """A user's own fully_shard: what TrainStep says of it, and its losses."""
    with join("cpu") as ranks:
        model = ours(0)
        ignored = set(gb.lora.parameters(model)) if spare else set()
        for part in (*blocks_of(model), model):
            fully_shard(part, ignored_params=ignored, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        try:
            step = gb.TrainStep(model, "next_token", ADAMW, accumulate=1, clip=0.5, precision="fp32", graph="off")
        except ValueError as error:
            return str(error)
        losses = [step([batch(number, ranks.rank)]).read().loss for number in range(STEPS)]
        step.close()
        return losses


def test_a_users_own_fully_shard(two_ranks):
    _, reports, _, _ = trained(1, 2)
    for losses in two_ranks["by hand True"]:
        assert losses == pytest.approx([loss for loss, *_ in reports], rel=1e-5)
    for said in two_ranks["by hand False"]:
        assert said == message("parallel/frozen_rows:a_users_own_fully_shard")


def refusals():
    """What is said of what cannot be done to rows, by name."""
    said = {}

    def tried(name, work):
        try:
            work()
        except (ValueError, GraphError) as error:
            said[name] = str(error)

    with join("cpu") as ranks:
        model = ours(0)
        tried("encode", lambda: shard_deferred(lambda device: later(0), blocks_of, ranks, encode=print))
        shard(model, blocks_of(model), ranks, torch.float32)
        tried("merge", lambda: gb.lora.merge(model))
        tried("codes", lambda: gb.lora.quantize_base(model, "nf4"))
        tried("codes of new ones", lambda: gb.lora.add(model, rank=2, name="other", base="nf4"))
        tried("decoding", lambda: gb.decoder(model, 1, 32))
        step = partial(gb.TrainStep, model, "next_token", ADAMW, precision="fp32")
        tried("overlap", lambda: step(overlap=True))
        tried("graph", lambda: step(graph="require"))
        tried("fp8", lambda: step(precision="fp8"))
        tried("dtype", lambda: step(precision="bf16"))
        plain = later(0)
        for part in (*blocks_of(plain), plain):
            fully_shard(part)
        tried("too late", lambda: gb.lora.add(plain, rank=2))
        said["names"] = sorted(name for name, _ in model.named_parameters() if ".other." in name)
    return said


def test_what_cannot_be_done_to_rows_is_refused_and_nothing_is_changed(two_ranks):
    for said in two_ranks["refusals"]:
        assert said.pop("names") == [] and len(said) == 10
        same_texts("parallel/frozen_rows:what_cannot_be_done", said.values(), FIRST)


def seeds():
    """What this rank draws from behind TrainStep, of rows of everything and of frozen ones, where all ranks had one seed."""
    with join("cpu") as ranks:
        found = []
        for make in (later, ours):
            model = make(3)
            shard(model, blocks_of(model), ranks, torch.float32)
            torch.manual_seed(3)
            gb.TrainStep(model, "next_token", ADAMW, precision="fp32", graph="off").close()
            found.append(torch.initial_seed())
        return found


def test_ranks_do_not_drop_out_the_same_elements(two_ranks):
    assert two_ranks["seeds"] == [[3, 3], [4, 4]]
