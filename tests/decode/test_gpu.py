"""What only a GPU shows: graphs against single launches bit for bit, live weights under a graph, memory of a bucket."""

import threading
from importlib import import_module

import pytest
import torch

import gpubound as gb
from gpubound import kernels
from gpubound.decode.runner import Stepper
from gpubound.decode.weights import LiveFormat
from gpubound.kernels.decode_product import LATE
from tests.messages import message

from . import cases

pytestmark = pytest.mark.gpu

SERVED = {  # sizes of a real model, few layers
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
DEVICE = "cuda:0"


def served(kind: str = "Llama", max_batch: int = 16, **options) -> gb.FastDecoder:
    given = cases.SPARSE | cases.FAMILIES | cases.OTHERS | cases.RECURRENT
    sizes = {name: size for name, size in SERVED.items() if given[kind].get(name, size) not in (None, ...)}  # the family's own
    model = cases.scaled(cases.build(kind, torch.bfloat16, DEVICE, **sizes))
    if "Gemma4" in kind:  # whose scores have no factor: with norms of 1, rounding is 9.5e-2 of the logits, with these 2.3e-2
        with torch.no_grad():
            for block in model.model.layers:
                block.self_attn.q_norm.weight.mul_(block.self_attn.head_dim**-0.5)
    return gb.decoder(model, max_batch, 512, **options)


@pytest.fixture(scope="module")
def decoders() -> dict[int, gb.FastDecoder]:
    model = served(verify="quick").model
    return {k: gb.decoder(model, 16, 512, k=k) for k in (1, 8, 32)}


def test_a_chain_that_attends_by_query_computes_what_plain_launches_do(monkeypatch):
    """Without tensor cores, asking for keys before the wait, with small products that let their successors begin: with the same
    bits every time, or a launch read what another had still to write."""
    monkeypatch.setattr(LiveFormat, "early_bytes", 0)
    model = cases.scaled(
        cases.build("Gemma4", torch.bfloat16, DEVICE, head_dim=256, global_head_dim=512, max_position_embeddings=512)
    )
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_norm.weight.mul_(block.self_attn.head_dim**-0.5)
    fast = gb.decoder(model, 2, 512, verify="quick")
    body, attention = fast.body, [layer.attention for layer in fast.body.layers]
    assert body.mode(1) == body.mode(2) == LATE and all(part.by_query for part in attention)
    fast.generate(cases.prompts(140, 90), max_new_tokens=64)
    token = torch.tensor([3, 5], device=DEVICE)
    position = torch.tensor([203, 153], device=DEVICE, dtype=torch.int32)

    def logits(rows: int) -> torch.Tensor:
        body.begin(token[:rows])
        return body.step(token[:rows], position[:rows]).clone()

    for rows in (1, 2):
        got = logits(rows)
        assert all(torch.equal(logits(rows), got) for _ in range(50))
        with monkeypatch.context() as plain:
            plain.setattr(body, "can_chain", False)
            want = logits(rows)
        assert (got - want).abs().max() < 3e-2 * want.abs().max()  # the rounding of such a model is 2.3e-2 (`served`)


def eagerly(fast: gb.FastDecoder, monkeypatch) -> None:
    """The same kernels, launched one by one."""
    monkeypatch.setattr(fast.graphs, "launch", Stepper(fast.body, fast.slots).run)


def test_a_steps_kernels_are_not_compiled_one_after_the_other(monkeypatch):
    """In sizes that no other test has, or this process may have the kernels: only what chooses tokens is left to the thread
    that waits."""
    threads, jit = [], import_module("triton.runtime.jit").JITFunction
    compiled = jit._do_compile

    def note(kernel, *arguments, **options):
        threads.append((threading.current_thread() is threading.main_thread(), kernel.fn.__name__))
        return compiled(kernel, *arguments, **options)

    monkeypatch.setattr(jit, "_do_compile", note)
    sizes = {"hidden_size": 1152, "intermediate_size": 1792, "num_attention_heads": 18, "num_key_value_heads": 6}
    gb.decoder(cases.build("Llama", torch.bfloat16, DEVICE, **SERVED | sizes), 1, 512)
    late, early = ({name for main, name in threads if main is waits} for waits in (True, False))
    step = {f"_{op}_kernel" for op in ("norm_product", "decode_attention", "add_product", "norm_gate_up")}
    assert step <= early and not late & step, (early, late)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": True}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_graphs_of_any_length_give_what_single_launches_give(rows, how, decoders, monkeypatch):
    given = cases.prompts(*range(5, 5 + rows))
    found = {k: fast.generate(given, max_new_tokens=75, **how).sequences for k, fast in decoders.items()}
    eagerly(decoders[8], monkeypatch)
    want = decoders[8].generate(given, max_new_tokens=75, **how).sequences
    assert found[1] == found[8] == found[32] == want  # tokens, and log-probabilities bit for bit
    assert len({token for sequence in want for token in sequence.tokens}) > 20


@pytest.mark.parametrize("rows", [12, 33, 100])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_steps_of_split_products_are_certified(kind, rows, monkeypatch):
    """Certified against fp32 with as many rows, of which the last tile has less; a graph gives what single launches do."""
    fast = served(kind, max_batch=rows)
    assert rows in fast.body.split and rows in fast.body.row_counts() and fast.certificate.logits_error is not None
    given = cases.prompts(*(5 + row % 9 for row in range(rows)))
    want = fast.generate(given, max_new_tokens=40).tokens
    eagerly(fast, monkeypatch)
    assert fast.generate(given, max_new_tokens=40).tokens == want


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3", "SmolLM3", *cases.OTHERS, *cases.BESIDE])
def test_a_graph_of_every_family(kind, monkeypatch):
    fast = served(kind, max_batch=3)
    assert fast.path == "" or kind == "Ministral3"  # whose positions end before max_length
    want = fast.generate(cases.prompts(), max_new_tokens=60).tokens
    eagerly(fast, monkeypatch)
    assert fast.generate(cases.prompts(), max_new_tokens=60).tokens == want


@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("kind", [*cases.OTHERS, *cases.MAMBA])
def test_other_families_give_hugging_faces_tokens(kind, rows):
    """Captured steps in fp32, a few rows and many, beside the model's own generate."""
    fast = gb.decoder(cases.build(kind, device=DEVICE), rows, cases.ROOM)
    assert fast.path == "" and "triton" in str(fast)
    given = cases.prompts(*range(5, 5 + rows))
    want = [cases.hugging_face(fast.model, prompt, 40) for prompt in given]
    assert fast.generate(given, max_new_tokens=40).tokens == want


@pytest.mark.parametrize("options", [{"weights": "int4"}, {"weights": "fp8", "cache": "int8"}, {"speculate": 3}], ids=str)
@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3", "Olmo2", "Phi3"])
def test_other_families_of_a_real_width_in_bf16(kind, options):
    """Certified against fp32, in the sizes of a real model; its graphs give what single launches do."""
    fast = served(kind, max_batch=3, **options)
    assert fast.path == "" and fast.certificate.logits_error is not None


def test_the_own_forward_of_a_model_in_a_graph(monkeypatch):
    fast = served(max_batch=3, fused=False)
    want = fast.generate(cases.prompts(), max_new_tokens=60).tokens
    eagerly(fast, monkeypatch)
    assert fast.generate(cases.prompts(), max_new_tokens=60).tokens == want


def test_a_graph_reads_the_live_weights():
    """In fp32: a step of the optimizer is seen without a new capture; tensors that moved are captured anew."""
    fast = gb.decoder(cases.build("Llama", device=DEVICE), 1, cases.ROOM)
    prompt = cases.prompts(7)[0]
    fast.generate(prompt, max_new_tokens=48)
    optimizer = torch.optim.AdamW(fast.model.parameters(), lr=0.05, fused=True)
    captured = len(fast.graphs)
    for _ in range(3):
        ids = torch.tensor([cases.prompts(20)[0]], device=DEVICE)
        fast.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert fast.generate(prompt, max_new_tokens=48).tokens[0] == cases.hugging_face(fast.model, prompt, 48)
    assert len(fast.graphs) == captured
    fast.model.load_state_dict({name: t.flip(0).clone() for name, t in fast.model.state_dict().items()}, assign=True)
    assert fast.generate(prompt, max_new_tokens=48).tokens[0] == cases.hugging_face(fast.model, prompt, 48)


def test_requests_of_every_kind_one_after_the_other():
    """Graphs share memory: what one leaves there is nothing that another reads."""
    fast = gb.decoder(cases.build("Mistral", device=DEVICE), 16, cases.ROOM)
    asked = [
        (cases.prompts(*range(1, 1 + rows)), how)
        for rows in (1, 16, 3)
        for how in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.2}, {"logprobs": True})
    ]
    first = [fast.generate(given, max_new_tokens=50, **how).sequences for given, how in asked]
    for given, how in asked:
        next(fast.stream(given, max_new_tokens=90, **how))  # and left
    again = [fast.generate(given, max_new_tokens=50, **how).sequences for given, how in reversed(asked)]
    assert first == again[::-1]


