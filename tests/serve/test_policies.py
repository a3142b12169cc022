"""Policies: each is trained as if it were alone, sampled by rows, saved and loaded exactly; what is refused."""

import json
from functools import cache

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import gpubound as gb
from gpubound.errors import DataError
from gpubound.models import Decoder, DecoderConfig
from gpubound.serve.requests import pack, read_examples
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.policy import Policy
from tests.messages import refusal

from .conftest import FIRST, LENGTH, SECOND, WORDS, base, policies


def weights(found, name):
    return [p.detach().clone() for p in gb.lora.parameters(found.model, name)]


def assert_equal(found, want):
    assert len(found) == len(want) > 0 and all(map(torch.equal, found, want))


def train(found, names, steps=3):
    """Two calls before each update of the first, whose losses are unlike; one of the second."""
    for _ in range(steps):
        for name in names:
            found.forward_backward(name, FIRST if name == "first" else SECOND)
        if "first" in names:
            found.forward_backward("first", SECOND, "grpo", kl=0.1)
        for name in names:
            found.optim_step(name)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["off", pytest.param("require", marks=pytest.mark.slow)])
def test_policies_in_turns_are_each_trained_alone(graph):
    """The second one is created after the first has begun to learn."""
    both = policies("first", graph=graph)
    start = [p.detach().clone() for name, p in both.model.named_parameters() if "lora" not in name]
    train(both, ["first"], 2)
    both.create("second", rank=2, lr=1e-2, seed=len("second"))
    train(both, ["first", "second"], 2)
    for name, steps in (("first", 4), ("second", 2)):
        alone = policies(name)
        train(alone, [name], steps)
        assert_equal(weights(both, name), weights(alone, name))
    assert_equal([p.detach() for name, p in both.model.named_parameters() if "lora" not in name], start)


def test_a_policy_is_a_train_step_of_its_adapter():
    found, model = policies("first"), base().requires_grad_(False)
    torch.manual_seed(len("first"))
    gb.lora.add(model, 4)
    loss, optimizer = Policy("reinforce", truncate=None), AdamW(1e-2, (0.9, 0.99), weight_decay=0.0)
    step = TrainStep(model.train(), loss, optimizer, accumulate=2, clip=1.0, precision="fp32")
    for examples in (FIRST, FIRST + SECOND):
        result = found.forward_backward("first", examples)
        batches, _ = pack(read_examples(examples, lambda ids, _, rest=False: ids, LENGTH, WORDS), LENGTH, 2, found.device)
        want = step(batches).read()
        taken = found.optim_step("first")
        assert taken["loss"] == want.loss == pytest.approx(result["loss"]) and taken["grad_norm"] == want.grad_norm
        assert [len(one) for one in result["logprobs"]] == [len(one["answer"]) for one in examples]
    assert_equal(weights(found, "first"), [p.detach() for p in gb.lora.parameters(model)])


@pytest.mark.slow
def test_many_examples_fill_several_batches():
    found = policies("first", "second")
    many = [{"prompt": [1] * (3 + n % 5), "answer": [2 + n % 7] * (1 + n % 9)} for n in range(20)]
    whole = found.forward_backward("first", many)
    apart = [found.forward_backward("second", [one]) for one in many]
    assert whole["items"] == sum(one["items"] for one in apart) == sum(len(one["answer"]) for one in many)
    for got, one in zip(whole["logprobs"], apart):
        assert got == pytest.approx(one["logprobs"][0], abs=1e-5)  # the adapters begin at zero, so both are the base


def test_tokens_of_an_environment_are_not_learnt():
    some = policies("first")
    result = some.forward_backward("first", [{"prompt": [1, 2], "answer": [3, 4, 5, 6], "learnt": [1, 0, 0, 1]}])
    assert result["items"] == 2 and [value != 0 for value in result["logprobs"][0]] == [True, False, False, True]
    half = {"prompt": [1], "answer": [3, 4], "learnt": [1, 0.5]}
    assert "learnt: got 0.5" in refusal(ValueError, lambda: some.forward_backward("first", [half]))


@pytest.mark.slow
def test_rows_of_a_sample_have_each_their_policy(pair):
    train(pair, ["first", "second"], 8)
    prompts, names = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 9]], ["first", None, "second", "first"]
    mixed = pair.sample(names, prompts, n=2, max_new_tokens=5, seed=3)
    assert [(one["prompt"], one["sample"]) for one in mixed] == [(p, s) for p in range(4) for s in range(2)]
    for name in (*dict.fromkeys(names),):
        alone = pair.sample(name, prompts, n=2, max_new_tokens=5, seed=3)
        want = [one["tokens"] for one in alone if names[one["prompt"]] == name]
        assert [one["tokens"] for one in mixed if names[one["prompt"]] == name] == want
    bare = policies().sample(None, prompts, n=2, max_new_tokens=5, seed=3)
    assert [one["tokens"] for one in bare][2:4] == [one["tokens"] for one in mixed][2:4]


