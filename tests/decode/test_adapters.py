"""Decoding a model whose adapters are on: the tokens of the model that adds them, without a merge."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import transformer as calls
from gpubound.decode.weight_view import bind
from gpubound.kernels import dispatch
from gpubound.kernels.decode_adapters import EMPTY
from gpubound.lora.layers import adapted_layers
from tests.messages import message, refusal

from . import cases

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
NEW = 9


def adapt(model, rank=4, seed=3, **options):
    torch.manual_seed(seed)
    gb.lora.add(model, rank, alpha=2 * rank, init=False, **options)
    return model


def of(fast, prompt=cases.PROMPT, **settings):
    return fast.generate(prompt, max_new_tokens=NEW, **settings).tokens[0]


def peft_model(kind="Llama", **options):
    torch.manual_seed(4)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options
    return peft.get_peft_model(cases.build(kind), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()


def test_our_own_models_forward_knows_its_adapters():
    """Its transformers twin has layers of its own over the same parameters: none may be without what the record says."""
    model = adapt(cases.build("own", qkv_bias=False, qk_norm=False))
    fast = gb.decoder(model, 1, cases.ROOM, fused=False, verify=False)
    want = of(fast)
    assert want == cases.greedy_by_forwards(model, cases.PROMPT, NEW)
    with gb.lora.disable(model):
        assert of(fast) == cases.greedy_by_forwards(model, cases.PROMPT, NEW) != want


@pytest.mark.parametrize("fused", [True, False])
def test_pefts_wrapper_is_decoded_as_it_is(fused):
    model = peft_model()
    fast = gb.decoder(model, 1, cases.ROOM, fused=fused, verify=False)
    want = cases.hugging_face(model, cases.PROMPT, NEW)
    assert of(fast) == want
    with model.disable_adapter():
        assert of(fast) == cases.hugging_face(model, cases.PROMPT, NEW) != want
    assert of(fast) == want


def test_what_the_kernels_do_not_take_is_a_counted_fallback():
    model = peft_model(use_dora=True)
    why = r"decoder: the fused kernels: would fall back: model\.layers\.0"
    with pytest.raises(gb.errors.FallbackError, match=why), gb.strict():
        gb.decoder(model, 1, cases.ROOM)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path
    assert of(fast) == cases.hugging_face(model, cases.PROMPT, NEW)


KINDS = ["Llama", "Llama placed", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Mixtral", "Gemma2", "Gemma3", "Olmo2", "Phi3", "own"]


def followed(fast):
    return cases.followed(fast, NEW)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_decodes_as_its_own_forward_does(kind, device):
    model = adapt(cases.build(kind, device=device))
    fast = gb.decoder(model, 2, cases.ROOM, verify=kind in ("Llama", "Mixtral", "Gemma3", "Phi3"))
    assert not fast.path and (fast.certificate is None or fast.certificate.logits_error is not None)
    followed(fast)


def test_the_tokens_are_those_of_the_merged_model(device):
    model = adapt(cases.build("Llama", device=device))
    fast = gb.decoder(model, 2, cases.ROOM, verify=False)
    found = fast.generate(cases.prompts(7, 19), max_new_tokens=NEW).tokens
    gb.lora.merge(model)
    assert gb.decoder(model, 2, cases.ROOM, verify=False).generate(cases.prompts(7, 19), max_new_tokens=NEW).tokens == found
    assert fast.generate(cases.prompts(7, 19), max_new_tokens=NEW).tokens == found  # bound anew, without adapters


@pytest.mark.parametrize("settings", [{"speculate": 3}, {"cache": "int8"}, {"pages": 9}, {"k": 3}])
def test_every_way_of_decoding(settings, device):
    model = adapt(cases.build("Llama", device=device))
    want = gb.decoder(model, 2, cases.ROOM, verify=False).generate(cases.prompts(7, 19), max_new_tokens=NEW)
    fast = gb.decoder(model, 2, cases.ROOM, **settings, verify="cache" in settings)
    assert not fast.path
    found = fast.generate(cases.prompts(7, 19), max_new_tokens=NEW)
    if "cache" in settings:  # which rounds
        assert fast.certificate.logits_error < 1.5 * fast.certificate.cache_error
    else:
        assert found.tokens == want.tokens


def test_many_rows_and_long_prompts(device):
    model = adapt(cases.build("Llama", device=device))
    fast = gb.decoder(model, 12, cases.ROOM, verify=False)
    given = cases.prompts(*range(3, 15))
    cases.assert_greedy(fast, given, NEW)


def test_two_adapters_of_other_ranks_on_other_layers(device):
    model = adapt(cases.build("Qwen2", device=device), 3, targets=["q_proj", "v_proj"])
    adapt(model, 7, seed=5, targets=r"model\.layers\.1\..*(v|o|down)_proj", name="second")
    fast = gb.decoder(model, 2, cases.ROOM, verify=False)
    both = followed(fast)
    assert not fast.path
    gb.lora.disable(model, "default")
    assert followed(fast) != both
    gb.lora.remove(model, "second")
    followed(fast)


def test_one_adapted_product_alone(device):
    """No other product empties what it leaves behind."""
    model = adapt(cases.build("Llama", device=device), targets=r"model\.layers\.1\.mlp\.down_proj")
    followed(gb.decoder(model, 2, cases.ROOM, verify=False))


def test_training_goes_on_and_the_next_token_sees_it(device):
    model = adapt(cases.build("Llama", device=device))
    fast = gb.decoder(model, 2, cases.ROOM, verify=False)
    before = of(fast)
    bound = fast.body.layers[0]
    with torch.no_grad():
        for p in gb.lora.parameters(model):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p))
    assert followed(fast) != before
    assert fast.body.layers[0] is bound


@pytest.mark.parametrize("targets, fused", [("all-linear", True), ("all-linear", False), (["embed_tokens"], True)], ids=str)
def test_a_scale_that_is_set_by_hand_is_heard(targets, fused, device):
    model = adapt(cases.build("Llama", device=device, tie_word_embeddings=False), targets=targets)
    fast = gb.decoder(model, 2, cases.ROOM, fused=fused, verify=False)
    before = of(fast)
    for _, layer in adapted_layers(model):
        layer.scaling.update({name: -3 * scale for name, scale in layer.scaling.items()})
    assert fast.bound.moved() is not None  # graphs hold the scale, too
    assert followed(fast) != before
    assert fast.bound.moved() is None


def test_graphs_of_a_models_own_forward_hear_of_a_switched_table(device):
    model = adapt(cases.build("Llama", device=device, tie_word_embeddings=False), targets=["embed_tokens"])
    fast = gb.decoder(model, 2, cases.ROOM, verify=False)
    assert followed(fast) and fast.bound.moved() is None
    gb.lora.disable(model)
    assert fast.bound.moved() == "model.embed_tokens"
    followed(fast)


def test_pefts_adapters_without_a_merge(device):
    model = peft_model().to(device)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    fast = gb.decoder(model, 2, cases.ROOM, verify=False)
    assert not fast.path
    found = []
    for name in ("default", "second"):
        model.set_adapter(name)
        found.append(followed(fast))
    with model.disable_adapter():
        found.append(followed(fast))
    assert len(set(map(tuple, found))) == 3


def test_an_adapter_that_no_kernel_adds_is_a_fallback(device):
    model = adapt(cases.build("Llama", device=device, tie_word_embeddings=False), targets=["lm_head", "q_proj"])
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == message("decode/adapters:an_adapter_that_no_kerne")
    followed(fast)


def test_packed_weights_wait_until_adapters_are_merged():
    model = adapt(cases.build("Llama"))
    why = "its kernels add no adapters, and the model's are on; merge them, switch them off, or pass weights=None."
    assert refusal(gb.GenerateError, lambda: gb.decoder(model, 1, cases.ROOM, weights="int8")) == message(
        "decode/adapters:packed_weights_wait_unti", why
    )
    with gb.lora.disable(model):
        fast = gb.decoder(model, 1, cases.ROOM, weights="int8")
        of(fast)
    with pytest.raises(gb.GenerateError):
        of(fast)


def test_a_cpus_own_step_adds_them_too(monkeypatch):
    monkeypatch.setattr("gpubound.decode.cpu_step.fits", lambda device: device.type == "cpu")
    model = adapt(cases.build("Phi3"))
    fast = gb.decoder(model, 2, cases.ROOM, verify=False)
    assert fast.body.host and followed(fast)


@pytest.mark.slow
@pytest.mark.parametrize("kind, targets", [("Llama", "all-linear"), ("Qwen3", ["q_proj", "v_proj"]), ("Phi3", "all-linear")])
def test_interpreted_kernels_give_the_same_tokens(kind, targets, interpret):
    model = adapt(cases.build(kind, num_hidden_layers=1), targets=targets)
    assert cases.interpreted_report(interpret, model, cases.prompts(5, 3), 3)[0][1] == "triton: norm_product"


def test_a_step_that_broke_off_leaves_nothing_to_the_next_request(monkeypatch, interpret):
    """What passes inside a product is emptied by the next one, which an error or Ctrl-C may keep from being launched."""
    interpret()
    fast = gb.decoder(adapt(cases.build("Llama", num_hidden_layers=1)), 1, 16, k=1, verify=False)

    def empty():
        return [bool((product.h == EMPTY).all()) for product in fast.body.adapting.products]

    def broken_off(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("gpubound.kernels.norm_gate_up", broken_off)
        with pytest.raises(KeyboardInterrupt):
            fast.generate([5], max_new_tokens=2)
    assert empty() == [True, False, True, True]
    fast.body.choose(None)
    assert all(empty())


def three(device):
    """A model with three adapters."""
    model = adapt(cases.build("Llama", device=device), 4, name="x")
    adapt(model, 2, seed=5, targets=["q_proj", "v_proj", "down_proj"], name="y")
    return adapt(model, 3, seed=6, targets=r"model\.layers\.1\..*_proj", name="z")


def assert_each_alone(model, names, given, found):
    """What the model with that adapter alone finds likeliest after the prompt and each of the tokens."""
    for name, prompt, tokens in zip(names, given, found, strict=True):
        with gb.lora.disable(model):
            if name is not None:
                gb.lora.enable(model, name)
            assert tokens == cases.likeliest(model, prompt, tokens)


@pytest.mark.parametrize("settings", [{}, {"speculate": 2}, {"pages": 20}])
@pytest.mark.parametrize("rows", [4, 10])
def test_each_row_has_its_own_adapter(rows, settings, device):
    model = three(device)
    given, names = cases.prompts(*range(3, 3 + rows)), (["x", "y", None, "z"] * 3)[:rows]
    fast = gb.decoder(model, rows, cases.ROOM, **settings, verify=False)
    assert_each_alone(model, names, given, fast.generate(given, max_new_tokens=NEW, adapters=names).tokens)
    every = of(fast)  # the next request has all of them again
    assert every == cases.likeliest(model, cases.PROMPT, every)


@pytest.mark.parametrize("length", [3, 90])
@pytest.mark.parametrize("names", [["x", None, "x"], [None] * 3])
def test_an_adapter_that_has_diverged_spoils_no_rows_but_its_own(length, names, device):
    model = three(device)
    fast = gb.decoder(model, 4, cases.ROOM, verify=False)
    given = cases.prompts(length, length, length)
    want = fast.generate(given, max_new_tokens=5, adapters=names).tokens
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            if "z" in layer.lora_B:
                layer.lora_B["z"].weight.fill_(torch.nan)
    assert fast.generate(given, max_new_tokens=5, adapters=names).tokens == want
    with pytest.raises(gb.GenerateError, check=message("decode/adapters:an_adapter_that_has_dive")):
        fast.generate(given, max_new_tokens=5, adapters="z")


def test_adapters_make_a_difference_row_by_row(device):
    model = three(device)
    fast = gb.decoder(model, 4, cases.ROOM, verify=False)
    found = fast.generate([cases.PROMPT] * 4, max_new_tokens=NEW, adapters=["x", "y", "z", None]).tokens
    assert len(set(map(tuple, found))) == 4
    again = [of(fast, adapters=[name]) for name in ("x", "y", "z", None)]
    assert again == found


def test_one_adapter_for_all_prompts_and_n_of_each(device):
    model = three(device)
    fast = gb.decoder(model, 4, cases.ROOM, verify=False)
    given = cases.prompts(5, 9)
    found = fast.generate(given, max_new_tokens=NEW, adapters=["y", None], n=2).tokens
    assert_each_alone(model, ["y", "y", None, None], given[:1] * 2 + given[1:] * 2, found)
    assert_each_alone(model, ["z", "z"], given, fast.generate(given, max_new_tokens=NEW, adapters="z").tokens)


def test_an_adapter_that_was_added_later_may_be_asked_for(device):
    model = three(device)
    fast = gb.decoder(model, 1, cases.ROOM, verify=False)
    adapt(model, 4, seed=9, name="late")
    assert_each_alone(model, ["late"], [cases.PROMPT], [of(fast, adapters=["late"])])


@pytest.mark.parametrize(
    "given, why",
    [
        (["x", "w"], "generate: adapters: got 'w', wanted one of those that are on: 'x', 'y', 'z'."),
        (["x"], "generate: adapters: got 1 for 2 prompts, wanted a name or None for each."),
    ],
)
def test_adapters_that_are_not_there(given, why):
    assert (
        refusal(
            ValueError,
            lambda: gb.decoder(three("cpu"), 2, cases.ROOM, verify=False).generate(cases.prompts(3, 4), adapters=given),
        )
        == why
    )


def test_a_stream_whose_adapter_is_off_when_it_begins_says_so():
    model = three("cpu")
    fast = gb.decoder(model, 1, cases.ROOM, verify=False)
    stream = fast.stream([5], adapters="x", max_new_tokens=2)
    gb.lora.disable(model, "x")
    assert refusal(ValueError, lambda: next(stream)) == message("decode/adapters:a_stream_whose_adapter_i")
    assert len(of(fast, adapters="y")) == NEW


def test_the_models_own_forward_has_no_rows_of_their_own():
    assert refusal(
        ValueError, lambda: gb.decoder(three("cpu"), 2, cases.ROOM, fused=False, verify=False).generate([5], adapters="x")
    ) == message("decode/adapters:the_models_own_forward_h")


def test_the_kernels_that_steps_ask_for_are_tested_early(monkeypatch):
    model, asked = adapt(cases.build("Qwen2"), targets=["q_proj", "v_proj", "down_proj", "up_proj"]), set()

    def noted(op, x, unable=None, shape=()):
        asked.add((op, tuple(shape)))
        return dispatch.implementation(op, x, unable, shape)

    monkeypatch.setattr("gpubound.kernels.decode_product.implementation", noted)
    of(gb.decoder(model, 1, cases.ROOM))
    assert {call for call in asked if call[0] != "norm_rows"} <= set(calls.kernel_calls(bind(model), None))


def test_inputs_of_the_delta_rule_with_an_adapter_are_two_products(device):
    """Four weights have adapters of their own each, and a product has three."""
    model = peft_model("Qwen3_5", r=2, target_modules=["in_proj_a"], init_lora_weights=False).to(device)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == "" and len(fast.body.layers[0].attention.products) == 3
    cases.assert_greedy(fast, cases.prompts(6), 5)
