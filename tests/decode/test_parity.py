"""The decoder's tokens are the model's own: five families, our decoder, a placed model, any other by its own forward."""

import pytest
import torch
import transformers

import gpubound as gb
from gpubound.decode import transformer
from gpubound.models.reader import config_window
from tests.messages import message, refusal

from . import cases
from .any_cases import ENDS


@pytest.mark.parametrize("kind", cases.ALL)
def test_a_ragged_batch_gives_the_models_tokens(kind, device):
    fast = cases.shared(kind, str(device), verify=True)
    assert fast.path == ""  # the fused kernels
    together = cases.assert_greedy(fast, cases.prompts(), 9)
    assert together[2][:4] == fast.generate(cases.prompts()[2], max_new_tokens=4, stop=()).tokens[0]
    if kind in ("Llama", "Gemma3"):
        assert together[2][:8] == cases.hugging_face(fast.model, cases.prompts()[2], 8), (
            "its generate says what its forward does"
        )
    assert len({*together[0], *together[1], *together[2]}) > 5  # no model that says one word


def test_any_other_model_by_its_own_forward():
    torch.manual_seed(0)
    config = transformers.CodeGenConfig(vocab_size=89, n_embd=32, n_layer=2, n_head=4, n_positions=96, rotary_dim=4, **ENDS)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    fast = gb.decoder(model, 4, 96, verify=False)
    assert "CodeGenForCausalLM" in fast.path and "docs/models.md" in fast.path
    want = [cases.hugging_face(model, prompt, 12) for prompt in cases.prompts()]
    assert fast.generate(cases.prompts(), max_new_tokens=12).tokens == want


def test_the_models_own_forward_can_be_asked_for(device):
    fast = cases.shared("Qwen2", str(device), fused=False)
    assert fast.path == "fused=False was asked for"
    want = cases.shared("Qwen2", str(device)).generate(cases.prompts(), max_new_tokens=12).tokens
    assert fast.generate(cases.prompts(), max_new_tokens=12).tokens == want


# The products of wide batches know no family: each family has few rows or many, and those that differ most have both.
@pytest.mark.parametrize(
    ("kind", "rows"),
    [*((kind, (1, 12)[at % 2]) for at, kind in enumerate(cases.ALL)), ("Qwen2", 12), ("Gemma2", 12), ("Phi3", 1)],
)
def test_bf16_logits_are_as_near_to_fp32_as_the_models_own(kind, rows, device):
    """Teacher-forced, so that one flipped token does not end the comparison; 12 rows take the products of wide batches."""
    model = cases.build(kind, torch.bfloat16, device)
    ids = cases.prompts(26)[0]
    fast = gb.decoder(model, rows, cases.ROOM, verify=False)
    row = torch.tensor(ids, device=device)
    ours = []
    with torch.no_grad():
        fast.body.prefill(row[:20].expand(rows, -1), torch.full((rows,), 20, device=device))
        for place in range(20, 26):
            token, position = (torch.full((rows,), value, dtype=torch.int32, device=device) for value in (ids[place], place))
            fast.body.begin(token)
            ours.append(fast.body.step(token, position)[-1].clone())
    own = cases.logits(model, ids)[20:]
    truth = cases.logits(model.float(), ids)[20:]
    error, own_error = ((torch.stack(ours) - truth).norm() / truth.norm(), (own - truth).norm() / truth.norm())
    assert error <= 1.2 * own_error and own_error < 0.05


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3"])
def test_a_prompt_in_chunks_gives_the_same_tokens(kind, monkeypatch, device):
    want = cases.shared(kind, str(device)).generate(cases.prompts(45, 30), max_new_tokens=9).tokens
    monkeypatch.setattr(transformer, "CHUNK", 16)
    fast = gb.decoder(cases.build(kind, device=device), 2, cases.ROOM, verify=False)
    assert fast.generate(cases.prompts(45, 30), max_new_tokens=9).tokens == want


