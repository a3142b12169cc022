"""The general body: any Hugging Face decoder, rows at their own positions, against its forward over one row at a time."""

import re

import pytest
import torch
import transformers

from gpubound.decode import hf_forward as any_body, hf_forward as fit
from gpubound.decode.hf_forward import StaticCacheRunner
from gpubound.decode.runner import RunnerConfig
from gpubound.watch import no_stall, watch
from gpubound.watch.pretend import simgpu
from tests.messages import message

from .any_cases import ENDS, FAMILIES, NEW, body_of, build, go_on, model_of, prompts, start


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_give_what_the_models_own_forward_gives(family, device):
    """Greedy tokens and logits, over each whole row, without a cache."""
    body, logits = body_of(family, device), []
    rows = go_on(body, *start(body, prompts()), logits=logits)
    for prompt, row, given in zip(prompts(), rows, torch.stack(logits, 1)):
        whole = torch.cat([prompt.to(device), row[:-1]])
        with torch.no_grad():
            own = body.model(whole[None], use_cache=False).logits[0, len(prompt) - 1 :]
        assert torch.equal(own.argmax(-1), row)
        torch.testing.assert_close(given, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gemma2-eager", "mixtral"])
def test_rows_in_another_order_give_the_same_tokens(family, device):
    body = body_of(family, device)
    first = go_on(body, *start(body, prompts()), 16)
    order = [2, 0, 3, 1]
    assert torch.equal(go_on(body, *start(body, [prompts()[row] for row in order]), 16), first[order])


def test_weights_changed_in_place_are_seen_and_no_address_changes():
    body = StaticCacheRunner(build("gpt2"), RunnerConfig(4, 80))
    addresses = [tensor.data_ptr() for tensor in body.buffers()]
    before = body.step(*start(body, prompts())).clone()
    with torch.no_grad():
        for parameter in body.model.parameters():
            parameter.mul_(1.1)
        logits = body.step(*start(body, prompts()))
        own = [body.model(prompt[None]).logits[0, -1] for prompt in prompts()]
    torch.testing.assert_close(logits, torch.stack(own), rtol=0, atol=1e-3)
    assert (logits - before).abs().max() > 0.1 and body.moved() is None
    assert logits.data_ptr() == body.logits.data_ptr()
    assert addresses == [tensor.data_ptr() for tensor in body.buffers()]
    assert (body.vocab, body.logits.dtype, body.max_batch, body.max_length) == (89, torch.float32, 4, 80)


def test_a_weight_that_moved_is_named_until_the_body_is_bound_anew():
    body = StaticCacheRunner(build("gpt2"), RunnerConfig(2, 32))
    body.model.transformer.h[1].mlp.c_fc.weight.data = body.model.transformer.h[1].mlp.c_fc.weight.data.clone()
    assert body.moved() == "transformer.h.1.mlp.c_fc.weight"
    body.rebind()
    assert body.moved() is None
    body.model.load_state_dict({name: t.clone() for name, t in body.model.state_dict().items()}, assign=True)
    assert body.moved() == "transformer.wte.weight"


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_fewer_rows_than_the_body_has_give_the_same_tokens(family):
    body = body_of(family)
    want = go_on(body, *start(body, prompts()), 16)
    assert torch.equal(go_on(body, *start(body, prompts()[:2]), 16), want[:2])


@pytest.mark.parametrize("family", ["gpt2", "gemma2-eager"])
def test_score_is_the_log_probability_under_the_model(family, monkeypatch):
    body, ids = body_of(family), prompts((41,))[0]
    monkeypatch.setattr(any_body, "SCORED", 16)
    with torch.no_grad():
        own = body.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(body.score(ids), own, rtol=0, atol=1e-4)


def test_bytes_of_a_step():
    """GPT-2's embedding is its head too; its table of positions gives rows only. Mixtral reads two of four experts."""
    block = 2 * 32 + (32 + 1) * 96 + (32 + 1) * 32 + 2 * 32 + (32 + 1) * 128 + (128 + 1) * 32
    place = 2 * 32  # of one layer: keys and values of 4 heads of 8
    assert body_of("gpt2").bytes_a_step([5, 7]) == 4 * (2 * block + 2 * 32 + 89 * 32 + 2 * place * 12)
    block = 2 * 32 + 32 * (32 + 16 + 16 + 32) + 4 * 32 + 2 * 3 * 32 * 48
    assert body_of("mixtral").bytes_a_step([5, 30]) == 4 * (2 * block + 32 + 89 * 32 + 2 * 32 * (5 + 9))


def test_the_first_module_with_a_nan_is_located():
    body = StaticCacheRunner(build("gpt2"), RunnerConfig(2, 32))
    with torch.no_grad():
        body.model.transformer.h[1].mlp.c_fc.weight[3, 4] = float("nan")
    assert body.locate(prompts()[1]) == "transformer.h.1.mlp.c_fc"
    assert body_of("gpt2").locate(prompts()[1]) == message("decode/any_model:the_first_module_with_a")


def test_autocast_around_it_changes_nothing():
    body = body_of("gpt2")
    want = body.step(*start(body, prompts())).clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(body.step(*start(body, prompts())), want)


class TestOnThePretendGpu:
    """Its sensor sees every wait, also inside an op. What differs from CUDA's kernels is in the gpu tests."""

    @pytest.fixture
    def sim(self) -> torch.device:
        if torch.cuda.is_available():
            pytest.skip("the pretend device needs CUDA_VISIBLE_DEVICES=")
        return simgpu()

    @pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("mixtral", "qwen2_moe")])
    def test_a_step_never_waits_for_the_device(self, family, sim):
        body = StaticCacheRunner(build(family).to(sim), RunnerConfig(4, 80))
        token, position = start(body, prompts())
        with no_stall(), watch() as ledger:
            for _ in range(2):
                token = body.step(token, position).argmax(-1).int()
                position = position + 1
        ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)
        assert body.slices == (family == "falcon")

    def test_experts_that_ask_the_host_are_computed_otherwise_in_a_step(self, sim):
        model = build("mixtral")
        want = go_on(body_of("mixtral"), *start(body_of("mixtral"), prompts()), 6)
        model.set_experts_implementation("eager")
        body = StaticCacheRunner(model.to(sim), RunnerConfig(4, 80))
        token, position = start(body, prompts())
        with no_stall():
            body.step(token, position)
        assert model.get_experts_implementation() == {"": "eager"}
        assert torch.equal(go_on(body, token, position, 6).cpu(), want)
        assert body.report()[3] == (
            "experts",
            message("decode/any_model:experts_that_ask_the_hos"),
            message("decode/any_model:experts_that_ask_the_hos.2"),
        )

    def test_a_forward_that_waits_is_refused_with_its_line(self, sim):
        model = build("gpt2").to(sim)
        attention, ask = model.transformer.h[0].attn, model.transformer.h[0].attn.forward
        attention.forward = lambda hidden, *rest, **named: (hidden.sum().item(), ask(hidden, *rest, **named))[1]
        with pytest.raises(ValueError, match=r"test_any_model\.py") as error:
            StaticCacheRunner(model, RunnerConfig(4, 80))
        assert str(error.value).startswith("decoder: model: got GPT2LMHeadModel") and "host wait" in str(error.value)


