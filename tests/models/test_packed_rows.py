"""Language models on packed rows: logits of an example as of the example alone, loss and gradients as of the padded form."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM

import gpubound as gb
from gpubound import trace
from gpubound.models.language_model import first_row, hidden_of, logits_of, why_not_isolated
from gpubound.models.llama.decoder import PRESETS, Decoder, DecoderConfig
from gpubound.models.richards.model import RichardsConfig, RichardsDecoder
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.word_loss import CausalLM, NextToken
from gpubound.watch import watch
from gpubound.watch.pretend import simgpu

from ..place.models import assert_close, place, tiny
from .packed import examples, packed, padded, spans

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # PEFT asks for a name that it has renamed
ROWS = [[9, 4, 30], [2, 25], [41]]
OTHER_ROWS = [[41], [30, 2, 9], [25, 4]]  # the same examples
WIDTH = 48
OWN = {kind: {"sliding_window": 6} for kind in ("mistral", "gemma2", "gemma3")}
OWN["olmoe"] = {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}  # its mask and SDPA leave the window out
QWEN = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
OWN["mixtral"] = {"num_local_experts": 4, "sliding_window": 6}
OWN["qwen2_moe"] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
OWN["qwen2_moe"] |= QWEN
OWN["gpt_oss"] = {"sliding_window": 6}
KINDS = [
    "decoder",
    "llama",
    "mistral",
    "qwen3",
    "qwen3 windows",
    "gemma2",
    "gemma3",
    "gemma4",
    "smollm3",
    "olmo2",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "olmoe",
    "nemotron",
    "gpt_oss",
]


def make(kind):
    torch.manual_seed(0)
    if kind == "decoder":
        model = Decoder(PRESETS["tiny"])
        model.initialise(0.1)
        return model
    if kind == "gemma4":  # its scores have no factor: large weights would enlarge what rounding leaves
        return tiny(kind, sliding_window=6, initializer_range=0.05)
    return tiny("qwen3", **QWEN) if kind == "qwen3 windows" else tiny(kind, **OWN.get(kind, {}))


@functools.cache
def _placed(kind):
    model = make(kind)
    if kind != "decoder":
        place(model)
    return model


def made(kind, placed=True):
    """The model, or a copy of one that was placed: most of placing is verification, 0.1 s."""
    return copy.deepcopy(_placed(kind)) if placed else make(kind)


def batch_of(lengths=ROWS, pieces=None):
    by_length = {len(tokens) - 1: tokens for tokens in examples(sorted(length for row in ROWS for length in row), 89)}
    rows = [[by_length[length] for length in row] for row in lengths]
    return packed(rows, WIDTH, pieces), rows


def trained(model, batch):
    """The loss and all gradients of an objective's step."""
    model.train().zero_grad()
    loss, count = NextToken()(model, batch)
    loss.backward()
    found = {"loss": loss.detach() / count}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad / count
    return found


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def check(model, tolerance=2e-5):
    batch, rows = batch_of()
    model.eval()
    with torch.no_grad():
        logits = logits_of(model, inputs_of(batch))
        for r, span in spans(rows):
            alone = {"input_ids": batch["input_ids"][r : r + 1, span]}
            torch.testing.assert_close(logits[r, span], logits_of(model, alone)[0], rtol=1e-5, atol=1e-5)
        assert logits.isfinite().all()
    want = trained(model, padded([one for row in rows for one in row], WIDTH))
    assert_close(trained(model, batch), want, tolerance)
    assert_close(trained(model, batch_of(OTHER_ROWS)[0]), want, tolerance)


