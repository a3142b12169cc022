"""A base in fewer bits: the model computes what its numbers say, trains, is kept; what stays as it is, is said."""

import copy
import re
from collections import Counter

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound import trace
from gpubound.layers.quantized_base import Base
from gpubound.models import Decoder, DecoderConfig
from gpubound.models.llama.checkpoint import load_hf, save_hf
from tests.messages import message

from ..place.models import assert_close, assert_near, batch, place, rows, tiny, tokens, training_run
from .cases import adapted, placed, refusal
from .test_peft_layers import adapted as by_peft, losses_of_ours

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FORMATS = ["nf4", "int8", "fp8"]
ROUNDS = {"nf4": 0.6, "int8": 0.06, "fp8": 0.3}  # of a random model's logits: what came out on one machine, twice
formats = pytest.mark.parametrize("format", FORMATS)


def wide(**options):
    return tiny(**SIZES | options)


def in_numbers(model):
    """A copy whose weights are the numbers that the codes stand for, in plain torch."""
    other = copy.deepcopy(model)
    gb.lora.dequantize_base(other)
    assert not any(isinstance(module, Base) for module in other.modules())
    return other


def bases(model):
    return [key.removesuffix(".base") for key, module in model.named_modules() if isinstance(module, Base)]


@formats
def test_the_numbers_are_near_the_weights(format):
    model = wide()
    want = model(tokens()).logits
    before = {key: p.clone() for key, p in model.named_parameters()}
    layers = gb.lora.quantize_base(model, format)
    assert len(layers) == 14 and bases(model) == layers, "all but the head"
    got = model(tokens()).logits
    assert 1e-4 < (got - want).norm() / want.norm() < ROUNDS[format]
    after = dict(in_numbers(model).named_parameters())
    for key, p in before.items():
        limit = {"nf4": 0.12, "int8": 0.01, "fp8": 0.03}[format] if key.removesuffix(".weight") in layers else 0
        assert (after[key] - p).norm() <= limit * p.norm()


@pytest.mark.parametrize("order", ["plain", "placed", "adapters first", "placed last"])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_loss_and_gradients_are_those_of_the_numbers(format, order):
    """fp8 rounds x and g too: tests/layers/test_quantized_base.py holds it to its formula."""
    model = placed(**SIZES) if order == "placed" else wide()
    if order == "adapters first":
        adapted(model)
        gb.lora.quantize_base(model, format)
    else:
        adapted(model, base=format)
    assert len(bases(model)) == 14
    plain = in_numbers(model)
    if order == "placed last":
        place(model, strict=True)
    assert_close(training_run(model, batch()), training_run(plain, batch()))
    assert_near(model.eval()(tokens()).logits, plain.eval()(tokens()).logits)


@pytest.mark.parametrize("format, dtype", [("nf4", torch.float32), ("int8", torch.bfloat16), ("fp8", torch.bfloat16)], ids=str)
def test_placed_afterwards(format, dtype):
    """Verified by the numbers; from then on fp8's products are in 8 bits, q, k and v over one scale a token."""
    model = adapted(wide(dtype=dtype), base=format)
    want = model(tokens()).logits
    found = rows(place(model, strict=True))
    assert found["model.layers.0.self_attn"].kernel.startswith("q, k, v as one product")
    assert found["model.layers.0.mlp"].kernel.startswith("gate and up as one product")
    got = model(tokens()).logits
    limit = 0.15 if format == "fp8" else 1e-5 if dtype == torch.float32 else 0.05
    assert (got - want).norm() <= limit * want.norm()


def test_fp8_trains_near_the_numbers():
    """Gradients are off by what rounding x and g takes, a few percent a product, and are right on the whole."""
    model = adapted(placed(**SIZES), base="fp8")
    got, want = training_run(model, batch()), training_run(in_numbers(model), batch())
    assert got.keys() == want.keys()
    ours, theirs = (torch.cat([run[name].flatten() for name in want]) for run in (got, want))
    assert (ours - theirs).norm() < 0.3 * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nf4", "fp8"])
def test_captured_is_eager_bit_for_bit(format):
    found = []
    for graph in ("off", "require"):
        model = adapted(placed(**SIZES), base=format)
        frozen = {key: p.clone() for key, p in model.state_dict().items() if ".lora_" not in key}
        losses = losses_of_ours(model.train(), 4, graph=graph)
        found.append((losses, [p.detach().clone() for p in gb.lora.parameters(model)]))
        assert all(torch.equal(p, frozen[key]) for key, p in model.state_dict().items() if ".lora_" not in key)
        assert losses[-1] < losses[0]
    (eager, ours), (captured, theirs) = found
    assert eager == captured and all(map(torch.equal, ours, theirs))


