"""The weights are the model's own: changes in place are seen, tensors that moved are bound anew, anything else is refused."""

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound import trace
from tests.messages import message, refusal

from . import cases

PROMPT = cases.prompts(7)[0]


@pytest.fixture(autouse=True)
def every_notice(monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())


@pytest.fixture(params=["Llama", "own"])
def fast(request) -> gb.FastDecoder:
    return gb.decoder(cases.build(request.param), 2, cases.ROOM, verify=False)


def followed(fast) -> list[int]:
    return cases.followed(fast, 9)


def of_decoder(fast) -> list[int]:
    return fast.generate(PROMPT, max_new_tokens=9).tokens[0]


def notice_of(name: str) -> str:
    return f"gpubound: decoder: {name} is no longer where it was; bound to the weights as they are now, graphs captured again\n"


def test_a_training_step_is_seen_by_the_next_call(fast, capsys):
    before = of_decoder(fast)
    optimizer = torch.optim.AdamW(fast.model.parameters(), lr=0.05)
    for _ in range(3):
        ids = torch.tensor([cases.prompts(20)[0]])
        output = fast.model(ids)
        nn.functional.cross_entropy(getattr(output, "logits", output)[0, :-1], ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        followed(fast)
    assert of_decoder(fast) != before
    assert capsys.readouterr().err == ""


def test_a_load_in_place_is_seen(fast):
    before = of_decoder(fast)
    fast.model.load_state_dict({name: tensor.flip(0) for name, tensor in fast.model.state_dict().items()})
    assert followed(fast) != before


def test_a_weight_changed_between_two_tokens_of_a_stream_is_seen():
    fast = gb.decoder(cases.build("Llama"), 1, cases.ROOM, k=1)
    tokens = []
    for _, new in fast.stream(PROMPT, max_new_tokens=20):
        tokens += new
        if len(tokens) == 5:
            with torch.no_grad():
                fast.model.model.norm.weight.neg_()
    with torch.no_grad():
        fast.model.model.norm.weight.neg_()
    want = cases.greedy_by_forwards(fast.model, PROMPT, 20)
    assert tokens[:5] == want[:5] and tokens != want


def test_assigned_tensors_are_bound_anew(fast, capsys):
    of_decoder(fast)
    fast.model.load_state_dict({name: tensor.flip(0).clone() for name, tensor in fast.model.state_dict().items()}, assign=True)
    followed(fast)
    assert capsys.readouterr().err == notice_of("model.embed_tokens.weight")
    assert followed(fast) and capsys.readouterr().err == ""


def test_data_replaced_is_bound_anew(fast, capsys):
    weight = fast.model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.neg()
    followed(fast)
    assert capsys.readouterr().err == notice_of("model.layers.1.mlp.down_proj.weight")


def test_a_head_tied_or_untied_is_bound_anew(fast, capsys):
    fast.model.lm_head.weight = nn.Parameter(torch.randn_like(fast.model.lm_head.weight))
    untied = followed(fast)
    fast.model.lm_head.weight = fast.model.model.embed_tokens.weight
    assert followed(fast) != untied
    assert capsys.readouterr().err == notice_of("lm_head.weight")  # both times; a notice is printed once


def test_a_module_replaced_is_bound_anew(fast, capsys):
    layer = nn.Linear(40, 32, bias=False)
    fast.model.model.layers[0].mlp.down_proj = layer
    followed(fast)
    assert capsys.readouterr().err == notice_of("model.layers.0.mlp.down_proj")


def test_an_adapter_added_later_is_refused_until_it_is_gone(fast):
    """An adapter replaces modules: the kernels would go on with the weights below it."""
    want = of_decoder(fast)
    held = fast.model.model.layers[0].mlp.down_proj
    fast.model.model.layers[0].mlp.down_proj = nn.Sequential(held, nn.Dropout(0.0))
    for _ in range(2):
        assert refusal(gb.GenerateError, lambda: of_decoder(fast)).startswith(
            "decoder: the model has changed since its decoder was built: model.layers.0.mlp.down_proj: "
        )
    fast.model.model.layers[0].mlp.down_proj = held
    assert of_decoder(fast) == want


def test_a_bias_where_none_was_is_bound_anew(fast, capsys):
    before = of_decoder(fast)
    layer = fast.model.model.layers[1].self_attn.o_proj
    layer.bias = nn.Parameter(torch.linspace(-2, 2, 32))
    assert followed(fast) != before
    assert capsys.readouterr().err == notice_of("model.layers.1.self_attn.o_proj.bias")
    layer.bias = None
    assert followed(fast) == before
    fast.model.lm_head.bias = nn.Parameter(torch.linspace(-4, 4, 89))
    assert followed(fast) != before


def set_eps(model):
    for module in model.modules():
        for name in {"eps", "variance_epsilon"} & vars(module).keys():
            setattr(module, name, 3.0)


def set_window(model):
    model.config.sliding_window = 4


NUMBERS = {"eps": ("Llama", set_eps), "eps of our own": ("own", set_eps), "window": ("Mistral", set_window)}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("how", [{}, {"devices": ["cpu", "cpu"]}, {"devices": ["cpu", "cpu"], "split": "tensors"}], ids=str)
def test_a_number_that_steps_have_taken_is_taken_anew(name, how, capsys):
    kind, change = NUMBERS[name]
    fast = gb.decoder(cases.build(kind), 1, cases.ROOM, verify=False, **how)
    before = of_decoder(fast)
    capsys.readouterr()
    change(fast.model)
    assert followed(fast) != before
    assert message("decode/weights:a_number_that_steps_have").within(capsys.readouterr().err)
    assert followed(fast) and capsys.readouterr().err == ""


def test_what_no_step_reads_changes_nothing(fast, capsys):
    of_decoder(fast)
    bound = fast.body.taken
    for module in fast.model.modules():
        module.gradient_checkpointing, module.note = False, "mine"
    fast.model.model.layers[0].note = "another"
    if hasattr(fast.model.config, "use_cache"):
        fast.model.config.use_cache = False
    of_decoder(fast)
    assert fast.body.taken == bound and capsys.readouterr().err == ""


def test_a_number_of_all_layers_is_refused_until_it_is_back():
    fast = gb.decoder(cases.build("Gemma3"), 1, cases.ROOM, verify=False)
    before, config = of_decoder(fast), fast.model.config
    cap, config.final_logit_softcapping = config.final_logit_softcapping, 1.0
    for _ in range(2):
        assert refusal(gb.GenerateError, lambda: of_decoder(fast)) == message("decode/weights:a_number_of_all_layers_i", cap)
    config.final_logit_softcapping = cap
    assert of_decoder(fast) == before


def test_a_layers_scale_of_scores_is_followed():
    fast = gb.decoder(cases.build("Llama"), 1, cases.ROOM, verify=False)
    before, attention = of_decoder(fast), fast.model.model.layers[0].self_attn
    scaling, attention.scaling = attention.scaling, 1.0
    assert followed(fast) != before
    attention.scaling = scaling
    assert of_decoder(fast) == before


def test_a_models_own_forward_is_captured_again_where_it_may_have_read_another_number(capsys):
    fast = gb.decoder(cases.build("Llama"), 1, cases.ROOM, fused=False, verify=False)
    before = of_decoder(fast)
    capsys.readouterr()
    set_eps(fast.model)
    assert followed(fast) != before
    assert message("decode/weights:a_models_own_forward_is").within(capsys.readouterr().err)


HOW = [{"weights": "int8"}, {"devices": ["cpu", "cpu"]}, {"devices": ["cpu", "cpu"], "split": "tensors"}]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_low_rank_adapters_are_refused_until_they_are_merged(how):
    """By each request, not by the first alone: the next ones got tokens without them."""
    model = cases.build("Llama")
    fast = gb.decoder(model, 2, cases.ROOM, verify=False, **how)
    want = of_decoder(fast)
    gb.lora.add(model, targets=["q_proj"], rank=2)
    for _ in range(2):
        assert "adapters" in refusal(gb.GenerateError, lambda: of_decoder(fast))
        with pytest.raises(gb.GenerateError, match="adapters"):
            fast.score(PROMPT)
    gb.lora.merge(model)
    assert of_decoder(fast) == want


def test_a_cast_is_refused_until_it_is_undone(fast):
    fast.model.to(torch.bfloat16)
    for _ in range(2):
        assert refusal(gb.GenerateError, lambda: of_decoder(fast)) == message("decode/weights:a_cast_is_refused_until")
    fast.model.float()
    followed(fast)


def test_a_move_while_a_stream_runs_is_refused():
    fast = gb.decoder(cases.build("Llama"), 1, cases.ROOM, k=1)
    stream = fast.stream(PROMPT, max_new_tokens=20)
    next(stream)
    weight = fast.model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.clone()
    assert refusal(gb.GenerateError, lambda: list(stream)) == message("decode/weights:a_move_while_a_stream_ru")
    followed(fast)  # not left busy


def test_a_move_while_generate_runs_is_refused_at_its_end(monkeypatch):
    """By another thread, as it seems: its tokens may be of either weight."""
    fast, looks = gb.decoder(cases.build("Llama"), 1, cases.ROOM, k=1), []
    weight, launch, moved = fast.model.model.layers[1].self_attn.q_proj.weight, fast.graphs.launch, fast.bound.moved
    elsewhere = weight.data.clone()

    def moving(*way):
        weight.data = elsewhere
        launch(*way)

    monkeypatch.setattr(fast.bound, "moved", lambda: looks.append(1) or moved())
    fast.generate(PROMPT, max_new_tokens=9)
    assert len(looks) == 2, "before the first launch and behind the last"
    fast.graphs.launch = moving
    assert refusal(gb.GenerateError, lambda: of_decoder(fast)).endswith(
        "self_attn.q_proj.weight was changed, moved or replaced while tokens were generated from it; start again."
    )
    fast.graphs.launch = launch
    followed(fast)


@pytest.mark.parametrize("fused", [True, False])
def test_a_nan_is_traced_to_its_layer(fused):
    fast = gb.decoder(cases.build("Llama"), 2, cases.ROOM, fused=fused)
    with torch.no_grad():
        fast.model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    where = "model.layers.1.mlp" + ("" if fused else ".down_proj")
    rest = f"are not finite; first seen in {where}. Check the weights (a diverged training run?) and the dtype."
    sentence = refusal(gb.GenerateError, lambda: fast.generate([PROMPT, PROMPT[:3]], max_new_tokens=8))
    assert sentence == message("decode/weights:a_nan_is_traced_to_its_l", rest)
    assert refusal(gb.GenerateError, lambda: fast.score(PROMPT)) == message("decode/weights:a_nan_is_traced_to_its_l.2", rest)
    with torch.no_grad():
        fast.model.model.layers[1].mlp.down_proj.weight[3, 4] = 0.0
    followed(fast)  # and no NaN is left in the cache


def test_a_nan_that_comes_with_a_token_ends_where_it_comes():
    """Only the embedding of one word is bad: what was generated before it stands."""
    fast = cases.shared("Mistral")
    want = fast.generate(PROMPT, max_new_tokens=9).tokens[0]
    place = next(i for i, token in enumerate(want) if i > 3 and token not in PROMPT + want[:i])
    model = cases.build("Mistral")
    with torch.no_grad():
        model.model.embed_tokens.weight[want[place]] = float("inf")
    seen = []
    with pytest.raises(gb.GenerateError) as error:
        for _, new in gb.decoder(model, 1, cases.ROOM, verify="quick").stream(PROMPT, max_new_tokens=9):
            seen += new
    assert str(error.value).startswith(
        f"sequence 0: the logits at position {len(PROMPT) + place} are not finite; first seen in model.embed_tokens."
    )
    assert seen == want[: len(seen)]