@pytest.mark.parametrize("placed", [False, True], ids=["as it is", "placed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_family(kind, placed):
    check(made(kind, placed))


@pytest.mark.parametrize("kind", ["decoder", "llama", "gemma3"])
def test_with_our_adapters(kind):
    model = make(kind)
    gb.lora.add(model, rank=4, alpha=8, init=False)
    check(model)


@pytest.mark.slow
@pytest.mark.parametrize("placed", [False, True], ids=["as it is", "placed"])
def test_with_pefts_adapters(placed):
    peft, model = pytest.importorskip("peft"), make("llama")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    if placed:
        place(model)
    check(model)


@pytest.mark.parametrize("placed", [False, True], ids=["as it is", "placed"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3 windows", "nemotron", "gpt_oss"])
def test_recomputed_layers_are_isolated_in_backward(placed, reentrant, kind):
    model = make(kind)
    want = trained(model, batch_of()[0])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if placed:
        place(model)
    model.enable_input_require_grads()
    assert_close(trained(model, batch_of()[0]), want)


@pytest.mark.parametrize("kind", ["llama", "qwen3 windows", "gemma2", "phi3", "gpt_oss"])
def test_a_placed_model_runs_its_own_loop(kind):
    model = made(kind)
    counted = [module.delegated for module in model.modules() if hasattr(module, "delegated")]
    before = [dict(counter) for counter in counted]
    hidden_of(model.train(), inputs_of(batch_of()[0]))
    assert len(counted) > 8 and [dict(counter) for counter in counted] == before


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3 windows", "gemma2", "gemma3"])
def test_positions_that_restart_mark_examples_for_a_placed_model(kind):
    """As transformers and TRL pack rows: without other fields. Rows longer than the window stay in the loop, too."""
    batch, _ = batch_of()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    want, model = outputs(make(kind), inputs), made(kind)
    before = model.model.delegated.total()
    assert_close(outputs(model, inputs), want)
    assert model.model.delegated.total() == before


def outputs(model, inputs):
    """The loss and all gradients of the model's own forward."""
    model.train().zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_eager_attention_too(kind):
    model = make(kind)
    model.set_attn_implementation("eager")
    check(model)


@pytest.mark.parametrize("placed", [False, True], ids=["as it is", "placed"])
@pytest.mark.parametrize("kind", ["decoder", "llama", "qwen3 windows", "mistral"])
def test_no_host_read(kind, placed):
    """On a pretend GPU, where every wait of the host for the device is counted."""
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one")
    sim = simgpu()
    model = made(kind, placed)
    model.to(sim)
    model.eval()
    batch = {name: value.to(sim) for name, value in inputs_of(batch_of()[0]).items()}
    with torch.no_grad():
        hidden_of(model, batch)
        with watch() as ledger:
            hidden_of(model, batch)
    assert (ledger.totals["syncs"], ledger.totals["h2d_copies"], ledger.totals["d2h_copies"]) == (0, 0, 0)


HOST_FULL = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes. "
    "Error code 12 (Cannot allocate memory)"
)


class Deaf(nn.Module):
    """A model with attention, or another mixer of tokens, that takes the bounds of examples and does not read them."""

    def __init__(self, mixes=True):
        super().__init__()
        self.embed, self.head, self.mixes = nn.Embedding(89, 16), nn.Linear(16, 89), mixes

    def forward(self, input_ids, position_ids=None, segment_ids=None, cu_seqlens=None):
        x = self.embed(input_ids)
        return self.head(x.cumsum(1) if self.mixes else x)


def test_a_model_that_does_not_isolate_is_refused():
    batch, _ = batch_of()
    assert why_not_isolated(Deaf(mixes=False), inputs_of(batch)) is None
    assert why_not_isolated(Deaf(), inputs_of(batch)).startswith("other tokens in an example change the next one by ")
    for objective in (NextToken(), CausalLM()):
        with pytest.raises(ValueError, match=objective.name) as error:
            objective(Deaf(), batch)
        assert "change the next one" in str(error.value) and "pack: none or stream" in str(error.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), HOST_FULL])
def test_packed_rows_are_not_blamed_for_too_little_memory(error, monkeypatch):
    model = Deaf(mixes=False)

    def full(*_):
        raise error

    monkeypatch.setattr(model.embed, "forward", full)
    with pytest.raises(RuntimeError) as raised:
        why_not_isolated(model, inputs_of(batch_of()[0]))
    assert raised.value is error


def test_a_family_with_other_layers_is_refused():
    """LFM2's convolutions read the tokens before, whatever their example."""
    config = Lfm2Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=89,
        layer_types=["conv", "full_attention"], block_multiple_of=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="packed rows"):
        NextToken()(Lfm2ForCausalLM(config), batch_of()[0])