@formats
def test_in_bf16(format):
    """The numbers are near bf16's own rounding of the model, and adapters train there."""
    model = adapted(placed(**SIZES, dtype=torch.bfloat16), base=format)
    got, want = model(tokens()).logits.float(), in_numbers(model).float()(tokens()).logits
    assert (got - want).norm() < (0.15 if format == "fp8" else 0.05) * want.norm()
    step = gb.TrainStep(model.train(), "causal_lm", gb.AdamW(lr=1e-2), precision="bf16", graph="off")
    losses = [step(batch()).read().loss for _ in range(4)]
    assert losses[-1] < losses[0]


@formats
def test_adapters_of_pefts_on_top(format):
    model = wide()
    gb.lora.quantize_base(model, format)
    model = by_peft(model)
    plain = in_numbers(model)
    if format == "fp8":
        got, want = model(tokens()).logits, plain(tokens()).logits
        assert (got - want).norm() < 0.15 * want.norm()
    else:
        assert_close(training_run(model, batch()), training_run(plain, batch()))


def test_below_adapters_of_pefts():
    model = by_peft(wide())
    layers = gb.lora.quantize_base(model, "nf4")
    assert len(layers) == 14 and not any("lora_" in key for key in layers), "not the adapters' halves"
    assert_close(training_run(model, batch()), training_run(in_numbers(model), batch()))


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_adapters_are_kept_as_over_any_base(format, tmp_path):
    model = adapted(wide(), base=format)
    want = model(tokens()).logits
    gb.lora.save(model, tmp_path)
    other = wide()
    gb.lora.quantize_base(other, format)
    gb.lora.load(other, tmp_path)
    assert torch.equal(other(tokens()).logits, want)


@formats
def test_a_state_dict_has_the_codes(format):
    model, other = wide(), wide()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    for one in (model, other):
        gb.lora.quantize_base(one, format)
    want = model(tokens()).logits
    assert not torch.equal(other(tokens()).logits, want)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()).logits, want)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(wide().state_dict())
    assert torch.equal(copy.deepcopy(other)(tokens()).logits, want)


@formats
def test_switched_off_the_base_is_left(format):
    model = adapted(wide(), base=format)
    with gb.lora.disable(model):
        off = model(tokens()).logits
    assert not torch.equal(model(tokens()).logits, off)
    gb.lora.remove(model)
    torch.testing.assert_close(model(tokens()).logits, off)
    assert len(bases(model)) == 14


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_several_in_one_batch(format):
    model = adapted(placed(**SIZES), base=format)
    adapted(model, seed=5, name="second")
    plain = in_numbers(model)
    for one in (model, plain):
        one.eval()
    want = []
    for name in ("second", "default"):
        with gb.lora.disable(plain):
            gb.lora.enable(plain, name)
            want.append(plain(tokens()).logits)
    with gb.lora.rows(model, ["default", "second"]):
        got = model(tokens(), adapter_ids=torch.tensor([1, 0])).logits
    assert_near(got, torch.stack([want[0][0], want[1][1]]))


def test_weights_as_numbers_again_may_be_merged_into():
    model = adapted(placed(**SIZES), base="nf4")
    want = model(tokens()).logits
    assert refusal(lambda: gb.lora.merge(model)) == message("lora/base:weights_as_numbers_again")
    gb.lora.dequantize_base(model)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert_near(model(tokens()).logits, want)
    gb.lora.merge(model)
    assert_near(model(tokens()).logits, want)


def test_placed_weights_that_were_joined_are_let_go():
    """What multiplies q, k and v as one holds all three; were it not told, it would hold them until its next call."""
    model = placed(**SIZES)
    model(tokens())
    stacks = [m.stacked for m in model.modules() if hasattr(m, "stacked")]
    assert any(stack._weight is not None for stack in stacks)
    gb.lora.quantize_base(model, "int8")
    assert not any(stack._weight is not None for stack in stacks)
    model(tokens())
    assert all(stack._weight.dtype == torch.int32 for stack in stacks) and not any(stack.fallbacks for stack in stacks)


@pytest.mark.parametrize("order", ["plain", "placed"])
def test_a_weight_goes_before_the_next_one_is_rounded(order, monkeypatch):
    """Weights that are joined go together, once the last of them is rounded."""
    model = placed(**SIZES) if order == "placed" else wide()
    model(tokens())
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]
    before, gone = [layer.weight.untyped_storage()._weak_ref() for layer in layers], []

    def counting(base, layer, kind, begin=Base.__init__):
        gone.append(sum(map(torch.UntypedStorage._expired, before)))
        begin(base, layer, kind)

    monkeypatch.setattr(Base, "__init__", counting)
    gb.lora.quantize_base(model, "nf4")
    assert all(map(torch.UntypedStorage._expired, before))
    joined = [0, 0, 0, 3, 4, 4, 6]  # q, k, v; o; gate, up; down
    one = list(range(7)) if order == "plain" else joined
    assert gone == [*one, *(7 + n for n in one)]
    for reference in before:
        torch.UntypedStorage._free_weak_ref(reference)


