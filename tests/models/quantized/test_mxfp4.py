"""gpt-oss with experts in MXFP4: the numbers, logits, tokens and gradients of the dequantised model."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpubound as gb
from gpubound.decode import moe
from gpubound.models.hf_loading import load_foreign
from gpubound.models.quantized import experts as fp4
from gpubound.models.quantized.schemes import MxExperts

transformers = pytest.importorskip("transformers")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(folder):
    """Write a tiny gpt-oss folder. Return transformers' model of its numbers."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=96, sliding_window=16, max_position_embeddings=128,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for name in [key for key in state if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = state[name].shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 122, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        values = torch.tensor([*E2M1, *(-x for x in E2M1)])[torch.stack((blocks & 15, blocks >> 4), -1).long()].flatten(-2)
        numbers = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        model.get_parameter(name).data.copy_(numbers)
        del state[name]
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    about = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": {"quant_method": "mxfp4"}}))
    return model


def greedy(twin, texts, count):
    """transformers' tokens."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
    each = ((torch.tensor([text]), len(text)) for text in texts)
    return [twin.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, n:].tolist() for ids, n in each]


@pytest.mark.slow
def test_experts_stay_in_mxfp4(tmp_path, monkeypatch):
    twin = write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    experts = [m for m in model.modules() if isinstance(m, MxExperts)]
    assert len(experts) == 2
    dense = twin.model.layers[0].mlp.experts
    assert torch.equal(experts[0].numbers("gate_up", 3, torch.float32), dense.gate_up_proj[3].t())
    assert torch.equal(experts[0].numbers("down", torch.tensor([5, 1]), torch.float32), dense.down_proj[[5, 1]].transpose(1, 2))
    numbers, asked = MxExperts.numbers, []
    recorded = lambda layer, part, some, dtype: asked.append(some) or numbers(layer, part, some, dtype)  # noqa: E731
    monkeypatch.setattr(MxExperts, "numbers", recorded)
    with torch.no_grad():
        for length, most in ((3, fp4.AT_ONCE), (3, 5 * 192 * 64 * 4), (24, fp4.AT_ONCE)):
            monkeypatch.setattr(fp4, "AT_ONCE", most)
            ids = torch.randint(96, (1, length), generator=torch.Generator().manual_seed(length))
            asked.clear()
            torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-5, atol=1e-5)
            together = length == 3 and most > 6 * 192 * 64 * 4  # the chosen experts alone, or one expert at a time
            assert {isinstance(one, torch.Tensor) for one in asked} == {together}
    decoder = gb.decoder(model, max_length=48)
    asked.clear()
    assert decoder.path == "" and "quantized_column_gate_up" in repr(decoder), decoder.path
    assert decoder.generate([[5, 6, 7, 8]], max_new_tokens=8, stop=()).tokens == greedy(twin, [[5, 6, 7, 8]], 8)
    assert not asked, "a step reads the codes"


class Largest(TorchDispatchMode):
    """The most elements of a floating-point tensor that an operation allocated."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


@pytest.mark.parametrize("at_once", [3, 8])
def test_a_decoder_dequantises_some_experts_at_a_time(tmp_path, monkeypatch, at_once):
    """Rows of one launch, more rows than it takes, and prompts, with experts of several parts."""
    twin = write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(moe, "WIDE", at_once * 3 * 96 * 64)
    texts = [[int(i) for i in torch.randint(2, 96, (n,), generator=torch.Generator().manual_seed(n))] for n in range(1, 13)]
    with Largest() as largest:
        decoder = gb.decoder(model, 12, 48, verify=False)
        found = [decoder.generate(texts[:rows], max_new_tokens=6, stop=()).tokens for rows in (1, 12)]
    assert found == [greedy(twin, texts[:rows], 6) for rows in (1, 12)]
    assert largest.elements <= max(at_once * 2 * 96 * 64, 12 * 2 * 2 * 96 * 64)
    report = decoder.body.report()
    assert ("2 x norm, gate, up of experts", "reference: quantized_column_gate_up", "the model's own codes") in report
    assert ("experts of more rows", "as of one row", "a row reads its experts' packed weights alone") in report, report


def test_experts_of_sizes_that_no_grouped_product_takes(tmp_path, monkeypatch):
    twin = write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(moe, "WIDE", 3 * 3 * 96 * 64)
    monkeypatch.setattr(moe, "not_grouped", lambda *stacks: "a reason")
    decoder = gb.decoder(model, 2, 48, verify=False)
    assert decoder.generate(texts := [[5, 6, 7, 8], [9]], max_new_tokens=6, stop=()).tokens == greedy(twin, texts, 6)


def test_a_placed_model_is_trained_and_decoded(tmp_path):
    """The adapters of attention train over the codes, and a decoder of the same model adds them."""
    twin = write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    gb.place(model, device="cpu")
    for one in (model, twin):
        gb.lora.add(one, rank=2, targets=["q_proj", "v_proj"])
        torch.manual_seed(3)
        for p in gb.lora.parameters(one):
            torch.nn.init.normal_(p, std=0.3)
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = [one(input_ids=ids, labels=ids).loss for one in (model, twin)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for p, q in zip(gb.lora.parameters(model), gb.lora.parameters(twin)):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    decoder = gb.decoder(model.eval(), 1, 48, verify=False)
    assert decoder.path == ""
    assert decoder.generate([[5, 6, 7]], max_new_tokens=6, stop=()).tokens == greedy(twin, [[5, 6, 7]], 6)


def test_experts_with_hooks_are_left_to_the_models_own_forward(tmp_path):
    write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    assert "layers.1.mlp.experts: MxExperts, not the family's own, or with hooks" in gb.decoder(model, 1, 16).path


def test_experts_add_to_one_sum_in_place(tmp_path):
    write(tmp_path)
    layer = next(m for m in load_foreign(tmp_path, torch.device("cpu"), torch.float32).modules() if isinstance(m, MxExperts))
    ids = torch.randint(8, (24, 2), generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        layer(torch.ones(24, 64), ids, torch.ones(24, 2))
    added = [event for event in profile.events() if event.name.startswith("aten::index_add")]
    assert len(added) == len(ids.unique()) and {event.name for event in added} == {"aten::index_add_"}


def test_gradients_pass_through_the_experts(tmp_path):
    twin = write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    for one in (model, twin):
        torch.manual_seed(3)
        gb.lora.add(one, rank=2, targets=["q_proj", "v_proj"])
        for p in gb.lora.parameters(one):
            torch.nn.init.normal_(p, std=0.05)
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    for one in (model, twin):
        one(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(gb.lora.parameters(model), gb.lora.parameters(twin)):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