@pytest.mark.parametrize("mixer", ["poly", "rg_lru"])
def test_other_mixers_are_refused(mixer):
    model = RichardsDecoder(RichardsConfig(16, 32, 1, 2, 2, 89, attention=mixer))
    for call in (logits_of, hidden_of):
        with pytest.raises(ValueError, match=f"packed rows: its mixer is '{mixer}'"):
            call(model, inputs_of(batch_of()[0]))


@pytest.mark.parametrize("options", [{}, {"mlp": "moe", "experts": 4, "balance": 0.0}], ids=["dense", "sparse"])
def test_softmax_of_a_richards_decoder(options):
    torch.manual_seed(0)
    check(RichardsDecoder(RichardsConfig(16, 32, 2, 2, 2, 89, attention="softmax", **options)))


@pytest.mark.parametrize("kind", ["decoder", "llama", "gemma2", "mixtral"])
def test_a_trial_in_16_bits(kind):
    """What other kernels round, or send to another expert, is no leak; a mixer that leaks is refused there, too."""
    assert why_not_isolated(make(kind).bfloat16(), inputs_of(batch_of()[0])) is None
    assert why_not_isolated(Deaf().bfloat16(), inputs_of(batch_of()[0])) is not None


def test_what_a_batch_may_not_have():
    batch = inputs_of(batch_of()[0])
    mask = torch.ones(3, WIDTH, dtype=torch.bool)
    with pytest.raises(ValueError, match="leave the attention_mask out"):
        hidden_of(make("llama"), batch | {"attention_mask": mask})
    with pytest.raises(ValueError, match="got a mask and packed rows"):
        make("decoder")(**batch, mask=mask)
    model = make("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention' attention, wanted 'sdpa'"):
        hidden_of(model, batch)


def test_the_first_row_has_its_own_bounds():
    batch, _ = batch_of()
    row = first_row(batch)
    assert torch.equal(row["cu_seqlens"], torch.tensor([0, 9, 13, 43, 48], dtype=torch.int32))
    model = make("decoder").eval()
    torch.testing.assert_close(logits_of(model, inputs_of(row)), logits_of(model, inputs_of(batch))[:1])


def test_the_decoder_takes_the_fields_as_keywords():
    batch, rows = batch_of()
    model = make("decoder")
    inputs = inputs_of(batch)
    torch.testing.assert_close(model(**inputs), logits_of(model, inputs))
    own = inputs | {"labels": batch["input_ids"].masked_fill(batch["segment_ids"] < 0, -100)}
    alone = [(batch["input_ids"][r : r + 1, span],) * 2 for r, span in spans(rows)]
    count = sum(ids.shape[1] - 1 for ids, _ in alone)
    want = sum(model.loss(*one, total=count) for one in alone if one[0].shape[1] > 1)
    torch.testing.assert_close(model.loss(**own, total=count), want)


def test_labels_shifted_by_the_objective_stay_in_their_example():
    batch, rows = batch_of()
    model = make("llama")
    own = batch | {"labels": batch["input_ids"].masked_fill(batch["segment_ids"] < 0, -100)}
    loss, count = CausalLM()(model, own)
    one_by_one = [
        CausalLM()(model, {"input_ids": ids, "labels": ids})
        for ids in (batch["input_ids"][r : r + 1, span] for r, span in spans(rows))
    ]
    assert count == sum(n for _, n in one_by_one) == sum(len(tokens) - 2 for row in rows for tokens in row)
    torch.testing.assert_close(loss, sum(total for total, _ in one_by_one))


def test_transformers_sdpa_without_segments_is_as_before():
    model, ids = make("llama").eval(), batch_of()[0]["input_ids"]
    want = make("llama").eval()(ids).logits
    hidden_of(model, inputs_of(batch_of()[0]))
    assert torch.equal(model(ids).logits, want)


