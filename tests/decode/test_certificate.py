"""What the certificate finds: kernels, bindings, prefills and graphs that do not compute the model; and what it says."""

import re
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from inspect import signature

import pytest
import torch
from transformers import PreTrainedConfig

import gpubound as gb
from gpubound import kernels
from gpubound.decode import certificate, kv_cache, layer, transformer, weights
from gpubound.decode.runner import StepGraphs
from gpubound.decode.weight_view import WeightView, bind
from gpubound.kernels import dispatch, quantized_product
from gpubound.kernels.decode_product import rms_normed
from gpubound.kernels.packed_weights import round_inputs
from gpubound.lora.base import quantize_base
from gpubound.models import registry
from gpubound.models.reader import READ, unread_option
from gpubound.trace import hooked
from gpubound.train.precision import cast_inputs
from tests.messages import message, refusal

from ..models_table import class_of, config_of
from . import cases

OTHER = (
    r"decoder: the model's own logits are (?:[\d.e+-]+|inf) from what a model of its shape computes in fp32 \(limit 1e-03\): "
    r"it has an option the kernels do not know; pass fused=False\."
)
WRONG = (
    r"decoder: the kernels' logits are (?:[\d.e+-]+|nan) from fp32, the model's own only \d\.\de-07: they do not compute this "
    r"model; pass fused=False, and report it\."
)


def uncertified(kind: str = "Mistral", max_batch: int = 2, **options) -> str:
    return refusal(gb.GenerateError, lambda: gb.decoder(cases.build(kind, **options), max_batch, cases.ROOM))


def wrong(monkeypatch, door: str, change) -> None:
    """`change(door's result)` in place of what the decoder's body gets from a door."""
    module = layer if hasattr(layer, door) else kernels
    own = getattr(module, door)
    monkeypatch.setattr(module, door, lambda *given, **named: change(own(*given, **named)))


def slightly(result: torch.Tensor) -> torch.Tensor:
    return result.mul_(1.001)


@pytest.mark.parametrize("door", ["norm_product", "norm_gate_up", "add_product"])
def test_a_kernel_that_is_off_by_a_thousandth(door, monkeypatch):
    wrong(monkeypatch, door, slightly)
    assert re.fullmatch(WRONG, uncertified())


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Mixtral"])
def test_a_step_is_compiled_before_it_is_compared(kind, monkeypatch):
    """A model whose experts are chosen by kernels is not: garbage is no index."""
    want = gb.decoder(cases.build(kind), 2, cases.ROOM).generate([[1, 2, 3]], max_new_tokens=4).tokens
    order, steps = [], certificate._all_logits
    lengths, play = [], certificate._play

    def ahead(call, device):
        call()
        return lambda: order.append("ready")

    def all_logits(body, ids, rows):
        order.append("steps")
        return steps(body, ids, rows)

    def play_prompts(decoder, prompts, *rest):
        lengths.append(len(prompts[0]))
        return play(decoder, prompts, *rest)

    monkeypatch.setattr(certificate, "compile_ahead", ahead)
    monkeypatch.setattr(certificate, "_all_logits", all_logits)
    monkeypatch.setattr(certificate, "_play", play_prompts)
    decoder = gb.decoder(cases.build(kind), 2, cases.ROOM)
    assert decoder.generate([[1, 2, 3]], max_new_tokens=4).tokens == want
    dense = kind != "Mixtral"
    assert order[:3] == (["steps", "ready", "steps"] if dense else ["steps"]) and order.count("ready") == 2 * dense
    assert lengths[0] == lengths[1]  # a shorter prompt has other kernels


@pytest.mark.parametrize("kind, fewer", [("Mistral", True), ("Qwen3", True), ("Gemma3", False)])
def test_the_first_two_layers_and_the_last_launch_the_kernels_of_all(kind, fewer, interpret, monkeypatch):
    """But of layers with other constants, as a window, and those that read others' keys."""
    interpret()
    launches = list[list[tuple]]()

    def note(run, kernel, *arguments, **options):
        parameters = signature(kernel.fn).parameters.values()
        kinds = (dispatch._kind(a, "constexpr" in str(p.annotation)) for a, p in zip(arguments, parameters))
        named = {name: dispatch._kind(value, True) for name, value in options.items() if name != "grid"}
        launches[-1].append((kernel.fn.__name__, *kinds, *sorted(named.items())))  # and not run

    def ahead(call, device):
        launches.append([])
        with hooked(import_module("triton.runtime.interpreter").InterpretedFunction, "run", note):
            call()

    monkeypatch.setattr(certificate, "compile_ahead", ahead)
    many = {"num_hidden_layers": 5} if fewer else {}
    fast = gb.decoder(cases.build(kind, **many), 2, 16, k=1, verify=False)
    certificate._compile_step(fast, fast.body, 4)
    assert [len(group.layers) for group in fast.body.spans] == [5 if fewer else 2]
    monkeypatch.setattr(type(fast.body), "fewer_layers", lambda body: nullcontext())
    certificate._compile_step(fast, fast.body, 4)
    few, all_ = launches
    assert {*few} == {*all_} and (len(few) < len(all_)) == fewer and len(all_) > 20


