"""A placed model computes what it computed before: training, padding, positions, generation, autocast, checkpointing."""

import copy

import pytest
import torch

import gpubound as gb
from gpubound import trace
from gpubound.models.registry import cache_in
from tests.messages import message

from .models import CONFIGS, VOCABULARY, assert_close, batch, placed, tiny, tokens, training_run, twin


def place(model, **options):
    """Strict: whatever a test means to be swapped is swapped."""
    return gb.place(model, "cpu", strict=True, **options)


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_every_gradient(kind):
    model, other, placement = placed(kind)
    before = placement.fallbacks
    assert_close(training_run(model, batch()), training_run(other, batch()))
    assert placement.verified and placement.refused == placement.fallbacks - before == 0


@pytest.mark.parametrize("kind", ["llama tied", "qwen3"])
def test_loss_and_every_gradient_in_fp64(kind):
    """Hugging Face computes norms and angles in fp32 whatever the dtype: that is all that may differ."""
    model = tiny(kind, torch.float64)
    want = training_run(twin(model), batch())
    place(model)
    got = training_run(model, batch())
    assert want["loss"].dtype == torch.float32
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_error_is_no_larger_than_before(dtype):
    model = tiny("llama", dtype)
    truth, own = training_run(twin(model).float(), batch()), training_run(twin(model), batch())
    place(model)
    got = training_run(model, batch())
    for name, t in truth.items():
        error, before = ((g[name].float() - t).norm() / t.norm() for g in (got, own))
        assert error <= 1.5 * before + 2 * torch.finfo(dtype).eps, f"{name}: {error:.2e}, before {before:.2e}"


def test_loss_over_a_larger_batch():
    """num_items_in_batch, as Trainer passes it with gradient accumulation; shift_labels, as sequence parallelism does."""
    model = tiny()
    other = twin(model).train()
    place(model)
    model.train()
    shifted = batch() | {"shift_labels": torch.roll(batch()["labels"], -1, 1)}
    for extra in ({"num_items_in_batch": 31}, {"num_items_in_batch": torch.tensor(31)}, {"ignore_index": -7}):
        inputs = batch() | extra
        inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, extra.get("ignore_index", -100))
        torch.testing.assert_close(model(**inputs).loss, other(**inputs).loss)
    torch.testing.assert_close(model(**shifted).loss, other(**shifted).loss)


PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, 9:] = 0
LEFT = PADDED.flip(1)
READS = {
    "plain": {},
    "right-padded": {"attention_mask": PADDED},
    "left-padded": {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).clamp_min(0)},
    "all ones": {"attention_mask": torch.ones(2, 12, dtype=torch.long)},
    "shifted positions": {"position_ids": torch.arange(12)[None] + 5},
    "positions of each row": {"position_ids": torch.stack([torch.arange(12), torch.arange(12) + 20])},
    "documents packed in a row": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]] * 2)},
    "4D mask": {"attention_mask": torch.ones(12, 12, dtype=torch.bool).tril(-0).expand(2, 1, 12, 12)},
    "hidden states": {"output_hidden_states": True},
    "tuple": {"return_dict": False},
}


PLAIN = [name for name in CONFIGS if " " not in name]
UNLIKE = ("llama", "smollm3", "gemma2", "gemma4", "olmo2", "phi3", "cohere2", "deepseek_v3", "gpt_oss")  # in their forwards


