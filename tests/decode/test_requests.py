"""Every wrong request by its sentence, and what a request may look like."""

import copy
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize, prune

import gpubound as gb
from gpubound.decode.request import Choice, Request
from gpubound.decode.runner import BatchState
from gpubound.decode.weight_view import bind
from tests.messages import message, refusal, refusals

from . import cases

PROMPT = cases.prompts(5)[0]


WRONG_PROMPTS = [  # prompts, and the facts that the error has
    ([], ["no prompts"]),
    ([[]], ["prompt 0 is empty"]),
    ([PROMPT, []], ["prompt 1 is empty"]),
    ([3] * 96, ["prompt 0 has 96 tokens", "no room in max_length=96"]),
    ([PROMPT, [3, 89]], ["prompt 1 holds the token 89", "vocabulary of 89", "tokenizer"]),
    ([-1], ["prompt 0 holds the token -1"]),
    ([PROMPT] * 5, ["5 sequences at once", "max_batch=4"]),
    ("a text", ["a prompt is text", "no tokenizer", "tokenizer="]),
    ([PROMPT, "a text"], ["a prompt is text"]),
    (torch.zeros(2, 3), ["token ids (T,) or (B, T)", "torch.float32 (2, 3)"]),
    (torch.zeros(3, dtype=torch.bool), ["torch.bool (3,)"]),
    (torch.tensor(3), ["torch.int64 ()"]),
    (np.array([1.0, 2.0]), ["float64 (2,)"]),
    (np.array([True]), ["bool (1,)"]),
    (np.zeros((1, 1, 1), dtype=np.int64), ["int64 (1, 1, 1)"]),
    ({"ids": [PROMPT]}, ["prompts: got dict", "input_ids"]),
    (None, ["prompts: got NoneType"]),
    ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, ["attention_mask: got another shape than input_ids"]),
    ({"input_ids": [[3], [1, 2, 3]], "attention_mask": [[1], [1, 0, 1]]}, ["attention_mask of prompt 1", "padding between"]),
    ([1.5, 2.0], ["prompt 0", "1.5 at index 0"]),
    ([5, 6.5], ["prompt 0", "6.5 at index 1"]),
    ([[3, 4], [7, 1.5]], ["prompt 1", "1.5 at index 1"]),
    ([5, True], ["prompt 0", "True at index 1"]),
    ([3, "text"], ["prompt 0", "'text' at index 1"]),
]


@pytest.mark.parametrize(("prompts", "facts"), WRONG_PROMPTS, ids=[facts[0] for _, facts in WRONG_PROMPTS])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_wrong_prompts(call, prompts, facts):
    """`stream` raises when it is called, not when the first token is wanted."""
    sentence = refusal(ValueError, lambda: getattr(cases.shared(), call)(prompts, max_new_tokens=2))
    assert sentence.startswith("generate: ") and all(fact in sentence for fact in facts)


WRONG_SETTINGS = {  # values that are refused, and what is wanted instead
    "max_new_tokens": ([0, 2.5, True], "wanted a whole number, 1 or more; None takes as many as fit."),
    "n": ([0, "2", True], "wanted a whole number, 1 or more."),
    "temperature": ([-0.1, float("nan"), float("inf"), "hot", True], "wanted 0 (greedy) or more, up to 1e+30."),
    "top_k": ([-1, 0.5, 2**31, True], "wanted a whole number, 0 (off) or more, below 2^31."),
    "top_p": ([0.0, 1.1, True], "wanted more than 0 and at most 1 (off)."),
    "min_p": ([1.0, -0.1, True], "wanted 0 (off) or more and less than 1."),
    "repetition_penalty": ([0.0, 1e-31, True], "wanted 1e-30 to 1e+30; 1 is off."),
    "seed": ([0.5, 2**63, True], "wanted a whole number of 64 bits."),
    "stop": ([1.5, True], "wanted token ids and strings."),
    "logprobs": ([5, 0, None], "wanted True, for that of each token alone, or False."),
    "sampling": (["own"], "wanted 'model', for the settings of the model's generation config, or None."),
    "adapters": ([5], "wanted a name or None for each prompt."),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings(name):
    values, wanted = WRONG_SETTINGS[name]
    for value in values:
        sentence = refusal(ValueError, lambda: cases.shared().generate(PROMPT, **{name: value}))  # noqa: B023
        assert sentence == f"generate: {name}: got {value!r}, {wanted}"


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"n": 5}, ["5 sequences at once", "max_batch=4"]),
        ({"stop": 89}, ["stop token 89", "vocabulary of 89"]),
        ({"stop": [3, -1]}, ["stop token -1", "vocabulary of 89"]),
        ({"stop": [1.5]}, ["stop: got 1.5"]),
        ({"stop": [False]}, ["stop: got False"]),
        ({"stop": range(33)}, ["33 stop tokens", "at most 32"]),
        ({"stop": "end"}, ["stop string needs a tokenizer"]),
    ],
)
def test_settings_that_do_not_fit(settings, facts):
    sentence = refusal(ValueError, lambda: cases.shared().generate(PROMPT, **settings))
    assert sentence.startswith("generate: ") and all(fact in sentence for fact in facts)