def test_a_decoder_of_ours_with_hooks_is_not_sent_to_what_refuses_it_too():
    """ "pass fused=False" was the advice, and that computes by the weights alone."""
    model = cases.build("own")
    model.model.layers[0].register_forward_hook(lambda block, given, x: 1.5 * x)
    with pytest.raises(gb.GenerateError, check=message("decode/certificate:a_decoder_of_ours_with_h")):
        gb.decoder(model, 1, cases.ROOM)


@pytest.mark.parametrize("kind", ["own", "Mistral"])
def test_hooks_that_change_nothing_are_not_called_in_silence(kind, said):
    """They pass the certificate. Ours are no news, and transformers' own forward runs those that it finds."""
    model, calls = cases.build(kind), list[torch.nn.Module]()
    cast_inputs(model, torch.float32)
    gb.decoder(model, 1, cases.ROOM)
    assert "hooks" not in said()
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: calls.append(module))
    fast = gb.decoder(model, 1, cases.ROOM)
    calls.clear()
    fast.generate([5, 6], max_new_tokens=2)
    assert not calls
    assert said().endswith(
        "decoder: model.layers.1.mlp carries hooks, which do not run while the decoder generates: a step reads the weights "
        "and does not call it. Call the model itself where they are needed.\n"
    )


def test_hooks_that_a_static_cache_runs(said):
    model = cases.build("Mistral")
    model.model.layers[1].mlp.register_forward_hook(lambda *given: None)
    gb.decoder(model, 1, cases.ROOM, fused=False)
    assert "hooks" not in said()


def test_a_kernel_of_wide_batches_alone(monkeypatch):
    wrong(monkeypatch, "norm_rows", slightly)
    assert re.fullmatch(WRONG, uncertified(max_batch=9))
    gb.decoder(cases.build("Mistral"), 2, cases.ROOM)  # which never calls it


def test_a_prefill_of_its_own(monkeypatch):
    """The keys that a prefill writes, one token late; single steps have written the right ones."""
    own = transformer.FusedRunner.streamed
    monkeypatch.setattr(transformer.FusedRunner, "streamed", lambda body, ids, start: own(body, ids.roll(1, 1), start))
    assert re.fullmatch(WRONG, uncertified())


def test_an_attention_that_reads_beyond_the_live_length(monkeypatch):
    """What lies there is NaN while the certificate is made."""
    own = kv_cache.decode_attention

    def longer(qkv, position, held, heads, scratch, out, mode):
        found, place = own(qkv, position, held, heads, scratch, out, mode), position.long() + 1
        return out.add_(held.v[torch.arange(len(out)), :, place].repeat_interleave(2, 1).flatten(1) * 1e-9), *found[1:]

    monkeypatch.setattr(kv_cache, "decode_attention", longer)
    assert re.fullmatch(WRONG, uncertified())


def bound(monkeypatch, layers=None, shape=None) -> None:
    """Let a model be bound wrongly from its first reading on."""
    own = WeightView._read

    def changed(attention):
        """Of a norm or a product, `layers` may change parts alone."""
        values = {
            name: getattr(attention, name)._replace(**value) if isinstance(value, dict) else value
            for name, value in (layers or {}).items()
        }
        return replace(attention, **values)

    def read(live):
        own(live)
        live.layers = [layer._replace(attention=changed(layer.attention)) for layer in live.layers]
        live.shape = replace(live.shape, **(shape or {}))

    monkeypatch.setattr(WeightView, "_read", read)