def test_what_stays_as_it_is_is_said(fallbacks, capsys):
    model = tiny("llama tied", hidden_size=64, intermediate_size=72, head_dim=16)
    assert len(gb.lora.quantize_base(model, "nf4")) == 12
    assert message("lora/base:what_stays_as_it_is_is_s").within(capsys.readouterr().err)
    assert fallbacks() == {
        ("lora.quantize_base", f"model.layers.{n}.mlp.down_proj has 72 columns, no multiple of 64, so it is not quantised"): 1
        for n in (0, 1)
    }
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_shared_weight_and_one_that_trains_stay(fallbacks):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    assert gb.lora.quantize_base(model, "int8") == ["2"]
    assert set(fallbacks()) == {
        ("lora.quantize_base", "0 shares its weight with another module, so it is not quantised"),
        ("lora.quantize_base", "1 shares its weight with another module, so it is not quantised"),
        ("lora.quantize_base", "3 trains, as other layers do not, so it is not quantised"),
    }


@pytest.mark.slow
def test_a_decoder_runs_the_models_own_forward():
    model = adapted(placed(**SIZES), base="nf4").eval()
    decoder = gb.decoder(model, max_batch=2, max_length=32)
    plain = in_numbers(model).eval()
    ids = tokens(rows=2, length=8)
    want = plain.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(torch.tensor(decoder.generate(ids, max_new_tokens=4).tokens), want[:, 8:].cpu())


def test_refused_in_words():
    model = adapted(wide())
    assert refusal(lambda: gb.lora.quantize_base(model, "int4")) == message("lora/base:refused_in_words")
    assert refusal(lambda: gb.lora.add(model, 4, name="second", base="int4")) == message("lora/base:refused_in_words.2")
    assert refusal(lambda: gb.lora.quantize_base(model, ["nf4"])) == message("lora/base:refused_in_words.3")
    gb.lora.merge(model)
    assert refusal(lambda: gb.lora.quantize_base(model, "nf4")) == message("lora/base:refused_in_words.4")
    gb.lora.unmerge(model)
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-3), precision="fp32", graph="off")
    for call in (lambda: gb.lora.quantize_base(model, "nf4"), lambda: gb.lora.dequantize_base(model)):
        assert refusal(call).endswith(": the model is in a TrainStep, whose graphs hold its weights; close that first.")
    step.close()
    gb.lora.quantize_base(model, "nf4")
    assert gb.lora.quantize_base(model, "nf4") == [], "they are in it"
    assert refusal(lambda: gb.lora.quantize_base(model, "fp8")) == message("lora/base:refused_in_words.5")


@pytest.fixture
def fallbacks(monkeypatch):
    found = Counter()
    monkeypatch.setattr(trace, "fallbacks", found)
    monkeypatch.setattr(trace, "_printed", set())
    return lambda: dict(found)


def test_a_models_own_files_have_no_codes(tmp_path):
    model = Decoder(DecoderConfig(vocabulary=50, hidden=64, layers=1, heads=4, kv_heads=2, intermediate=128))
    gb.lora.quantize_base(model, "nf4")
    sentence = refusal(lambda: save_hf(model, tmp_path))
    said = r"is in nf4, which a model's own files cannot store; call gb.lora.dequantize_base first\."
    assert re.fullmatch(rf"lora: the weight of model\.\S+ {said}", sentence), sentence
    gb.lora.dequantize_base(model)
    save_hf(model, tmp_path)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(load_hf(tmp_path)(ids), model(ids))


def test_modules_of_bitsandbytes_are_told_from_ours(fallbacks):
    bnb = pytest.importorskip("bitsandbytes")
    model = wide()
    model.model.layers[0].mlp.down_proj = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4")
    model.model.layers[1].mlp.down_proj = bnb.nn.Linear8bitLt(128, 64, bias=False)
    kinds = [
        f"model.layers.{i}.mlp.down_proj is a bitsandbytes.{kind}, not an"
        for i, kind in enumerate(("Linear4bit", "Linear8bitLt"))
    ]
    assert kinds[0] in refusal(lambda: gb.lora.add(model, 4, targets=["down_proj"]))
    assert len(gb.lora.add(model, 4, base="int8")) == 12
    for kind in kinds:
        for what, end in (("lora.add: all-linear", "so it gets no adapter"), ("lora.quantize_base", "so it is not quantised")):
            assert [why for where, why in fallbacks() if where == what and why.startswith(kind) and why.endswith(end)]