def test_more_new_tokens_than_there_is_room_for(said):
    """They were cut without a word. The line comes once for each number that is asked for, whatever the prompts."""
    fast = gb.decoder(cases.build("Llama"), 2, 32, verify=False)
    said()
    for prompts in ([PROMPT[:3], [5] * 28], [[5] * 29]):
        assert len(fast.generate(prompts, max_new_tokens=6, stop=()).tokens[-1]) == 32 - len(prompts[-1])
    turns = fast.rollout([PROMPT[:3], [5] * 28], max_new_tokens=[4, 5], stop=())
    for one in turns:
        if (one.prompt, one.turn) == (0, 0):
            assert "got 0" in refusal(ValueError, lambda: turns.extend(one, [3] * 23, 0))  # noqa: B023
            turns.extend(one, [3] * 23, 9)
    fast.generate([[5] * 26], max_new_tokens=6)
    assert "\n".join(line for line in said().splitlines() if "max_new_tokens" in line) == message(
        "decode/requests:more_new_tokens_than_ther"
    )


def test_an_unknown_setting_is_no_setting():
    """It was told to `Choice.__init__()`, whom nobody calls, or by Python alone."""
    fast = cases.shared()
    found = [
        refusal(TypeError, lambda: fast.generate(PROMPT, top_q=1)),
        refusal(TypeError, lambda: fast.generate(PROMPT, beams=1)),
        refusal(TypeError, lambda: fast.rollout([PROMPT], max_tokens=1)),
        refusal(TypeError, lambda: gb.decoder(fast.model, max_lenght=16)),
    ]
    assert "\n".join(found) == message("decode/requests:an_unknown_setting_is_no")


def test_an_empty_stop_string():
    fast = cases.shared(tokenizer=cases.Bytes())
    refusals(
        "decode/requests:an_empty_stop_string",
        lambda: fast.generate("AB", stop=["x", ""]),
        lambda: fast.generate(""),
        lambda: fast.generate("z"),  # byte 122
    )


def test_a_text_is_no_flag():
    """exact="false" was true."""
    said = refusal(ValueError, lambda: gb.decoder(cases.shared().model, exact="false"))
    assert said == "decoder: exact: got 'false', wanted True or False."


def test_wrong_builds():
    model = cases.shared().model
    refusals(
        "decode/requests:wrong_builds",
        lambda: gb.decoder(model, tokenizer="folder/tokenizer.json"),
        lambda: gb.decoder(model, verify="no"),
        lambda: gb.decoder(model, max_batch=True),
        lambda: gb.decoder(model, max_batch=0),
        lambda: gb.decoder(model, max_length=1),
        lambda: gb.decoder(model, k=0),
        lambda: gb.decoder(model, k="many"),
        lambda: gb.decoder(model, dtype=torch.bfloat16),
    )
    assert gb.decoder(model, max_length=16, dtype=torch.float32).max_length == 16


def test_models_that_cannot_decode():
    refusals(
        "decode/requests:models_that_cannot_decod",
        lambda: gb.decoder(cases.build("Llama", device="meta")),
        lambda: gb.decoder(None),
        lambda: gb.decoder(cases.build("Qwen3_5", head_dim=2, rope_parameters=cases.HALF | {"partial_rotary_factor": 0.25})),
    )
    assert "ReLU, a plain module" in refusal(ValueError, lambda: gb.decoder(torch.nn.ReLU()))