@pytest.mark.parametrize(
    ("kind", "layers", "shape"),
    [
        ("Mistral", {"window": 0}, {}),
        ("Mistral", {"window": 23}, {}),
        ("Mistral", {"norm": {"eps": 1e-3}}, {}),
        ("Mistral", {"scale": 0.36}, {}),
        ("Qwen2", {name: {"bias": None} for name in "qkv"}, {}),
        ("Qwen3", {"q_norm": None, "k_norm": None}, {}),
        ("Qwen3", {"q_norm": {"eps": 1e-2}, "k_norm": {"eps": 1e-2}}, {}),
        ("SmolLM3", {"table": 0}, {}),
        ("Gemma2", {"cap": 0.0}, {}),
        ("Gemma2", {"window": 0}, {}),
        ("Gemma2", {"post_norm": {"offset": 0.9}}, {}),
        ("Gemma2", {}, {"logit_cap": 0.0}),
        ("Gemma2", {}, {"embedded": 1.0}),
        ("Gemma3", {"table": 0}, {}),
        ("Gemma3", {"q_norm": {"offset": 0.9}, "k_norm": {"offset": 0.9}}, {}),
        ("Gemma4Unified", {"v_eps": 0.0}, {}),
        ("Olmo2", {"post_norm": None}, {}),
        ("Olmo2", {"q_norm": {"eps": 1.0}, "k_norm": {"eps": 1.0}}, {}),
        ("Phi3", {"window": 0}, {}),
    ],
)
def test_a_binding_that_leaves_something_out(kind, layers, shape, monkeypatch):
    """Bound whole, each of these passes: test_parity.py."""
    bound(monkeypatch, layers, shape)
    assert re.fullmatch(OTHER, uncertified(kind))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("ministral3", {}, "llama_4_scaling_beta"),  # scales queries by their position, beyond the original length
        ("olmoe", {"clip_qkv": 0.05}, "clip_qkv"),  # bounds q, k and v, which the certificate's texts may not reach
    ],
)
def test_an_option_that_a_reader_does_not_know_is_refused(kind, options, named, monkeypatch):
    """The certificate's eight tokens see neither length nor size. So a family's file has to name each option that it reads."""
    config = config_of(kind)
    for name, value in options.items():
        setattr(config, name, value)
    model = class_of(kind)(config).eval()
    family = "mixtral" if kind == "olmoe" else "hf_modules"
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    monkeypatch.setitem(registry.FAMILIES, family, registry.FAMILIES[family] | {kind: prefix})
    why = bind(model, 32)
    assert isinstance(why, str) and named in why


@pytest.mark.parametrize("kind", [*cases.FAMILIES, *cases.SPARSE, *cases.OTHERS, *cases.SAME, *cases.RECURRENT])
def test_every_option_of_the_families_is_known(kind):
    """A field that a newer transformers adds to one of these configs has to be read, or named as one without effect."""
    refused = {  # where they are not the class's defaults
        "Bamba": {"time_step_limit"},
        "FalconH1": {"time_step_limit"},
        "GraniteMoeHybrid": {"time_step_limit"},
        "Mamba2": {"time_step_limit"},
        "Gemma3": {"attn_logit_softcapping"},
        "Gemma4": {"enable_moe_block"},
        "Olmo": {"clip_qkv"},
        "Olmoe": {"clip_qkv"},
        "GPT2": {"add_cross_attention", "scale_attn_by_inverse_layer_idx"},
        "GPTBigCode": {"add_cross_attention"},
        "Falcon": {"alibi"},
        "OPT": {"do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"},
        "Cohere": {"use_qk_norm"},
        "Cohere2": {"use_qk_norm"},
        "Phi": {"qk_layernorm"},
        "StableLm": {"qk_layernorm"},
    }.get(kind.partition(" ")[0], set())
    config = cases.build(kind).config
    known = READ | type(registry.reader_of(cases.build(kind))).READS
    for name in signature(type(config)).parameters.keys() - signature(PreTrainedConfig).parameters.keys():
        assert name in known | refused, name
    assert unread_option(config, known) is None
    config.hidden_size, width = 48, "n_embd" if kind in ("GPT2", "GPTBigCode", "GPTJ") else "hidden_size"
    assert unread_option(config, known - {width}) == f"{width}=48"


def test_a_model_with_something_of_its_own():
    """A hook scales the output of a block: nothing in the model's shape says so."""
    model = cases.build("Mistral")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.1)
    assert re.fullmatch(OTHER, refusal(gb.GenerateError, lambda: gb.decoder(model, 1, cases.ROOM)))
    fast = gb.decoder(model, 1, cases.ROOM, fused=False)
    assert fast.generate([5, 6], max_new_tokens=16).tokens[0] == cases.greedy_by_forwards(model, [5, 6], 16)


