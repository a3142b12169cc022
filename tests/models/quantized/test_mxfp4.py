"""gpt-oss with experts in MXFP4: the numbers, logits, tokens and gradients of the dequantised model."""

import json

import pytest
import torch
from safetensors.torch import save_file

import gpubound as gb
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
    ids = torch.tensor([[5, 6, 7, 8]])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **settings)[0, 4:].tolist()
    assert decoder.generate(ids.tolist(), max_new_tokens=8, stop=()).tokens == [wanted]


def test_experts_add_to_one_sum_in_place(tmp_path):
    write(tmp_path)
    layer = next(m for m in load_foreign(tmp_path, torch.device("cpu"), torch.float32).modules() if isinstance(m, MxExperts))
    ids = torch.randint(8, (24, 2), generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(record_shapes=True) as profile:
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