def test_a_plain_module_is_refused_without_a_fallback(monkeypatch):
    """It was announced as a fallback first, and refused by the name of an internal class."""
    monkeypatch.setattr(gb.trace, "fallbacks", Counter())
    for options in ({}, {"fused": False}, {"devices": ["cpu", "cpu"]}):
        sentence = refusal(ValueError, lambda: gb.decoder(torch.nn.Linear(2, 2), **options))  # noqa: B023
        assert "Linear, a plain module" in sentence and "gb.Decoder" in sentence and "Body" not in sentence
    draft = gb.Draft(torch.nn.Linear(2, 2), 2)
    assert "Linear, a plain module" in refusal(ValueError, lambda: gb.decoder(cases.build("Llama"), speculate=draft))
    assert not gb.trace.fallbacks


def test_a_batch_of_arrays_is_a_batch():
    fast = cases.shared()
    want = fast.generate([[5, 6, 7], [8, 9, 3]], max_new_tokens=4).tokens
    for dtype in (np.int64, np.int32, np.uint16):
        assert fast.generate(np.array([[5, 6, 7], [8, 9, 3]], dtype), max_new_tokens=4).tokens == want
    assert fast.generate(np.array([5, 6, 7]), max_new_tokens=4).tokens == want[:1]


def test_padding_of_a_tensor_is_removed_where_its_id_is_known():
    """transformers infers the attention mask from pad_token_id. Here the padding counted as a part of the prompt."""
    model = cases.build("Llama")
    fast = gb.decoder(model, 2, cases.ROOM)
    want = fast.generate([[5, 6, 7, 8], [9, 3]], max_new_tokens=6).tokens
    left, right = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 3]]), torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
    assert fast.generate(left, max_new_tokens=6).tokens != want  # no id is known: all of them count
    model.generation_config.pad_token_id = 0
    for form in (left, right, left.numpy(), {"input_ids": left}):
        assert fast.generate(form, max_new_tokens=6).tokens == want
    assert [s.prompt for s in fast.generate([[0, 9, 3]], max_new_tokens=1).sequences] == [[0, 9, 3]]  # lists have no padding
    assert list(map(len, fast.score(right))) == [3, 1]
    model.generation_config.eos_token_id = [0]  # one id for both: nothing tells padding from an end of text
    assert [s.prompt for s in fast.generate(left, max_new_tokens=1).sequences] == left.tolist()


def mixed(model):
    model.model.norm.double()


def elsewhere(model):
    model.model.layers[1].to("meta")


def with_an_adapter(model):
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)


@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm", "model.norm", "model.embed_tokens"])
@pytest.mark.parametrize("kind", ["pruned", "parametrized"])
def test_weights_that_are_computed_are_no_kernels(name, kind, monkeypatch):
    """They ended in KeyError: 'weight'."""
    monkeypatch.setattr(gb.trace, "fallbacks", Counter())
    model = cases.build("Llama")
    module = model.get_submodule(name)
    if kind == "pruned":
        prune.l1_unstructured(module, "weight", 0.3)
    else:
        parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    assert gb.decoder(model, 1, cases.ROOM).generate(PROMPT, max_new_tokens=8).tokens[0] == cases.hugging_face(model, PROMPT, 8)
    (((what, why), _),) = gb.trace.fallbacks.items()
    assert what == "decoder: the fused kernels" and (name in why or "its embedding is" in why)


def with_a_hook(model):
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *rest: None)


def strided(model):
    weight = model.model.layers[0].mlp.gate_proj.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (mixed, "its weights differ in dtype or device: torch.float32 on cpu, torch.float64 on cpu"),
        (elsewhere, "its weights differ in dtype or device: torch.float32 on cpu, torch.float32 on meta"),
        (torch.nn.Module.double, "its weights are torch.float64; the kernels take fp32, fp16 and bf16"),
        (strided, "model.layers.0.mlp.gate_proj.weight is not a plain, contiguous parameter"),
    ],
)
def test_why_the_fused_kernels_cannot_run_a_model(change, why):
    model = cases.build("Llama")
    change(model)
    assert bind(model) == why