def test_a_step_on_packed_rows_is_the_padded_one():
    """TrainStep, two micro-batches of packed rows: same loss, count, norm and weights as with one example a row."""
    packed_model, padded_model = made("llama"), make("llama")
    first, rows = batch_of()
    second, others = batch_of([[9, 30], [2, 4], [25]])
    results = []
    for model, batches in (
        (packed_model, [first, second]),
        (padded_model, [padded([one for row in group for one in row], WIDTH) for group in (rows, others)]),
    ):
        step = TrainStep(model, "next_token", AdamW(1e-3), accumulate=2, clip=1.0, precision="fp32", graph="off")
        results.append([step(batches).read() for _ in range(3)])
    for ours, theirs in zip(*results):
        assert ours.tokens == theirs.tokens == 111 + 70
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for (name, ours), theirs in zip(packed_model.named_parameters(), padded_model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


# On a GPU: the captured step, in 16 bits through torch's variable-length kernel.

GPU_KINDS = ["decoder", "llama", "qwen3 windows", "mistral", "gemma3", "nemotron"]


def big(kind):
    """A model with heads that the kernel takes."""
    torch.manual_seed(0)
    if kind == "decoder":
        return Decoder(DecoderConfig(256, 512, 2, 4, 2, 89), device="cuda")
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05, "pad_token_id": None}
    name, options = ("qwen3", QWEN) if kind == "qwen3 windows" else (kind, OWN.get(kind, {}))
    return tiny(name, **wide | options).cuda()


def steps_of_batches(count):
    """Batches of one shape, with other bounds in each."""
    layouts = (ROWS, OTHER_ROWS, [[2, 4, 9, 25], [41], [30]])
    return [{name: value.cuda() for name, value in batch_of(layouts[i % 3], pieces=5)[0].items()} for i in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("placed", [False, True], ids=["as it is", "placed"])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_captured_step_reads_each_batchs_bounds(kind, placed):
    """No wait, no fallback and one capture for all bounds; losses and norms of the eager step, and of fp32 but for rounding."""
    torch.use_deterministic_algorithms(False)  # its NaN fill would be captured, too
    reports, batches = {}, steps_of_batches(7)
    for how, precision, graph in (("exact", "fp32", "off"), ("eager", "bf16", "off"), ("captured", "bf16", "require")):
        model = big(kind)
        if placed and kind != "decoder":
            place(model, "require")
        step = TrainStep(model, "next_token", AdamW(1e-4), clip=1.0, precision=precision, graph=graph)
        results = [step(batch) for batch in batches[:3]]
        with watch() as ledger:
            results += [step(batch) for batch in batches[3:]]
        reports[how] = [result.read() for result in results]
        if how != "exact":
            ledger.assert_within(syncs=0, fallbacks=0)
        if how == "captured":
            assert [graph.name for graph in step.captured] == ["micro_batch", "update"]
    for exact, eager, captured in zip(reports["exact"], reports["eager"], reports["captured"]):
        assert exact.tokens == eager.tokens == captured.tokens == 111
        assert captured.loss == pytest.approx(eager.loss, rel=2e-3) and captured.loss == pytest.approx(exact.loss, rel=1e-2)
        assert captured.grad_norm == pytest.approx(eager.grad_norm, rel=2e-2)
        assert captured.grad_norm == pytest.approx(exact.grad_norm, rel=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_gradients_through_the_kernel(kind):
    """In bf16 the packed gradients are as near to fp32 as those of the padded form, whose attention is a mask's or causal."""
    model, (batch, rows) = big(kind), batch_of()
    groups = [one for row in rows for one in row]
    batch, one_a_row = ({name: value.cuda() for name, value in each.items()} for each in (batch, padded(groups, WIDTH)))
    truth = trained(model, batch)  # in fp32: the definition
    model.bfloat16()
    errors = []
    for each in (batch, one_a_row):
        found = trained(model, each)
        off = sum((found[name].double() - want.double()).square().sum() for name, want in truth.items()) ** 0.5
        errors.append((off / sum(want.double().square().sum() for want in truth.values()) ** 0.5).item())
    packed_error, padded_error = errors
    assert packed_error <= 1.25 * padded_error + 5e-3


@pytest.mark.gpu
def test_the_kernel_is_called():
    model, batch = big("llama"), steps_of_batches(1)[0]
    place(model.bfloat16(), "require")
    with trace.strict(), torch.profiler.profile(acc_events=True) as profile:
        hidden_of(model, inputs_of(batch))
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::_flash_attention_forward") == 2