def test_a_bucket_costs_little_memory():
    fast = served(max_batch=16)
    fast.generate(cases.prompts(5), max_new_tokens=64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(DEVICE)
    fast.generate(cases.prompts(*[5] * 16), max_new_tokens=64)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved(DEVICE) - before < 100 << 20


def test_a_kernel_that_fails_on_the_device_fails_the_certificate(monkeypatch):
    own = kernels.add_product
    monkeypatch.setattr(kernels, "add_product", lambda *given, **named: own(*given, **named).mul_(1.05))
    with pytest.raises(gb.GenerateError, check=message("decode/gpu:a_kernel_that_fails_on_t")):
        served(max_batch=1)


def served_with_two_adapters(rows):
    model = served(verify="quick").model
    for number, name in enumerate(("x", "y")):
        torch.manual_seed(number)
        gb.lora.add(model, 16 >> number, alpha=8, init=False, name=name)
    with gb.strict():
        return gb.decoder(model, rows, 512)


def test_adapters_inside_the_products_of_a_graph(monkeypatch):
    """Programs that wait for what others compute beside them: the same tokens each time, alone and beside others."""
    fast = served_with_two_adapters(2)
    given, names = cases.prompts(5, 6), ["x", None]
    how = {"max_new_tokens": 75, "adapters": names}
    found = fast.generate(given, **how).tokens
    assert [fast.generate(given, **how).tokens for _ in range(5)] == [found] * 5
    alone = [fast.generate([prompt], max_new_tokens=75, adapters=[name]).tokens[0] for prompt, name in zip(given, names)]
    assert alone == found
    assert fast.generate([given[0]] * 2, max_new_tokens=75, adapters=["y", "x"]).tokens[1] == found[0]
    eagerly(fast, monkeypatch)
    assert fast.generate(given, **how).tokens == found
    assert fast.generate(given, max_new_tokens=75).tokens != found  # all adapters on every row


def test_adapters_behind_the_products_of_a_graph(monkeypatch):
    """Rows enough for cuBLAS, whose products a kernel adds to: the same tokens each time, captured and not."""
    fast = served_with_two_adapters(12)
    given, how = cases.prompts(*range(5, 17)), {"max_new_tokens": 75, "adapters": ["x", None, "y"] * 4}
    found = fast.generate(given, **how).tokens
    assert [fast.generate(given, **how).tokens for _ in range(5)] == [found] * 5
    eagerly(fast, monkeypatch)
    assert fast.generate(given, **how).tokens == found
    assert fast.generate(given, **how | {"adapters": ["y", None, "x"] * 4}).tokens != found