@pytest.mark.parametrize(
    "kind, max_batch", [("Qwen3", 2), ("Qwen3", 9), ("Gemma2", 2), ("Gemma3", 2), ("Olmo2", 2), ("Olmo2", 9), ("Phi3", 2)]
)
def test_interpreted_kernels_give_the_same_tokens(kind, max_batch, interpret):
    """The Triton kernels under the interpreter, in both forms of a step: of few rows and of more."""
    wide = max_batch > 8  # without a prompt to prefill, which 9 rows of an interpreter take long over
    given, model = (
        (cases.prompts(1) * 9 if wide else cases.prompts(5)),
        cases.build(kind, num_hidden_layers=1, **one_type(kind)),
    )
    sampled = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 20, "seed": 3}
    fast = gb.decoder(model, max_batch, 16, k=1, verify=False)
    want = [fast.generate(given, **how).tokens for how in ({"max_new_tokens": 2 - wide}, sampled)]
    interpret()
    fast = gb.decoder(model, max_batch, 16, k=1, verify=False)
    assert fast.body.report()[0][1] == "triton: norm_product"
    assert [fast.generate(given, **how).tokens for how in ({"max_new_tokens": 2 - wide}, sampled)] == want


def test_how_many_rows_are_few():
    """Two where cuBLAS may read the weights, four of packed ones; eight of experts, or where a row must get the bits of a plain
    step."""
    for kind, how, few in (
        ("Mistral", {}, 2),
        ("Mistral", {"speculate": 3}, 8),
        ("Mistral", {"weights": "int8"}, 4),
        ("Mixtral", {}, 8),
    ):
        body = cases.shared(kind, max_batch=9, **how).body
        assert body.gemv_rows == few, (kind, how)


def one_type(kind: str) -> dict:
    """Of a family whose layers are of two types, what one layer is."""
    return {"layer_types": ["sliding_attention"]} if kind in ("Gemma2", "Gemma3") else {}


@torch.no_grad()
def prune(layer, rows=slice(None), columns=slice(None)):
    layer.weight = torch.nn.Parameter(layer.weight[rows, columns].clone())


def prune_heads(model):
    """Layer 0 keeps one key head of two, and the two query heads that read it."""
    attention = model.model.layers[0].self_attn
    for layer, rows in ((attention.q_proj, 16), (attention.k_proj, 8), (attention.v_proj, 8)):
        prune(layer, slice(rows))
    prune(attention.o_proj, columns=slice(16))


UNEVEN = {
    "model.layers.0.self_attn has 2, 1 and 1 heads of q, k and v, and the config says 4, 2 and 2": prune_heads,
    "model.layers.0.self_attn: only some of the layers that read its input have a bias": lambda model: give_bias(
        model.model.layers[0].self_attn.q_proj
    ),
    "model.layers.1.mlp: only some of the layers that read its input have a bias": lambda model: give_bias(
        model.model.layers[1].mlp.up_proj
    ),
}


def give_bias(layer):
    layer.bias = torch.nn.Parameter(torch.ones_like(layer.weight[:, 0]))


@pytest.mark.parametrize("why", UNEVEN)
def test_layers_that_differ_are_computed_by_their_own_forward(why, device):
    """The kernels of a step take one number of heads for all layers, and one product has a bias or none."""
    model = cases.build("Llama", device=device)
    behind = gb.decoder(model, 1, cases.ROOM)
    UNEVEN[why](model)
    assert refusal(gb.GenerateError, lambda: behind.generate(cases.PROMPT, max_new_tokens=9)) == message(
        "decode/parity:a_layer_with_other_heads", why
    )
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == why
    assert fast.generate(cases.PROMPT, max_new_tokens=9).tokens[0] == cases.hugging_face(model, cases.PROMPT, 9)


@pytest.mark.parametrize("fused", [True, False])
def test_a_window_that_the_family_ignores(fused):
    """A Llama that was a Mistral keeps sliding_window: its attention sees all, the layers of transformers' cache do not."""
    model, (prompt,) = cases.build("Llama", sliding_window=5), cases.prompts(20)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    fast = gb.decoder(model, 1, cases.ROOM, fused=fused)
    assert fast.generate([prompt], max_new_tokens=8, stop=()).tokens == [ids[20:]]


def test_the_window_of_a_config_that_is_not_transformers():
    """Such a class may set its fields in __init__, so that the class alone does not have them."""

    class Config:
        def __init__(self):
            self.sliding_window = 4

    llama = transformers.LlamaConfig(sliding_window=4)
    assert config_window(Config()) == 4 and config_window(llama) is None and config_window(None) is None
