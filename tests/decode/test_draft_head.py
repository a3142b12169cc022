"""A draft head changes no token, and drafts in a decoder what its own forward gives, from the model's own hidden states."""

import functools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import gpubound as gb
from gpubound import DataError
from gpubound.decode.draft_head import HeadDraft, HeadRunner
from gpubound.kernels import dispatch
from gpubound.models.draft_head import READ_LAYERS, DraftHead, hidden_states_of
from gpubound.watch.pretend import simgpu
from tests.messages import message, refusal

from . import cases
from .test_speculate import SAMPLED, WAY, compare, served

CASES = [("Qwen3", way) for way in WAY]
CASES += [
    pytest.param("Mistral", "drawn", marks=pytest.mark.slow),
    pytest.param("Llama", "all settings", marks=pytest.mark.slow),
]
SOME = range(3, cases.VOCABULARY, 2)  # tokens that a head may draft


def head_of(model: torch.nn.Module, tokens=SOME, **sizes: int) -> DraftHead:
    """A head whose weights are large enough that its choices depend on all that it reads."""
    torch.manual_seed(1)
    head = DraftHead.for_model(model, tokens, **sizes)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.3)
    return head


@functools.cache
def shared(kind: str, drafted: int = 3, max_batch: int = 4, some: bool = True) -> gb.FastDecoder:
    model = cases.shared(kind).model
    speculate = gb.Draft(head_of(model, SOME if some else None), drafted)
    return gb.decoder(model, max_batch, cases.ROOM, verify="quick" if kind == "Llama" else False, speculate=speculate)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_the_tokens_of_plain_steps(kind, way):
    """Normed heads, a sliding window, a tied embedding; a ragged batch, one prompt of a single token, steps of 16 tokens."""
    compare(shared(kind), cases.shared(kind), cases.prompts(), max_new_tokens=12, **WAY[way])


def test_all_tokens_may_be_drafted():
    fast = shared("Qwen3", some=False)
    assert fast.stepper.runner.logits is fast.stepper.runner.reduced
    compare(fast, cases.shared("Qwen3"), cases.prompts(6), max_new_tokens=12, **SAMPLED)


def test_up_to_the_last_place_of_the_cache():
    given = cases.prompts(90, 94, 88)
    found = compare(shared("Qwen3", 5), cases.shared("Qwen3"), given)
    assert [len(prompt) + len(tokens) for prompt, tokens in zip(given, found.tokens)] == [cases.ROOM] * 3


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "tokens", "k", "plain"),
    [
        (1, 3, 1, ()),
        (3, 4, 1, ()),
        (1, 3, 2, (0, 2, 3)),
        (3, 2, 3, (1, 2)),
    ],
    ids=["few rows", "cuBLAS", "plain steps between", "plain steps of several rows"],
)
def test_its_logits_are_those_of_its_forward(rows, tokens, k, plain, monkeypatch):
    """In every step, after a prompt in two chunks and after steps that accepted none, some or all of the drafts: entries of
    rejected drafts are never read. Few tokens and a temperature, so that drafts are often right."""
    model = cases.build("Qwen3", vocab_size=6)
    head = head_of(model, [0, 1, 3, 4, 5])
    monkeypatch.setattr("gpubound.decode.transformer.CHUNK", 8)
    fast = gb.decoder(model, rows, cases.ROOM, k=k, speculate=gb.Draft(head, tokens), verify=False)
    launched, pace = [], fast.stepper.pace
    pace.plain, pace.launched = lambda steps: len(launched) % 5 in plain, lambda *launch: launched.append(launch)
    logits: list[torch.Tensor] = []
    steps: list[tuple] = []

    def choose(runner, *arguments, before=HeadRunner.choose):
        logits.append(runner.reduced[:rows].clone())
        before(runner, *arguments)

    def draft(stepper, state, chunk, variant, before=HeadDraft.draft):
        logits.clear()
        before(stepper, state, chunk, variant)
        steps.append((state.position.tolist(), state.alive.tolist(), chunk.token.tolist(), torch.stack(logits, 1)))

    monkeypatch.setattr(HeadRunner, "choose", choose)
    monkeypatch.setattr(HeadDraft, "draft", draft)
    given = [[token % 6 for token in prompt] for prompt in cases.prompts(9, 4, 17)[:rows]]
    found = fast.generate(given, max_new_tokens=30 if plain else 14, temperature=1.0, seed=2)
    texts, advances, before = [one + new for one, new in zip(given, found.tokens)], set(), None
    for positions, alive, chunks, got in steps:
        advances |= {now - then for now, then, live in zip(positions, before or positions, alive) if live}
        before = positions
        for row in (row for row in range(rows) if alive[row]):
            last = positions[row]
            known = torch.tensor([texts[row][: last + 1] + chunks[row][1:-1]])
            states, _ = hidden_states_of(model, {"input_ids": known[:, :last]}, head.layers)
            outputs = head(states, F.embedding(known, head.table(model)))
            want = torch.stack([head.lm_head(output[0, -1]) for output in outputs])
            torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-4)
    assert {1, 2, *[3] * (not plain)} <= advances


