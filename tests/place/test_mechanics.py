"""What placing leaves alone: names, identity, files, copies, classes, hooks. And what it refuses, by name."""

import copy
import inspect
import io
import pickle

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import gpubound as gb
from gpubound import trace
from gpubound.errors import FallbackError, PlaceError
from gpubound.layers import run_blocks
from gpubound.place import core, hf_parts, verify
from gpubound.place.swap import Fused

from .models import assert_close, batch, tiny, tokens, training_run, twin


def place(model, device="cpu", **options):
    return gb.place(model, device, **options)


def rows(placement):
    return {row.module: row for row in placement.rows}


def test_names_identity_and_ties_stay():
    model = tiny("llama tied")
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    values = {k: v.clone() for k, v in model.state_dict().items()}
    place(model, strict=True)
    assert list(model.state_dict()) == names
    for name, p in model.named_parameters():
        assert p is parameters[name] and torch.equal(p, values[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_classes_go_by_their_old_names():
    model = tiny()
    signature = inspect.signature(model.forward)
    place(model, strict=True)
    attention = model.model.layers[0].self_attn
    assert isinstance(model, LlamaForCausalLM) and isinstance(attention, LlamaAttention) and isinstance(attention, Fused)
    assert type(attention).__name__ == "LlamaAttention" and str(type(model)) == str(LlamaForCausalLM)
    assert inspect.signature(model.forward) == signature
    assert "FusedLlamaMLP" in repr(model) and "FusedLlamaForCausalLM" in repr(model)
    assert not isinstance(tiny().model.layers[0].self_attn, Fused), "only the instance is swapped"


def test_optimizer_built_before():
    model = tiny()
    other = twin(model)
    for m in (model, other):
        m.train()
        m.optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    place(model, strict=True)
    for _ in range(3):
        for m in (model, other):
            m(**batch()).loss.backward()
            m.optimizer.step()
            m.optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen2"])
def test_save_pretrained_and_load(kind, tmp_path):
    model = tiny(kind).eval()
    want = model(tokens()).logits
    place(model, strict=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert type(loaded).__name__ == type(model).__name__ and not isinstance(loaded, Fused)
    torch.testing.assert_close(loaded(tokens()).logits, want)
    model.load_state_dict({k: v * 2 for k, v in loaded.state_dict().items()})
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens()).logits, loaded(tokens()).logits, rtol=1e-4, atol=1e-5)


def test_load_state_dict_assign():
    model = tiny()
    placement = place(model, strict=True)
    new = tiny("llama", initializer_range=0.1)
    model.load_state_dict({k: v.clone() for k, v in new.state_dict().items()}, assign=True)
    assert_close(training_run(model, batch()), training_run(new, batch()))
    assert placement.fallbacks == 0


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": torch_saved}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_work_and_share_nothing(copied):
    model = tiny("qwen3")
    want = training_run(twin(model), batch())
    place(model, strict=True)
    training_run(model, batch())
    other = copied(model)
    assert isinstance(other.model, Fused) and other.model.table.angles.rotary is other.model.rotary_emb
    assert_close(training_run(other, batch()), want)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert_close(training_run(model, batch()), want)


def test_undo_is_exact():
    model = tiny("qwen3")
    classes = {name: type(m) for name, m in model.named_modules()}
    attributes = {name: sorted(m.__dict__) for name, m in model.named_modules()}
    before = training_run(twin(model), batch())
    placement = place(model, strict=True)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    placement.undo()
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert {name: sorted(m.__dict__) for name, m in model.named_modules()} == attributes
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    for name, t in training_run(model, batch()).items():
        assert torch.equal(t, before[name]), name
    assert place(model, strict=True).verified, "and it can be placed again"


def test_placing_disturbs_nothing():
    model = tiny()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    model.model.norm.weight.main_grad = torch.ones_like(model.model.norm.weight)
    modes = [m.training for m in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    place(model, strict=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["model.norm.weight"]
    assert model.model.norm.weight.main_grad.eq(1).all() and model.model.norm.weight.grad.eq(1).all()


def test_main_grad_holds_every_swapped_weight_gradient():
    model = tiny()
    want = training_run(twin(model), batch())
    place(model, strict=True)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    model.train()(**batch()).loss.backward()
    got = {"loss": want["loss"]} | {name: p.main_grad for name, p in model.named_parameters() if p.grad is None}
    assert all("norm" in name for name in set(want) - set(got)), "the references' norms alone fill .grad"
    assert_close(got, {name: want[name] for name in got})


def wrong_swiglu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return torch.nn.functional.silu(gate) * up * 1.001


def test_a_wrong_swap_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("gpubound.layers.mlp.swiglu", wrong_swiglu)
    monkeypatch.setattr("gpubound.layers.lean.swiglu", wrong_swiglu)
    monkeypatch.setattr(trace, "_said", set())
    model = tiny()
    want = training_run(twin(model), batch())
    placement = place(model)
    row = rows(placement)["model.layers.0.mlp"]
    assert row.why.startswith("not swapped: ") and " off by 1." in row.why and row.kernel == "torch"
    assert not isinstance(model.model.layers[0].mlp, Fused) and isinstance(model.model.layers[0].self_attn, Fused)
    assert rows(placement)["model"].why == "not swapped: layers.0.mlp was not swapped"
    assert "gpubound: fallback: place: LlamaMLP" in capsys.readouterr().err
    assert_close(training_run(model, batch()), want)


def slow_swiglu(gate, up=None):
    trace.fallback("swiglu", "a test says so")


@pytest.mark.parametrize("broken", ["wrong", "raises", "falls back"])
def test_strict_raises_and_leaves_the_model_as_it_was(monkeypatch, broken):
    if broken == "wrong":
        monkeypatch.setattr("gpubound.layers.mlp.swiglu", wrong_swiglu)
        monkeypatch.setattr("gpubound.layers.lean.swiglu", wrong_swiglu)
    elif broken == "falls back":
        monkeypatch.setattr("gpubound.layers.mlp.swiglu", slow_swiglu)
        monkeypatch.setattr("gpubound.layers.lean.swiglu", slow_swiglu)
    else:
        monkeypatch.setattr("gpubound.layers.attention.rope_qkv", lambda qkv, c, s, h, k: 1 / 0)
    model = tiny()
    with pytest.raises(PlaceError, match=r"place: model\.layers\.0\.\w+ \(Llama\w+\) was not swapped: "):
        place(model, strict=True)
    assert not any(isinstance(m, Fused) for m in model.modules())
    with trace.strict(), pytest.raises(FallbackError):
        place(model)
    assert not any(isinstance(m, Fused) for m in model.modules())


def test_a_wrong_loop_is_taken_back(monkeypatch):
    """Every leaf is right; the loop is not."""
    monkeypatch.setattr(hf_parts, "run_blocks", lambda *given: 1.01 * run_blocks(*given))
    model = tiny()
    want = training_run(twin(model), batch())
    placement = place(model)
    assert rows(placement)["model"].why.startswith("not swapped: ")
    assert rows(placement)["model"].why.endswith(" off by 1.0e-02 (limit 1.0e-03)")
    assert_close(training_run(model, batch()), want)
    assert placement.verified


def test_a_wrong_whole_is_taken_back(monkeypatch):
    """Right alone, wrong together: everything goes back, and no line says ready."""
    model = tiny()
    real, calls = core.exercise.compare, []

    def last_one_fails(after, before, dtype):
        calls.append(1)
        verdict = real(after, before, dtype)
        return verdict if len(calls) < 3 else verify.Verdict("loss", 0.5, 1e-3)

    monkeypatch.setattr(core.exercise, "compare", last_one_fails)
    placement = place(model)
    assert not any(isinstance(m, Fused) for m in model.modules())
    assert not placement.verified and "not verified as a whole" in placement.summary
    assert "taken back: the whole model with every swap in it: loss off by 5.0e-01 (limit 1.0e-03)" in str(placement)


def test_hooks_still_fire():
    model = tiny()
    want = training_run(twin(model), batch())
    placement, seen = place(model, strict=True), []
    layer = model.model.layers[1]
    for module in (layer, layer.self_attn, layer.self_attn.k_proj, layer.mlp.down_proj, layer.input_layernorm, model.lm_head):
        handle = module.register_forward_hook(lambda m, *_: seen.append(m))
        assert_close(training_run(model, batch()), want)
        assert seen == [module]
        handle.remove()
        seen.clear()
    reasons = {name: row.reasons for name, row in rows(placement).items() if row.reasons}
    assert reasons == {
        "(the model)": {"lm_head: a projection carries hooks": 1},
        "model": {"hooks on a layer": 1, "hooks on self_attn": 1, "hooks on input_layernorm": 1},
        "model.layers.1.self_attn": {"a projection carries hooks, so it is called as it is": 1},
    }


PEFT_ASKS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


@PEFT_ASKS
def test_peft_adapters_of_another_dtype():
    """PEFT keeps adapters in fp32 on a bf16 base."""
    model = peft.get_peft_model(tiny(dtype=torch.bfloat16), peft.LoraConfig(**LORA))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    truth, own = training_run(twin(model).float(), batch()), training_run(twin(model), batch())
    place(model, strict=True)
    got = training_run(model, batch())
    for name, t in truth.items():
        error, before = ((g[name].float() - t).norm() / t.norm() for g in (got, own))
        assert error <= 1.5 * before + 1e-2, f"{name}: {error:.2e}, before {before:.2e}"


@PEFT_ASKS
@pytest.mark.parametrize("order", ["adapters first", "placed first"])
def test_peft_adapters(order):
    def adapted(model):
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(**LORA))

    want = training_run(adapted(tiny()), batch())
    if order == "adapters first":
        model = adapted(tiny())
        placement = place(model, strict=True)
        row = rows(placement)["base_model.model.model.layers.0.self_attn"]
        assert row.kernel.startswith("projections as they are")
    else:
        model = tiny()
        placement = place(model, strict=True)
        model = adapted(model)
    got = training_run(model, batch())
    assert_close(got, want)
    assert {name.rpartition(".lora_")[2][:2] for name in got if name != "loss"} == {"A.", "B."}, "the base is frozen"
    (reason,) = {reason for row in placement.rows for reason in row.reasons}
    assert reason == "a projection is peft.Linear, not nn.Linear, so it is called as it is"


def test_fsdp2_shards_a_placed_model():
    """Its hooks on the layers are honoured, and the weights, which it moves in and out, are multiplied one by one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model, other = tiny(), tiny()
        placement = place(model, strict=True)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for m in (model, other):
            m.train()
            optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
            for _ in range(3):
                m(**batch()).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), other.parameters()):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        found = rows(placement)
        assert found["model"].reasons == {"hooks on a layer": 3}
        assert found["model.layers.0.mlp"].reasons == {"FSDP shards the weights and manages their memory": 3}
    finally:
        dist.destroy_process_group()


def test_frozen_base_with_trained_norms():
    model = tiny()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "v_proj" in name)
    want = training_run(twin(model), batch())
    place(model, strict=True)
    assert_close(training_run(model, batch()), want)


def test_eager_attention_is_left_alone():
    model = tiny(attention="eager")
    other = twin(model).eval()
    placement = place(model)
    row = rows(placement)["model.layers.0.self_attn"]
    assert row.why == "not swapped: the config asks for 'eager' attention; load with attn_implementation='sdpa'"
    got, want = (m.eval()(tokens(), output_attentions=True) for m in (model, other))
    for a, b in zip(got.attentions, want.attentions):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_implementation_changed_later():
    model = tiny()
    other = twin(model).eval()
    placement = place(model, strict=True)
    model.set_attn_implementation("eager")
    got, want = model.eval()(tokens(), output_attentions=True), other(tokens())
    assert len(got.attentions) == 2
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    assert rows(placement)["model.layers.0.self_attn"].reasons == {"the config asks for 'eager' attention": 1}


def refusal(model, **options):
    with pytest.raises(ValueError) as error:
        place(model, **options)
    return str(error.value)


def test_refuses_whole_models_by_name():
    assert refusal("gpt2") == "place: model must be a torch.nn.Module, got str; pass the model itself."

    half = tiny()
    half.model.layers[1].mlp.up_proj.to("meta")
    assert refusal(half) == (
        "place: model.layers.1.mlp.up_proj.weight is on the meta device, without values; "
        "load or initialise the weights (model.to_empty(device=...), then fill them) before placing."
    )
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert refusal(empty).startswith("place: weight and 1 more tensors are on the meta device")

    spread = tiny()
    spread.hf_device_map = {"model": 0, "lm_head": "cpu"}
    assert refusal(spread) == (
        "place: the model is spread over 0, cpu by its hf_device_map; load it without device_map, so that it is on one device."
    )

    sharded = nn.Linear(2, 2)
    sharded.weight.ds_id = 0
    assert refusal(sharded) == "place: weight is sharded over several devices; place the model before sharding it."

    model = tiny()
    place(model)
    assert refusal(model) == (
        "place: this model is placed already; call undo() on its placement first. "
        "(model.to(device) moves a placed model: its fused weights follow.)"
    )
    with pytest.warns(DeprecationWarning):
        script = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert refusal(script) == ("place: model is a ScriptModule, whose code is frozen; place the nn.Module it was made from.")
    assert refusal(tiny(), device="gpu").startswith("device: got 'gpu', wanted one of auto")


class Int8Linear(nn.Linear):
    """What quantised layers look like: integer weights that only their own forward understands."""

    def __init__(self, linear):
        super().__init__(1, 1, bias=False)
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def test_refuses_modules_by_name():
    model = tiny()
    layers = model.model.layers
    layers[0].mlp.up_proj = Int8Linear(layers[0].mlp.up_proj)
    layers[0].self_attn._hf_hook = object()
    layers[1].self_attn.forward = layers[1].self_attn.forward
    layers[1].mlp.up_proj.to(torch.float64)
    layers[1].mlp.register_forward_pre_hook(lambda m, a: None)
    placement = rows(place(model))
    assert placement["model.layers.0.mlp"].why == "not swapped: up_proj: Int8Linear's weight is quantised (Tensor, torch.int8)"
    assert placement["model.layers.0.self_attn"].why == "not swapped: accelerate moves its weights in and out with a hook"
    assert placement["model.layers.1.self_attn"].why == "not swapped: its forward is already patched on this instance"
    assert placement["model.layers.1.mlp"].why.startswith("not swapped: its verification raised RuntimeError: ")


def test_quantised_models_are_not_moved(monkeypatch):
    model = tiny()
    model.lm_head = Int8Linear(model.lm_head)
    model.is_quantized = True
    monkeypatch.setattr(core.facts, "resolve", lambda spec: torch.device("cuda", 0))
    assert refusal(model) == (
        "place: the model is on cpu and its quantised weights cannot be moved: lm_head (Int8Linear's weight is quantised "
        "(Tensor, torch.int8)); load it with device_map={'': 'cuda:0'}."
    )


def test_a_subclass_of_ones_own_is_left_alone():
    model = tiny()

    class Louder(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.__class__ = Louder
    want = training_run(twin(model), batch())
    placement = place(model)
    assert_close(training_run(model, batch()), want)
    assert type(model.model.layers[0].mlp) is Louder
    assert rows(placement)["model"].why == "not swapped: layers.0.mlp was not swapped"