@pytest.mark.slow
def test_a_sample_has_the_log_probabilities_of_the_weights_as_they_are(pair):
    """Before and after updates, in one decoder."""
    for _ in range(3):
        (one,) = pair.sample("first", [[1, 2, 3]], max_new_tokens=6, seed=1)
        learnt = {"prompt": [1, 2, 3], "answer": one["tokens"], "logprobs": one["logprobs"], "advantage": 1.0}
        result = pair.forward_backward("first", [learnt], "grpo")
        assert one["logprobs"] == pytest.approx(result["logprobs"][0], abs=1e-5) and result["largest_gap"] < 1e-5
        pair.optim_step("first")


@pytest.mark.slow
def test_a_loaded_policy_goes_on_as_the_saved_one(pair, tmp_path):
    train(pair, ["first", "second"], 2)
    pair.save_state("first", tmp_path / "first")
    assert pair.status()["first"]["unsaved"] == 0 and pair.status()["second"]["unsaved"] == 2
    new = policies("second")
    assert new.load_state("other", tmp_path / "first")["updates"] == 2
    kept = weights(pair, "first")
    train(pair, ["first"])
    for _ in range(3):
        new.forward_backward("other", FIRST)
        new.forward_backward("other", SECOND, "grpo", kl=0.1)
        new.optim_step("other")
    assert_equal(weights(new, "other"), weights(pair, "first"))
    pair.load_state("first", tmp_path / "first")  # in place
    assert_equal(weights(pair, "first"), kept)
    train(pair, ["first"])
    assert_equal(weights(new, "other"), weights(pair, "first"))
    fresh = base()
    gb.lora.load(fresh, tmp_path / "first")  # the layout is PEFT's
    assert_equal([p.detach() for p in gb.lora.parameters(fresh)], kept)


@pytest.mark.slow
def test_a_quantised_base_stays_as_it_is():
    model = base()
    gb.lora.quantize_base(model, "int8")
    found = policies()
    found = type(found)(model, max_length=LENGTH, max_batch=2, ends=())
    found.create("first", rank=2, lr=1e-2)
    first = found.forward_backward("first", SECOND)["loss"]
    for _ in range(5):
        found.optim_step("first")
        last = found.forward_backward("first", SECOND)["loss"]
    assert last < first
    found.optim_step("first")
    found.create("second", rank=2)
    names = ["second", "first", None]  # one policy at a time: the model's own forward decodes
    mixed = found.sample(names, [[1, 2]] * 3, max_new_tokens=6, temperature=0.0)
    alone = [found.sample(name, [[1, 2]], max_new_tokens=6, temperature=0.0)[0]["tokens"] for name in names]
    assert [one["tokens"] for one in mixed] == alone and alone[0] == alone[2]


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("forward_backward", {"name": "thrid", "examples": FIRST}),
        ("forward_backward", {"name": "first", "examples": []}),
        ("forward_backward", {"name": "first", "examples": [{"prompt": [1]}]}),
        ("forward_backward", {"name": "first", "examples": [FIRST[0] | {"reward": 1}]}),
        ("forward_backward", {"name": "first", "examples": [FIRST[0] | {"answer": [WORDS]}]}),
        ("forward_backward", {"name": "first", "examples": [FIRST[0] | {"answer": "text"}]}),
        ("forward_backward", {"name": "first", "examples": [FIRST[0] | {"answer": [1] * LENGTH}]}),
        ("forward_backward", {"name": "first", "examples": [FIRST[0] | {"advantage": [1.0]}]}),
        ("forward_backward", {"name": "first", "examples": [FIRST[0] | {"advantage": float("nan")}]}),
        ("forward_backward", {"name": "first", "examples": FIRST, "objective": "ppo"}),
        ("forward_backward", {"name": "first", "examples": FIRST, "objective": "grpo", "klo": 1}),
        ("optim_step", {"name": "first"}),
        ("sample", {"name": "first", "prompts": []}),
        ("sample", {"name": ["first"], "prompts": [[1], [2]]}),
        ("create", {"name": "first"}),
        ("create", {"name": "third", "clip": -1}),
        ("load_state", {"name": "third", "folder": "nowhere"}),
    ],
)
def test_what_cannot_be_done_is_one_sentence(call, given):
    found = policies("first")
    with pytest.raises((ValueError, DataError)) as error:
        getattr(found, call)(**given)
    assert "\n" not in str(error.value) and str(error.value)[-1] in ".?"
    found.forward_backward("first", FIRST)  # nothing has changed
    assert found.optim_step("first")["updates"] == 1