def test_weights_that_change_are_followed(capsys):
    """In place, those of model and head are read as they are; a tensor that was replaced is bound again."""
    model = cases.build("Llama", tie_word_embeddings=False)
    head = head_of(model)
    fast = gb.decoder(model, 2, cases.ROOM, speculate=gb.Draft(head), verify=False)
    plain = gb.decoder(model, 2, cases.ROOM, verify=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
        head.midlayer.mlp.down_proj.weight.mul_(0.5)
        head.fc.weight.data = head.fc.weight.data.clone()
    compare(fast, plain, cases.prompts(5, 8), max_new_tokens=9)
    assert "fc.weight" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"cache": "fp8", "pages": 8}], ids=["int8", "fp8 in pages"])
def test_other_formats(options):
    model = cases.shared("Qwen3").model
    fast = gb.decoder(model, 2, cases.ROOM, verify=False, speculate=gb.Draft(head_of(model), 3), **options)
    compare(fast, gb.decoder(model, 2, cases.ROOM, verify=False, **options), cases.prompts(7, 4), max_new_tokens=9)


@pytest.mark.parametrize("draft", ["text", "head"])
def test_tokens_that_are_multiplied_together(draft):
    """By other products than one by one, which the table says; in fp32 the tokens are the same."""
    model = cases.shared("Qwen3").model
    speculate = gb.Draft(None if draft == "text" else head_of(model), 3, tensor_cores=True)
    fast = gb.decoder(model, 1, cases.ROOM, verify="quick" if draft == "head" else False, speculate=speculate)
    assert fast.body.gemv_rows == 2 and not fast.stepper.exact(1)
    compare(fast, cases.shared("Qwen3"), cases.prompts(7), max_new_tokens=12)
    (_, _, why), *_ = fast.stepper.report()
    assert why == message("decode/draft_head:tokens_that_are_multiplied_together")


