"""What placing leaves alone: names, identity, files, copies, classes, hooks."""

import copy
import inspect
import io
import pickle
import re

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import gpubound as gb
from gpubound.errors import PlaceError
from gpubound.place.candidates import Fused
from tests.messages import message

from .models import assert_close, batch, place, rows, tiny, tokens, training_run, twin


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
    assert model._get_name() == "LlamaForCausalLM", "Trainer smooths labels without a shift for a name that it does not know"
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
    parameters = dict(model.named_parameters())
    assert any(p.untyped_storage().nbytes() != p.nbytes for p in parameters.values()), "q, k and v side by side"
    placement.undo()
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert {name: sorted(m.__dict__) for name, m in model.named_modules()} == attributes
    assert all(p is parameters[name] and p.untyped_storage().nbytes() == p.nbytes for name, p in model.named_parameters())
    for name, t in training_run(model, batch()).items():
        assert torch.equal(t, before[name]), name
    assert place(model, strict=True).verified, "and it can be placed again"


@pytest.mark.parametrize("kind", ["llama biased", "llama tied"])
def test_saved_by_those_who_go_by_storage(kind, tmp_path):
    """To accelerate what shares a storage is one weight, and safetensors' save_model refuses a part of one."""
    model = tiny(kind)
    place(model, strict=True)
    training_run(model, batch())
    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    storages = {t.untyped_storage().data_ptr() for t in state.values()}
    assert len(storages) == len({id(p) for p in parameters.values()})
    for name, tensor in state.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.data_ptr() == parameters[name].data_ptr()
    save_model(model, tmp_path / "model.safetensors")
    want = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for p in parameters.values():
            p.zero_()
    load_model(model, tmp_path / "model.safetensors")
    assert all(p.equal(want[name]) for name, p in parameters.items())


def test_undo_leaves_weights_where_a_step_has_put_them():
    model = tiny("llama")
    placement = place(model, strict=True)
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-3), graph="off")
    addresses = [p.data_ptr() for p in model.parameters()]
    placement.undo()
    assert [p.data_ptr() for p in model.parameters()] == addresses and step([batch()]).loss.isfinite()


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


def test_hooks_still_fire():
    model = tiny()
    want = training_run(twin(model), batch())
    placement, seen = place(model, strict=True), []
    layer = model.model.layers[1]
    inner = layer.self_attn.k_proj, layer.mlp.down_proj, layer.mlp.act_fn
    for module in (layer, layer.self_attn, *inner, layer.input_layernorm, model.lm_head):
        handle = module.register_forward_hook(lambda m, *_: seen.append(m))
        assert_close(training_run(model, batch()), want)
        assert seen == [module]
        handle.remove()
        seen.clear()
    reasons = {name: row.reasons for name, row in rows(placement).items() if row.reasons}
    assert reasons == {
        "(the model)": {"lm_head: a projection carries hooks": 1},
        "model": {"hooks on a layer": 1, "hooks on self_attn": 1, "hooks on the activation": 1, "hooks on input_layernorm": 1},
        "model.layers.1.mlp": {"hooks on the activation": 1},
        "model.layers.1.self_attn": {"a projection carries hooks, so it is called": 1},
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
        assert row.kernel.startswith("q, k, v as one product")
    else:
        model = tiny()
        placement = place(model, strict=True)
        model = adapted(model)
    got = training_run(model, batch())
    assert_close(got, want)
    assert {name.rpartition(".lora_")[2][:2] for name in got if name != "loss"} == {"A.", "B."}, "the base is frozen"
    assert not [reason for row in placement.rows for reason in row.reasons]


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


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_placing_inside_a_mode(mode):
    """It compared no gradients in one, rounded ones in the other, and took the swaps back."""
    model = tiny()
    with mode():
        placement = place(model, strict=True)
    assert placement.verified and not any(p.is_inference() for p in model.parameters())


def test_a_model_made_inside_inference_mode_is_left_as_it_is_with_a_reason(said):
    with torch.inference_mode():
        model = tiny()
    placement, why = place(model), "made inside torch.inference_mode(), and has no gradients to be"
    assert not placement.verified and placement.swapped == 0 and why in placement.summary and "RuntimeError" not in said()
    placement.undo()
    with pytest.raises(PlaceError, check=message("place/mechanics:a_model_made_inside_infe", re.escape(why))):
        place(model, strict=True)
    with torch.no_grad():
        assert model(input_ids=batch()["input_ids"]).logits.isfinite().all(), "its own forward still runs"


def test_an_activation_put_in_after_placing_is_the_one_that_runs():
    model = tiny()
    other = twin(model)
    placement = place(model, strict=True)
    for each in (model, other):
        each.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    assert_close(training_run(model, batch()), training_run(other, batch()))
    assert rows(placement)["model.layers.1.mlp"].reasons == {"another activation than when it was placed": 1}


PATCHES = {
    "layer": lambda model: model.model.layers[1],
    "mlp": lambda model: model.model.layers[1].mlp,
    "q_proj": lambda model: model.model.layers[1].self_attn.q_proj,
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_forward_patched_after_placing_runs(name):
    model = tiny()
    place(model, strict=True)
    part, seen = PATCHES[name](model), []
    forward = part.forward
    part.forward = lambda *args, **kwargs: (seen.append(name), forward(*args, **kwargs))[1]
    training_run(model, batch())
    assert seen == [name]


def test_a_final_norm_put_in_after_placing_runs():
    model = tiny()
    other = twin(model)
    place(model, strict=True)
    for each in (model, other):
        each.model.norm = torch.nn.Identity()
    assert_close(training_run(model, batch()), training_run(other, batch()))