@pytest.mark.parametrize(
    ("held", "dtype", "capability", "wanted"),
    [
        ("grouped_mm", torch.bfloat16, (9, 0), None),
        ("grouped_mm", torch.bfloat16, (8, 0), {"": "batched_mm"}),
        ("grouped_mm", torch.float32, (9, 0), {"": "batched_mm"}),
        ("eager", torch.bfloat16, (9, 0), {"": "batched_mm"}),
        ("batched_mm", torch.float32, (8, 0), None),
    ],
)
def test_how_a_step_computes_experts_on_cuda(held, dtype, capability, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = build("mixtral")
    model.set_experts_implementation(held)
    assert fit.routing(model, torch.device("cuda"), dtype) == ({"": held}, wanted)


def test_report():
    assert StaticCacheRunner(model_of("gemma2-eager"), RunnerConfig(4, 64)).report()[:-1] == [
        (
            "forward",
            "Gemma2ForCausalLM.forward, static cache",
            "the model's own modules run as they are; a graph takes their launches from the host",
        ),
        (
            "attention",
            "eager, masked, over all 64 places",
            "rows stand at their own positions; cost follows max_length, not the live length; sliding_attention of 9 by its "
            "mask",
        ),
        ("cache", "2 layers, 0.1 MiB, float32", "a device index for each row"),
    ]
    *_, experts, trial = StaticCacheRunner(model_of("mixtral"), RunnerConfig(2, 64)).report()
    assert experts == ("experts", "grouped_mm", message("decode/any_model:report"))
    assert re.fullmatch(r"logits within \d\.\de-0[678] of the model's own", trial[1])
    assert trial[2] == message("decode/any_model:report.2")


SERVED = {  # sizes of real models, few layers; what they are here for
    "gpt2": lambda: transformers.GPT2Config(**ENDS),
    "gemma2": lambda: transformers.Gemma2Config(num_hidden_layers=2, sliding_window=24, vocab_size=32000, **ENDS),
    "falcon": lambda: transformers.FalconConfig(hidden_size=1024, num_attention_heads=16, num_hidden_layers=2, **ENDS),
    "mixtral": lambda: transformers.MixtralConfig(  # grouped_mm in bf16 takes the routing on the device
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4, **ENDS
    ),
}


def replayed(body: StaticCacheRunner, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What `go_on` gives, by a graph: on a stream of its own, token and position moving on the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body.step(token, position)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        token.copy_(body.step(token, position).argmax(-1))
        position.add_(1)
    found = torch.zeros(len(token), NEW, dtype=torch.int32, device=body.device)
    for place in range(NEW):
        graph.replay()
        found[:, place] = token
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "deterministic"), [*((name, False) for name in SERVED), ("gpt2", True)])
def test_a_captured_step_gives_the_tokens_of_eager_steps(family, deterministic):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SERVED[family](), dtype=torch.bfloat16).eval().to(device)
    body = StaticCacheRunner(model, RunnerConfig(4, 256))
    assert body.routing is None and body.slices == (family == "falcon")
    eager = go_on(body, *start(body, prompts()))
    assert torch.equal(replayed(body, *start(body, prompts())), eager)


@pytest.mark.gpu
def test_experts_in_fp32_are_captured_by_another_way():
    device = torch.device("cuda", 0)
    torch.use_deterministic_algorithms(False)
    body = StaticCacheRunner(build("mixtral").to(device), RunnerConfig(4, 80))
    assert body.routing == {"": "batched_mm"}
    eager = go_on(body, *start(body, prompts()))
    assert torch.equal(replayed(body, *start(body, prompts())), eager)