@pytest.mark.slow
def test_interpreted_kernels_draft_what_their_references_do(monkeypatch):
    model = cases.build("Qwen3", num_hidden_layers=1, vocab_size=20)
    head = head_of(model, range(0, 20, 2))
    drafts = []
    for interpret in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setattr(dispatch, "_verdicts", {})
        fast = gb.decoder(model, 1, 16, k=1, speculate=gb.Draft(head, 2), verify=False)
        assert fast.stepper.runner.workspace.kernels == ("triton" if interpret == "1" else "reference")
        fast.generate([[3, 1, 4, 1, 5]], max_new_tokens=2)
        drafts.append(fast.stepper.runner.reduced.clone())
    torch.testing.assert_close(*drafts, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_steps_never_wait_for_the_device():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one")
    sim = simgpu()
    model = cases.build("Qwen3", device=sim, num_hidden_layers=1)
    fast = gb.decoder(model, 2, 32, speculate=gb.Draft(head_of(model), 2), verify=False)
    fast.generate(cases.prompts(5, 3), max_new_tokens=3, temperature=1.0, repetition_penalty=1.1)
    cases.assert_never_waits(fast.stepper.run, 2)


def test_the_table_names_it():
    rows = {part: what for part, what, _ in shared("Qwen3").stepper.report()}
    assert rows["speculation"] == message("decode/draft_head:the_table_names_it")
    assert rows["draft head"] == message("decode/draft_head:the_table_names_it.2")


def test_what_it_reads_is_counted():
    fast, model = shared("Qwen3"), cases.shared("Qwen3").model
    weights = sum(p.nbytes for p in fast.stepper.runner.head.parameters() if p.dim() > 1)
    cached = 10 * 2 * 2 * 8 * 4
    assert fast.stepper.bytes_a_step([10]) == 3 * (weights + cached)
    assert fast.body.bytes_a_step([10]) == shared("Qwen3", 5).body.bytes_a_step([10]) and model is fast.model


class TestRefusals:
    def test_a_head_of_another_model(self):
        wide, deep = cases.build("Qwen3", hidden_size=48), cases.build("Qwen3", num_hidden_layers=6)
        model, words = cases.shared("Qwen3").model, cases.build("Qwen3", vocab_size=90)
        for other, facts in ((wide, ("48", "32")), (words, ("90", "89")), (deep, ("2, 3, 3", "0 to 1"))):
            speculate = gb.Draft(DraftHead.for_model(other))
            text = refusal(ValueError, lambda speculate=speculate: gb.decoder(model, 1, 16, speculate=speculate))
            assert all(fact in text for fact in facts), text

    def test_a_model_without_fused_kernels(self):
        model = cases.shared("Qwen3").model
        call = functools.partial(gb.decoder, model, 1, 16, fused=False, speculate=gb.Draft(head_of(model)))
        assert refusal(ValueError, call) == message("decode/draft_head:a_model_without_fused_kernels")
        assert refusal(ValueError, lambda: DraftHead.for_model(torch.nn.ReLU())) == message("decode/draft_head:no_model")

    def test_tokens_that_are_none(self):
        for tokens in ([1, 1], [2, cases.VOCABULARY], [], [1.5], 5, "x"):
            text = refusal(ValueError, lambda tokens=tokens: DraftHead.for_model(cases.shared("Qwen3").model, tokens))
            assert text.startswith("DraftHead: tokens: got ")

    def test_a_misspelt_size(self):
        sentence = refusal(TypeError, lambda: DraftHead.for_model(cases.shared("Qwen3").model, intermedate=8))
        assert sentence.startswith("DraftHead.for_model() ") and sentence.endswith("did you mean 'intermediate'?")

    def test_a_config_without_a_width_of_mlps(self):
        config = GPT2Config(vocab_size=128, n_embd=16, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=1)
        assert DraftHead.for_model(GPT2LMHeadModel(config)).config.intermediate == 64

    def test_a_folder_with_other_tensors(self, tmp_path):
        model = cases.shared("Qwen3").model
        path = head_of(model).save(tmp_path / "head")
        assert "overwrite=True" in refusal(ValueError, lambda: head_of(model).save(path))
        about = path / "config.json"
        about.write_text(about.read_text().replace('"intermediate_size": 40', '"intermediate_size": 41'))
        assert "gate_proj.weight: got (40, 32), wanted (41, 32)" in refusal(DataError, lambda: DraftHead.load(path, model))
        about.write_text(about.read_text().replace('"intermediate_size": 41', '"intermediate_size": 40'))
        state = load_file(path / "model.safetensors")
        save_file(state | {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, path / "model.safetensors")
        assert "q_norm" in refusal(DataError, lambda: DraftHead.load(path, model))
        model_folder = gb.models.save_hf(gb.Decoder(gb.DecoderConfig(16, 16, 1, 2, 1, 9)), tmp_path / "model")
        assert "fc.weight" in refusal(DataError, lambda: DraftHead.load(model_folder, model))


def test_its_folder_is_that_of_published_heads(tmp_path):
    model = cases.shared("Qwen3").model
    head = head_of(model, intermediate=24)
    path = head.save(tmp_path / "head")
    names = load_file(path / "model.safetensors").keys()
    assert {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    again = DraftHead.load(path, model)
    assert (again.layers, again.config.intermediate, again.config.rope_theta) == (head.layers, 24, head.config.rope_theta)
    assert all(
        torch.equal(one, other) for one, other in zip(head.state_dict().values(), again.state_dict().values(), strict=True)
    )
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    about = (path / "config.json").read_text().replace(READ_LAYERS, "unnamed")  # where published heads leave them out
    (path / "config.json").write_text(about)
    again = DraftHead.load(path, model)
    assert again.layers == head.layers and torch.equal(again.fc.weight, head.fc.weight)


class TestOnTheDevice:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("how", [{}, {**SAMPLED, "logprobs": True}], ids=["greedy", "all settings"])
    @pytest.mark.parametrize(("tokens", "rows"), [(3, 1), (7, 1), (3, 2)])
    def test_in_graphs_the_tokens_are_those_of_plain_graphs(self, tokens, rows, how):
        model = served("Qwen3")
        fast = gb.decoder(model, rows, 512, speculate=gb.Draft(wide_head(model), tokens), verify="quick")
        assert fast.stepper.exact(rows)
        plain, given = gb.decoder(model, 1, 512, verify="quick"), cases.prompts(*range(5, 5 + rows))
        found = fast.generate(given, max_new_tokens=200, **how)
        assert all(second > 0 for second in fast.stepper.pace.seconds[rows]) and f"plain steps, {rows} row" in repr(fast)
        assert found.tokens == [plain.generate([prompt], max_new_tokens=200, **how).tokens[0] for prompt in given]

    def test_graphs_over_tensor_cores_are_their_own_steps(self):
        model = served("Llama")
        speculate = gb.Draft(wide_head(model), 4, tensor_cores=True, adaptive=False)
        fast = gb.decoder(model, 1, 512, speculate=speculate, verify="quick")
        given = cases.prompts(9)
        cases.assert_no_syncs(fast, given)
        found = [fast.generate(given, max_new_tokens=100).tokens for _ in range(3)]  # the prompt's graph is made at its second
        fast.graphs.launch, fast.graphs.prefill = fast.graphs.run, fast.body.prefill
        assert found == [fast.generate(given, max_new_tokens=100).tokens] * 3

    @pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "all settings"])
    @pytest.mark.parametrize("tokens", [1, 4])
    def test_overlapping_launches_draft_what_single_ones_do(self, tokens, how):
        """The tokens do not show a wrong draft: the last steps' drafts are compared, and how many were right."""
        model = served("Qwen3")
        found = []
        for chained in (True, False):
            speculate = gb.Draft(wide_head(model), tokens, tensor_cores=True, adaptive=False)
            fast = gb.decoder(model, 1, 512, speculate=speculate, verify=False)
            fast.body.can_chain = fast.body.can_chain and chained
            result = fast.generate(cases.prompts(9), max_new_tokens=200, **how)
            found.append((result.tokens, result.row_steps, fast.stepper.chunk.tolist()))
        assert found[0] == found[1]


def wide_head(model: torch.nn.Module) -> DraftHead:
    return cases.scaled(head_of(model, range(0, 32000, 2)), 0.1)