@pytest.mark.parametrize("change", [with_an_adapter, with_a_hook])
def test_what_stands_in_a_projections_place_is_named(change):
    model = cases.build("Llama")
    change(model)
    place = "model.layers.1.mlp.up_proj" if change is with_an_adapter else "model.layers.0.self_attn.q_proj"
    fast = gb.decoder(model, 1, 32)
    assert fast.path.startswith(f"{place}: ")
    assert fast.generate([5], max_new_tokens=8).tokens[0] == cases.hugging_face(model, [5], 8)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hidden_act": "relu"}, "its activation is 'relu', the kernels' are silu, gelu, gelu_tanh"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its rotary angles ('dynamic') change with the length of what is read",
        ),
    ],
)
def test_options_that_the_kernels_do_not_know(options, why):
    assert bind(cases.build("Llama", **options)) == why


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_norms_with_an_eps_of_their_own_and_other_activations(act):
    model = cases.build("Llama", hidden_act=act)
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-2
    fast = gb.decoder(model, 1, 64)
    assert fast.path == "" and fast.certificate.logits_error < 1e-5
    assert fast.generate(cases.PROMPT, max_new_tokens=30).tokens[0] == cases.hugging_face(model, cases.PROMPT, 30)


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 1.5, 2.0, 4.0],
        "long_factor": [8.0] * 4,
    },
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
}


def test_longrope_up_to_where_its_angles_change():
    model = cases.build("Phi3", **LONGROPE)
    assert bind(model, 65) == message("decode/requests:longrope_up_to_where_its")
    fast = gb.decoder(model, 1, 64)
    assert fast.path == ""
    assert fast.generate(cases.PROMPT, max_new_tokens=50).tokens[0] == cases.hugging_face(model, cases.PROMPT, 50)


def test_prompts_in_every_form():
    fast = cases.shared(tokenizer=cases.Bytes())
    want = fast.generate([[5, 6, 7]], max_new_tokens=8).tokens
    for form in (
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        [np.int64(5), np.int32(6), 7],
        [np.array([5, 6, 7])],
        [torch.tensor([5, 6, 7])],
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]], dtype=torch.int32),
        "\x05\x06\x07",
        ["\x05\x06\x07"],
    ):
        assert fast.generate(form, max_new_tokens=8).tokens == want
    assert fast.generate(["\x05\x06\x07", [5, 6, 7]], max_new_tokens=8).tokens == want * 2


@pytest.mark.slow
def test_stops_in_every_form():
    """None too, which is what a generation config without an end token holds."""
    fast = cases.shared("Mistral")
    whole = fast.generate(PROMPT, max_new_tokens=20).tokens[0]
    last = whole[6]
    for form in (last, [last], (last, 88), {last}, np.int64(last), [np.int64(last)]):
        assert fast.generate(PROMPT, max_new_tokens=20, stop=form).tokens[0] == whole[: whole.index(last) + 1]
    many = [token for token in range(89) if token not in whole[:6]][:32]  # as many as there is room for
    assert fast.generate(PROMPT, max_new_tokens=20, stop=many).tokens[0][:6] == whole[:6]
    for form in (None, (), []):
        assert fast.generate(PROMPT, max_new_tokens=20, stop=form).tokens[0] == whole