def test_gradients_that_would_be_lost_are_kept(pair, tmp_path):
    pair.forward_backward("first", FIRST)
    refused = [
        refusal(ValueError, lambda: pair.save_state("first", tmp_path / "one")),
        refusal(ValueError, lambda: pair.create("third")),
    ]
    assert all("first" in text for text in refused) and not (tmp_path / "one").exists()
    assert pair.status()["first"]["pending"] == 2 and pair.optim_step("first", lr=1e-3)["lr"] == 1e-3


def test_a_call_that_fails_leaves_nothing_in_the_next(monkeypatch):
    some, other = policies("first"), policies("first")
    step, calls = some._policies["first"].step, []
    add = step.add

    def failing(batch):
        calls.append(batch)
        add(batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("of the test")

    many = [{"prompt": [1] * 20, "answer": [2] * 10} for _ in range(5)]
    monkeypatch.setattr(step, "add", failing)
    with pytest.raises(torch.OutOfMemoryError):
        some.forward_backward("first", many)
    assert some.status()["first"]["pending"] == 0
    assert some.forward_backward("first", FIRST) == other.forward_backward("first", FIRST)
    some.optim_step("first"), other.optim_step("first")
    assert_equal(weights(some, "first"), weights(other, "first"))


@pytest.mark.slow
def test_a_state_without_a_moment_is_refused_whole(pair, tmp_path):
    train(pair, ["first"], 1)
    pair.save_state("first", tmp_path / "first")
    file = tmp_path / "first" / "optimizer.safetensors"
    state = load_file(file)
    gone = next(name for name in state if name.startswith("v."))
    save_file({name: tensor for name, tensor in state.items() if name != gone}, file)
    assert "is not of the save" in refusal(DataError, lambda: pair.load_state("first", tmp_path / "first"))
    facts = json.loads((tmp_path / "first" / "policy.json").read_text())
    (tmp_path / "first" / "policy.json").write_text(json.dumps(facts | {"crc32": None}))
    train(pair, ["first", "second"], 1)
    before = [weights(pair, name) for name in ("first", "second")]
    for name in ("first", "third"):
        assert "v.model" in refusal(ValueError, lambda name=name: pair.load_state(name, tmp_path / "first"))
    for name, kept in zip(("first", "second"), before):
        assert_equal(weights(pair, name), kept)
    assert set(pair.status()) == {"first", "second"}
    train(pair, ["first", "second"], 1)


def test_a_state_of_another_precision_is_refused_whole(pair, tmp_path):
    pair.save_state("first", tmp_path / "first")
    other = policies(precision="bf16")
    assert "bf16" in refusal(ValueError, lambda: other.load_state("first", tmp_path / "first"))
    assert other.status() == {}


def test_a_save_that_was_interrupted_over_another_one_is_refused(pair, tmp_path):
    """New adapters beside the optimizer's state of the save before."""
    train(pair, ["first"], 1)
    pair.save_state("first", tmp_path / "first")
    train(pair, ["first"], 1)
    gb.lora.save(pair.model, tmp_path / "first", "first", overwrite=True)
    assert "is not of the save" in refusal(DataError, lambda: pair.load_state("third", tmp_path / "first"))
    assert set(pair.status()) == {"first", "second"}
    pair.save_state("first", tmp_path / "first", overwrite=True)
    assert pair.load_state("first", tmp_path / "first")["updates"] == 2


def test_log_probabilities_are_of_all_examples_or_of_none():
    """Where one had none its tokens were measured as if they had been certain: a ratio of 0.02 instead of 1."""
    found, (one, *_) = policies("first"), FIRST
    known = one | {"old_logprobs": -4.0}
    for mixed in ([known, one], [one, known]):
        assert "has no old_logprobs" in refusal(ValueError, lambda mixed=mixed: found.forward_backward("first", mixed, "grpo"))
    each = [found.forward_backward("first", [example], "grpo")["loss"] for example in (known, one)]
    assert found.forward_backward("first", [known, known], "grpo")["loss"] == pytest.approx(each[0], rel=1e-5)
    assert each[1] == pytest.approx(-1, rel=1e-5)


def test_an_answers_text_begins_with_no_special_token():
    """A tokenizer like Llama's begins each text with <s>, which was learnt as the answer's first token."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<s>"))
    inner.add_special_tokens(["<s>"])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found, ids = policies("first", tokenizer=inner), policies("first")
    texts = found.forward_backward("first", [{"prompt": "a b", "answer": "c a"}, {"prompt": "<s> a b", "answer": "c a"}])
    assert texts == ids.forward_backward("first", [{"prompt": [0, 1, 2], "answer": [3, 1]}] * 2)
    said = refusal(DataError, lambda: found.forward_backward("first", [{"prompt": "a", "answer": "\ud800"}]))
    assert "examples[0]: answer: holds half a surrogate pair" in said


def test_an_update_without_an_item_is_none():
    found = policies("first")
    found.forward_backward("first", [FIRST[0] | {"learnt": 0}])
    assert found.optim_step("first")["updates"] == found.status()["first"]["updates"] == 0


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_an_embeddings_adapter_is_loaded_under_another_name(tmp_path):
    found = policies()
    found.create("first", rank=2, targets=["embed_tokens"], lr=1e-2)
    train(found, ["first"], 1)
    found.save_state("first", tmp_path / "first")
    assert found.load_state("second", tmp_path / "first")["updates"] == 1
    assert_equal(weights(found, "second"), weights(found, "first"))


def test_a_policy_whose_step_cannot_be_leaves_its_name_free():
    found = policies(precision="fp8")  # wants several blocks
    for _ in range(2):
        assert "fp8" in refusal(ValueError, lambda: found.create("first", rank=2))
    assert found.status() == {} and not gb.lora.parameters(found.model)


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", [None, "nf4"])
def test_policies_are_captured_and_sampled_as_they_are_on_a_gpu(quantised, capsys):
    """In bf16. Graphs serve all turns: neither a step nor the decoder captures again as policies alternate."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocabulary=512))
    model = model.to("cuda", torch.bfloat16)
    if quantised:
        gb.lora.quantize_base(model, quantised)
    found = policies(model=model, max_length=128, graph="require")
    for name in ("first", "second"):
        found.create(name, rank=8, lr=1e-2)
    losses, captured = {"first": [], "second": []}, set()
    for _ in range(4):
        for name, examples in (("first", FIRST), ("second", SECOND)):
            losses[name].append(found.forward_backward(name, examples)["loss"])
            found.optim_step(name)
        mixed = found.sample(["first", "second"], [[1, 2, 3]] * 2, max_new_tokens=8, seed=1)
        learnt = [{"prompt": [1, 2, 3], "answer": one["tokens"], "logprobs": one["logprobs"]} for one in mixed]
        gaps = [found.forward_backward(name, [one], "grpo")["gap"] for name, one in zip(losses, learnt)]
        assert max(gaps) < 0.05
        captured.add(tuple(len(policy.step.captured) for policy in found._policies.values()))
        for name in losses:
            found.optim_step(name, lr=1e-2)
    assert losses["second"][-1] < losses["second"][0] and len(captured) == 1
    assert len({graph.pool for policy in found._policies.values() for graph in policy.step.captured}) == 1
    assert quantised or "graphs captured again" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda found: policies(max_length=0), "max_length"),
        (lambda found: policies(max_batch="4"), "max_batch"),
        (lambda found: policies(rows=0), "rows"),
        (lambda found: found.create(["first"]), "name"),
        (lambda found: found.create("lora_B"), "lora_B"),
        (lambda found: found.create("third", seed="x"), "seed"),
        (lambda found: found.create("third", rnak=4), "create: 'rnak' is unknown; did you mean 'rank'?"),
        (lambda found: found.create("third", targets=5), "targets"),
        (lambda found: found.create("third", betas=5), "betas"),
        (lambda found: found.create("third", betas=[None, 0.9]), "betas"),
        (lambda found: found.load_state([], "folder"), "name"),
        (lambda found: found.sample(5, [[1]]), "name"),
        (lambda found: found.sample("first", [[1]], n=10**9), "1,048,576"),
        (lambda found: found.sample("first", [[1]], adapters=["first"]), "adapters"),
        (lambda found: found.forward_backward("first", [FIRST[0] | {"advantage": 10**400}]), "advantage"),
        (lambda found: found.forward_backward("first", [FIRST[0] | {"advantage": 1e39}]), "advantage"),
        (lambda found: found.forward_backward("first", [FIRST[0] | {"advantage": "high"}]), "advantage: got 'high', wanted"),
        (lambda found: found.forward_backward("first", [FIRST[0] | {"prompt": [1.5]}]), "1.5"),
        (lambda found: found.forward_backward("first", [FIRST[0] | {"logprobs": 0.5}]), "logprobs: got 0.5"),
        (lambda found: found.forward_backward("first", FIRST, "grpo", kl=10**400), "kl"),
        (lambda found: found.forward_backward("first", FIRST, "dr_grpo", max_tokens=True), "max_tokens"),
        (lambda found: found.optim_step("first", lr=10**400), "no gradients"),
    ],
)
def test_what_a_call_does_not_take_is_named_and_changes_nothing(call, words):
    found = refusing()
    assert words in refusal(ValueError, lambda: call(found))
    assert set(found.status()) == {"first"} and not found.status()["first"]["pending"]


@cache
def refusing():
    return policies("first")