@pytest.mark.parametrize("kind", PLAIN)
def test_logits(kind):
    """With a cache and without, in turn: each kind and each way to read has both. Families that read as others do take half."""
    model, other = (twin(each).eval() for each in placed(kind)[:2])  # output_hidden_states leaves hooks on its layers
    first, step = (0, 1) if kind in UNLIKE else (PLAIN.index(kind) % 2, 2)
    for number, (name, keywords) in enumerate([*READS.items()][first::step], PLAIN.index(kind) // step):
        inputs = {"input_ids": tokens(), "use_cache": bool(number % 2), **keywords}
        got, want = model(**inputs), other(**inputs)
        if name == "tuple":
            torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
            continue
        rows = keywords.get("attention_mask")
        here = rows.bool() if rows is not None and rows.ndim == 2 else torch.ones(2, 12, dtype=torch.bool)
        torch.testing.assert_close(got.logits[here], want.logits[here], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert (cache_in(got) is None) == (cache_in(want) is None)
        if name == "hidden states":
            assert len(got.hidden_states) == len(want.hidden_states)
            for a, b in zip(got.hidden_states, want.hidden_states):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", PLAIN)
def test_training_on_padded_rows_takes_the_fused_loop(kind):
    model, other, placement = placed(kind)
    before = placement.fallbacks
    inputs = batch() | {"attention_mask": PADDED}
    inputs["labels"] = inputs["labels"].masked_fill(PADDED == 0, -100)
    assert_close(training_run(model, inputs), training_run(other, inputs))
    assert placement.fallbacks == before


@pytest.mark.parametrize(
    ("cache", "kind"),
    [(c, kind) for at, kind in enumerate(PLAIN) for i, c in enumerate(("dynamic", "static")) if kind in UNLIKE or at % 2 == i],
)
def test_generate_the_same_tokens(kind, cache):
    model, other, _ = placed(kind)
    model.eval(), other.eval()
    ids, mask = tokens(length=6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))


@pytest.mark.parametrize("kind", ["mistral", "phi3"])
def test_sequence_longer_than_the_window(kind):
    model = tiny(kind, sliding_window=5)
    want = training_run(twin(model), batch())
    placement = place(model)
    assert_close(training_run(model, batch()), want)
    (row,) = [row for row in placement.rows if row.fallbacks]
    assert row.reasons == {"the sequence is longer than the sliding window of 5": 1}
    inputs = batch(length=5)
    want = training_run(twin(model), inputs)
    assert_close(training_run(model, inputs), want)
    assert placement.fallbacks == 1, "five tokens fit the window"


@pytest.mark.parametrize("kind, reentrant", [("llama", False), ("llama", True), ("olmo2", False)])
def test_gradient_checkpointing(kind, reentrant):
    model = tiny(kind)
    want = training_run(twin(model), batch())
    placement = place(model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its older name
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_close(training_run(model, batch()), want)
    assert placement.fallbacks == 0


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_autocast(kind):
    model, other, placement = placed(kind)
    before = placement.fallbacks
    with torch.autocast("cpu", torch.bfloat16):
        got, want = training_run(model, batch()), training_run(other, batch())
    assert all(g.dtype == want[name].dtype for name, g in got.items())
    assert_close(got, want, 5e-2)
    assert placement.fallbacks == before


def test_inputs_embeds_and_positional_arguments():
    model = tiny()
    other = twin(model).eval()
    place(model)
    model.eval()
    ids, mask = tokens(), torch.ones(2, 12, dtype=torch.long)
    torch.testing.assert_close(model(ids, mask).logits, other(ids, mask).logits)
    torch.testing.assert_close(model.model(ids, mask)[0], other.model(ids, mask)[0])
    embeddings = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeddings).logits, other(input_ids=ids).logits)
    with pytest.raises(ValueError, check=message("place/same_results:inputs_embeds_and_positi")):
        model.model()


def test_training_holds_no_cache_and_no_logits_unless_asked():
    model = tiny()
    place(model)
    model.train()
    output = model(**batch())
    assert output.logits is None and cache_in(output) is None
    assert cache_in(model(input_ids=tokens(), use_cache=True)) is not None
    assert model.train()(input_ids=tokens()).logits.shape == (2, 12, VOCABULARY)
    assert model.eval()(**batch()).logits.shape == (2, 12, VOCABULARY)


def test_a_loss_of_its_own_is_kept():
    model = tiny()
    placement = place(model)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean() + vocab_size
    assert model.train()(**batch()).loss > VOCABULARY
    assert placement.rows[0].reasons == {"the model has its own loss function": 1}


def test_dynamic_rope_keeps_its_own_loop():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("llama", rope_parameters=rope)
    want = training_run(twin(model), batch())
    placement = gb.place(model, "cpu")
    assert_close(training_run(model, batch()), want)
    row = next(r for r in placement.rows if r.module == "model")
    assert row.why == message("place/same_results:dynamic_rope_keeps_its_o")


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_scaled_rope(rope):
    parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny("llama", rope_parameters=parameters)
    want = training_run(twin(model), batch())
    place(model)
    assert_close(training_run(model, batch()), want)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # SDPA has no rule for vmap
def test_an_ensemble_by_vmap():
    """torch.func's own way: one model on the meta device, the weights and buffers of several stacked."""
    models, ids = [tiny(), tiny()], batch()["input_ids"]
    with torch.no_grad():
        models[1].lm_head.weight.mul_(2)
        want = torch.stack([model(ids, use_cache=False).logits for model in models])
    for model in models:
        place(model)
    parameters, buffers = torch.func.stack_module_state(models)
    empty = copy.deepcopy(models[0]).to("meta")

    def one(parameters, buffers):
        return torch.func.functional_call(empty, (parameters, buffers), (ids,), {"use_cache": False}).logits

    torch.testing.assert_close(torch.vmap(one)(parameters, buffers), want)


@pytest.mark.slow
def test_torch_compile_traces_a_placed_model():
    model = tiny(num_hidden_layers=1)
    other = twin(model).eval()
    place(model)
    compiled = torch.compile(model.eval(), backend="eager")
    for length in (12, 7, 9):  # from the second on, the compiler has symbols for sizes
        ids = tokens()[:, :length]
        torch.testing.assert_close(compiled(input_ids=ids).logits, other(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_a_placed_model_trains_under_strict():
    model = tiny()
    place(model)
    with trace.strict():
        training_run(model, batch())


def test_reading_the_cache_of_outputs_asks_for_no_deprecated_name():
    """Outputs of transformers 5.24 take the older name, and warn at it."""

    class Outputs(dict):
        def __contains__(self, key):
            assert key != "past_key_values"
            return super().__contains__(key)

        __getitem__ = None

    assert cache_in(Outputs(cache=5)) == 5 and cache_in({"past_key_values": 6}) == 6 and cache_in({"logits": 7}) is None