def test_logits_that_are_not_finite_from_the_first_step():
    """A row that ends before it has had a token ends with an error, not with an empty text."""
    model = cases.build("Llama", tie_word_embeddings=False)
    fast = gb.decoder(model, 1, cases.ROOM, verify=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[4] = float("nan")
    sentence = refusal(gb.GenerateError, lambda: fast.generate([3, 4], max_new_tokens=9))
    assert sentence.startswith("sequence 0: the logits at position 1 are not finite; first seen in model.embed_tokens.")


def test_the_last_norm_is_named_where_it_is_not_finite():
    model = cases.build("Llama")
    fast = gb.decoder(model, 1, cases.ROOM, verify=False)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    assert "first seen in model.norm." in refusal(gb.GenerateError, lambda: fast.generate(PROMPT))


def test_a_penalty_counts_every_token_of_the_prompt():
    """The last one too, which goes through the first step and not through the prefill. Marks of an earlier request are gone."""
    slots = BatchState(3, 89, 8, torch.device("cpu"))
    for prompts in ([[3, 5, 3], [8]], [[7], [2, 6]]):
        slots.fill(Request(prompts, 4, Choice(repetition_penalty=1.5)), 2, cases.ROOM)
        assert [row.nonzero().flatten().tolist() for row in slots.marks()[:2]] == [sorted(set(p)) for p in prompts]


def test_a_row_ends_with_the_cache():
    """However many tokens are asked for."""
    slots = BatchState(2, 89, 8, torch.device("cpu"))
    slots.fill(Request([[3] * 90, [3] * 2], 20, Choice()), 2, cases.ROOM)
    assert slots.rows.limit.tolist() == [cases.ROOM, 22]


def test_an_encoding_of_the_tokenizers_package():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(89)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = cases.shared(tokenizer=words)
    found = fast.generate("w5 w6 w7", max_new_tokens=8)
    assert found.tokens == cases.shared().generate([5, 6, 7], max_new_tokens=8).tokens
    assert found.texts == [" ".join(f"w{token}" for token in found.tokens[0])]
    assert "".join(piece for _, piece in fast.stream("w5 w6 w7", max_new_tokens=8)) == found.texts[0]


def test_one_request_at_a_time():
    fast = gb.decoder(cases.build("Llama"), 1, cases.ROOM)
    want = fast.generate(PROMPT, max_new_tokens=20).tokens[0]
    stream = fast.stream(PROMPT, max_new_tokens=20)
    later = fast.stream(PROMPT, max_new_tokens=20)  # not begun: takes nothing
    first = next(stream)[1]
    busy = (
        "a decoder runs one request at a time: finish or close the stream that is open first, or build another for each thread."
    )
    assert refusal(gb.GenerateError, lambda: fast.generate(PROMPT)) == busy
    assert refusal(gb.GenerateError, lambda: fast.score(PROMPT)) == busy
    assert refusal(gb.GenerateError, lambda: next(later)) == busy
    rest = [token for _, new in stream for token in new]
    assert first + rest == want  # the open stream was not disturbed
    assert fast.generate(PROMPT, max_new_tokens=20).tokens[0] == want
    own, heard = fast.body.score, []
    fast.body.score = lambda row: (heard.append(refusal(gb.GenerateError, lambda: fast.generate(PROMPT))), own(row))[1]
    fast.score(PROMPT)  # in the cache's first row, where another thread's request would write, too
    assert heard == [busy]


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_decoder_is_not_copied(make):
    """A copy would go on reading weights of the original's, and give tokens of neither."""
    with pytest.raises(TypeError, check=message("decode/requests:a_decoder_is_not_copied")):
        make(cases.shared())


@pytest.mark.slow
def test_the_callers_modes_do_not_matter():
    fast = cases.shared("Qwen2")
    long = cases.prompts(30)[0]
    want, scores = fast.generate(long, max_new_tokens=12, repetition_penalty=1.2), fast.score(long)
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"), torch.no_grad()):
        with mode:
            fresh = gb.decoder(fast.model, 1, cases.ROOM, verify="quick")
            for one in (fresh, fast):
                assert one.generate(long, max_new_tokens=12, repetition_penalty=1.2).tokens == want.tokens
                assert one.score(long) == scores
        assert fresh.generate(long, max_new_tokens=12, repetition_penalty=1.2).tokens == want.tokens


def test_a_model_in_training_mode_is_decoded_as_it_stands():
    fast = cases.shared("Llama")
    fast.model.train()
    try:
        found = gb.decoder(fast.model, 1, cases.ROOM).generate(PROMPT, max_new_tokens=12).tokens
    finally:
        fast.model.eval()
    assert found == fast.generate(PROMPT, max_new_tokens=12).tokens


def test_the_models_own_end_of_text_ends_a_sequence_unless_told_otherwise():
    model = cases.build("Llama")
    fast = gb.decoder(model, 1, cases.ROOM)
    whole = fast.generate([3, 4], max_new_tokens=20, stop=()).tokens[0]
    model.generation_config.eos_token_id = [whole[5]]
    found = fast.generate([3, 4], max_new_tokens=20)
    assert found.tokens[0] == whole[: whole.index(whole[5]) + 1] and found.sequences[0].finish == "stop token"
    assert fast.generate([3, 4], max_new_tokens=20, stop=()).tokens[0] == whole


@pytest.mark.parametrize("wrong", [89, -1])
def test_an_end_of_text_outside_the_vocabulary_is_refused(wrong):
    """It was left out without a word, and texts ended at max_length."""
    model = cases.build("Llama")
    fast = gb.decoder(model, 1, cases.ROOM)
    model.generation_config.eos_token_id = [3, wrong]
    sentence = refusal(ValueError, lambda: fast.generate([3, 4], max_new_tokens=2))
    assert f"eos_token_id: got {wrong}" in sentence and "89" in sentence
    assert len(fast.generate([3, 4], max_new_tokens=2, stop=()).tokens[0]) == 2