@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("weights", ["int8", None], ids=["packed", "quantised"])
def test_products_of_levels_may_round_inputs_and_not_more(weights, times, monkeypatch):
    """To 16 bits, of which Gemma 4, whose scores have no factor, makes 2e-4 of its logits in fp32."""

    def off(definition, normed):
        def run(x, first, *rest):
            exact = rms_normed(x, first) if normed else x.float()
            return definition(exact + times * (round_inputs(exact, "int8") - exact), None if normed else first, *rest)

        return run

    for name in ("norm_product_reference", "norm_gate_up_reference", "add_product_reference"):
        monkeypatch.setattr(quantized_product, name, off(getattr(quantized_product, name), "norm" in name))
    with nullcontext() if times == 1 else pytest.raises(gb.GenerateError, match="do not compute this model"):
        model = cases.build("Gemma4")
        if weights is None:
            quantize_base(model, "int8")
        fast = gb.decoder(model, 1, cases.ROOM, weights=weights)
        assert certificate.FLOOR[torch.float32] < fast.certificate.logits_error < 4e-4


@pytest.mark.parametrize("fused", [True, False])
def test_a_graph_that_does_something_else(fused, monkeypatch):
    """Every eighth step of a launch is left out, as of a graph whose capture missed it."""
    monkeypatch.setattr(certificate, "ON_CPU", 12)
    own = StepGraphs.launch
    monkeypatch.setattr(StepGraphs, "launch", lambda graphs, rows, k, way: own(graphs, rows, k - (k == 8), way))
    with pytest.raises(gb.GenerateError) as error:
        gb.decoder(cases.build("Mistral"), 2, cases.ROOM, fused=fused)
    tokens = r"\[\[[\d, ]+\], \[[\d, ]+\]\]"  # of each row
    assert re.fullmatch(
        rf"decoder: greedy tokens of a graph of 8 steps are not those of single launches: {tokens}, wanted {tokens}; please "
        r"report it with the model's config\.",
        str(error.value),
    )


def test_weights_that_are_not_finite():
    model = cases.build("Mistral")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[1, 1] = float("inf")
    assert refusal(gb.GenerateError, lambda: gb.decoder(model, 1, cases.ROOM)) == message(
        "decode/certificate:weights_that_are_not_fin"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mistral", "own"])
def test_cache_rows_beyond_the_live_length_may_hold_anything(kind):
    fast = gb.decoder(cases.build(kind), 3, cases.ROOM)
    for settings in ({}, {"temperature": 1.0, "top_k": 20, "seed": 4}):
        found = []
        for value in (0.0, float("nan"), 1e30):
            for tensor in fast.body.cache.tensors:
                tensor.fill_(value)
            found.append(fast.generate(cases.prompts(), max_new_tokens=16, **settings).tokens)
        assert found[0] == found[1] == found[2]


def test_what_it_says():
    fast, compared = cases.shared("Mistral", verify=True), "greedy tokens equal between graph and single launches"
    assert re.fullmatch(
        rf"verified in \d+\.\d\d s: {2 * certificate.ON_CPU} {compared}; logits \d\.\de-07 from fp32 \(the model's own forward "
        r"\d\.\de-07\); cache beyond the live length poisoned",
        str(fast.certificate),
    )
    quick = gb.decoder(fast.model, 1, cases.ROOM, verify="quick").certificate
    assert quick.logits_error is None
    assert re.fullmatch(
        rf"verified in \d+\.\d\d s: {certificate.ON_CPU} {compared}; cache beyond the live length poisoned", str(quick)
    )


def test_none_is_not_silent(said):
    fast = gb.decoder(cases.build("Mistral"), 1, cases.ROOM, verify=False)
    assert fast.certificate is None and str(fast).endswith("\n  not verified")
    assert said() == message("decode/certificate:none_is_not_silent")


def test_the_table():
    head, path, *rows, _ = str(cases.shared("Llama", max_batch=9)).splitlines()
    assert head == message("decode/certificate:the_table")
    assert path == message("decode/certificate:the_table.2")
    assert rows == [
        message("decode/certificate:the_table.3"),
        message("decode/certificate:the_table.4"),
        message("decode/certificate:the_table.5"),
        message("decode/certificate:the_table.6"),
        message("decode/certificate:the_table.7"),
        message("decode/certificate:the_table.8"),
        message("decode/certificate:the_table.9"),
    ]
    assert str(cases.shared("Qwen2", fused=False)).splitlines()[1] == message("decode/certificate:the_table.10")


@pytest.mark.parametrize("most", [64, 6])
def test_rows_that_read_codes_together_are_checked_also_where_more_rows_unpack_them(most, monkeypatch):
    """In a decoder of ten rows, of which ten or six read codes together."""
    for module in (transformer, weights):
        monkeypatch.setattr(module, "MATMUL_ROWS", most)
    wrong(monkeypatch, "quantized_matmul", slightly)
    model = cases.build("Qwen3")
    quantize_base(model, "int8")
    assert re.fullmatch(WRONG, refusal(gb.GenerateError, lambda: gb.decoder(model, 10, cases.ROOM)))
