"""Where 16-bit rounding alone passes the limit of a whole model, fp32 is the judge."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import gpubound as gb
from gpubound.models import registry
from gpubound.place import verify
from gpubound.place.candidates import Fused
from gpubound.place.verify import Named
from tests.messages import message

from ..models.deepseek_v4.decode.cases import build as deepseek
from ..train.test_build_model import peak
from .models import OPTIONS, tiny, tokens

BF16 = torch.bfloat16


@pytest.mark.slow
def test_a_model_whose_own_rounding_is_large_is_placed():
    """Four layers of Gemma 3: two right runs lie 6.5e-2 apart, the limit is 6e-2."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64, "initializer_range": 0.05}
    model = tiny("gemma3", BF16, **sizes, layer_types=OPTIONS["gemma3"]["layer_types"] * 2)
    placement = gb.place(model, "cpu")
    assert placement.refused == 0 and placement.swapped
    assert {p.dtype for p in model.parameters()} == {BF16}


def sketch(spread: float, seed: int, of: Named | None = None) -> Named:
    """An output and two gradients, each `spread` of its norm away from those of `of`."""
    g = torch.Generator().manual_seed(seed)
    names = ["loss", "gradient of a", "gradient of b"]
    drawn = [torch.randn(400, generator=g) for _ in names]
    if of is None:
        return dict(zip(names, drawn))
    return {name: t + spread * t.norm() / d.norm() * d for (name, t), d in zip(of.items(), drawn)}


@pytest.mark.parametrize("off, right", [(0.05, True), (0.09, True), (0.13, False), (0.4, False)])
def test_the_placed_run_may_be_twice_as_far_off(off, right):
    exact = sketch(0, 0)
    model = nn.Linear(4, 4, dtype=BF16)
    verdict = verify.compare_in_fp32(model, lambda: exact, sketch(off, 1, exact), sketch(0.05, 2, exact), BF16)
    assert verdict.ok == right and abs(verdict.error - off) < 1e-3
    assert verdict.where.endswith(", from fp32,")


@pytest.mark.parametrize("first, second, right", [(0.093, 0.082, True), (0.042, 0.25, False), (0.16, 0.16, False)])
def test_errors_are_compared_over_all_cases(first, second, right):
    """The original's are 4.2 and 9.2 %, as with SmolLM2-135M's weights; what is wrong in one case alone is found."""
    exact, of = sketch(0, 0), {}
    for name, errors in {"original": (0.042, 0.092), "placed": (first, second)}.items():
        runs = [sketch(off, seed, exact) for seed, off in enumerate(errors, 1)]
        of[name] = runs[0] | {f"{key} (case 2)": value for key, value in runs[1].items()}
    truth = exact | {f"{key} (case 2)": value for key, value in exact.items()}
    verdict = verify.compare_with_truth(of["placed"], verify.Original.of(of["original"], truth), truth, BF16)
    assert verdict.ok == right and verdict.limit == pytest.approx(0.1511, abs=1e-3)


@pytest.mark.parametrize("first, others, right, runs", [(0.38, 0.2, True, 7), (0.38, 0.4, False, 7), (0.9, 0.2, False, 1)])
def test_further_inputs_decide_where_one_is_slightly_too_far_off(first, others, right, runs):
    """The original is 0.18 off, as one gradient of SmolLM2-135M on an H200; what is far off is not run again."""
    exact, calls = sketch(0, 0), list[int]()

    def run(seed: int = 0) -> Named:
        calls.append(seed)  # of seed 0 the exact values, of others the original's, the exact and the placed model's
        return sketch((0.0, 0.18, 0.0, others)[0 if seed == 0 else calls.count(seed)], 10 * seed + calls.count(seed), exact)

    model, after, before = nn.Linear(4, 4, dtype=BF16), sketch(first, 1, exact), sketch(0.18, 2, exact)
    assert not verify.compare_in_fp32(model, run, dict(after), dict(before), BF16).ok
    calls.clear()
    assert verify.compare_in_fp32(model, run, after, before, BF16, (1, 2)).ok == right and len(calls) == runs


@pytest.mark.parametrize("size, right", [(1e-3, True), (0.1, False)])
def test_a_gradient_below_the_rounding_of_the_largest_is_measured_against_that(size, right):
    """In bf16, a thousandth of the largest may be rounding alone; a tenth may not, nor a thousandth in fp32."""
    exact = sketch(0, 0)
    exact["gradient of b"] *= size
    off = exact | {"gradient of b": exact["gradient of b"] * 1.45}
    assert verify.compare(off, exact, BF16).ok == right
    assert verify.compare_in_fp32(nn.Linear(4, 4, dtype=BF16), lambda: exact, off, exact, BF16).ok == right
    assert not verify.compare(off, exact, torch.float32).ok


def test_only_what_rounding_may_explain_is_judged_again():
    apart = lambda off: verify.compare(sketch(off, 1, sketch(0, 0)), sketch(0, 0), BF16)  # noqa: E731
    assert not apart(0.1).ok and verify.may_be_rounding(apart(0.1), BF16)
    assert not verify.may_be_rounding(apart(0.5), BF16) and not verify.may_be_rounding(apart(0.1), torch.float32)


def test_that_fp32_had_no_memory_to_judge_is_said(monkeypatch):
    """An 8b in bf16 wants 64 GB more for it: weights and gradients in fp32."""
    model = nn.Linear(400, 1, bias=False, dtype=BF16)
    run = verify.Exercise(model, torch.ones(1, 400, dtype=BF16))
    assert not run.trouble

    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(verify, "compare_in_fp32", full)
    model.weight.data *= 1.1  # further off than the limit, not so far that rounding could not be it
    verdict = run.again()
    assert not verdict.ok and message("place/exercise:that_fp32_had_no_memory").within(str(verdict))


@pytest.mark.parametrize("streamed", [True, False])
def test_the_model_is_its_placed_self_again(streamed):
    model = tiny("llama", BF16)
    placement = gb.place(model, "cpu")
    assert placement.swapped
    ids, places, kinds = tokens(), [p.data_ptr() for p in model.parameters()], [type(m) for m in model.modules()]
    with torch.no_grad():
        before = model(ids).logits
    with verify.original_classes(model), verify.in_fp32(model, streamed):
        assert not any(isinstance(m, Fused) for m in model.modules())
        assert {p.dtype for p in model.parameters()} == ({torch.float32, BF16} if streamed else {torch.float32})
        with torch.no_grad():
            assert (model(ids).logits - before).norm() < 3e-2 * before.norm()
    assert [p.data_ptr() for p in model.parameters()] == places and [type(m) for m in model.modules()] == kinds
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    placement.undo()
    assert not any(isinstance(m, Fused) for m in model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_streamed_weights_give_the_truth_of_a_cast_model(monkeypatch, family):
    """Chunks of a few rows, several samples and none in one, a tied head, scaled embeddings."""
    monkeypatch.setattr(verify, "CHUNK", 4 * 64 * 3)
    monkeypatch.setattr(verify, "ELEMENTS", 100)
    model = tiny(family, BF16, tie_word_embeddings=family != "phi3")
    run, truths = verify.run_of(model), []
    assert run is not None
    for streamed in (True, False):
        with verify.in_fp32(model, streamed):
            truths.append(run())
    one, other = truths
    assert one.keys() == other.keys() and len([name for name in one if name.startswith(verify.GRADIENT)]) > 10
    assert max(verify.distances(one, other).values()) < 1e-5
    assert not any("sampled_gradient" in vars(p) for p in model.parameters())


def test_operations_that_mix_dtypes_are_run_on_a_cast_model():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False, dtype=BF16)

        def forward(self, x):
            return self.inner(x.to(self.inner.weight.dtype)) @ self.inner.weight

    torch.manual_seed(0)
    model, example = Mixed(), torch.randn(3, 8)
    run = verify.run_of(model, example)
    assert run is not None
    exact = run()
    assert verify.compare_in_fp32(model, run, exact, exact, BF16).ok


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_are_sampled_and_freed_one_by_one(monkeypatch, family):
    model = tiny(family, torch.float32)
    gb.place(model, "cpu")
    run = verify.run_of(model)
    assert run is not None
    returned: list[torch.Tensor] = []

    def noted(*given, **options):
        returned.extend(gradients := grad(*given, **options))
        return gradients

    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", noted)
    names = [name for name in run() if name.startswith(verify.GRADIENT)]
    assert len(names) == 1 + sum(1 for _ in model.parameters()), "the embeddings' too"
    # autograd captures the embeddings' before their hook, since the backward of their table needs it
    assert len([t for t in returned if t.untyped_storage().nbytes() > t.itemsize]) == 1


def test_sampled_gradients_are_those_of_one_backward():
    torch.manual_seed(0)
    used, shared, unused = (torch.randn(90, 90, requires_grad=True) for _ in range(3))
    rows = nn.Embedding(50, 8, sparse=True)

    def total():
        return (used @ shared).relu().sum() + (shared**2).sum() + rows(torch.tensor([3, 3, 7])).square().sum()

    leaves = {"used": used, "shared": shared, "unused": unused, "rows": rows.weight}
    found = verify._sampled_gradients(total(), leaves)
    wanted = torch.autograd.grad(total(), [used, shared, rows.weight])
    assert list(found) == ["used", "shared", "rows"]
    for got, want in zip(found.values(), wanted):
        torch.testing.assert_close(got, verify.sample(want))
    assert not used._backward_hooks and used.grad is None


class Wrong(torch.autograd.Function):
    """A weight whose gradient comes back `factor` times as large."""

    @staticmethod
    def forward(ctx, weight, factor):
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("kind", ["llama", "llama tied"])
@pytest.mark.parametrize("factor, right", [(1.0, True), (0.5, False), (0.0, False)])
def test_a_wrong_part_of_a_gradient_is_found(part, kind, factor, right):
    model = tiny(kind, torch.float32)
    exercise, module = verify.Exercise(model), model.get_submodule(part)
    assert not exercise.trouble
    read = nn.functional.embedding if part.endswith("tokens") else lambda x, w: x @ w.t()
    module.forward = lambda x: read(x, Wrong.apply(module.weight, factor))
    verdict = exercise.again()
    assert verdict.ok == right, str(verdict)
    assert right or ".weight" in verdict.where or "together" in verdict.where


def test_parts_of_a_tied_gradient_exist_one_at_a_time():
    """Three tables at once were the most that placing a tied 1b model took."""
    model = tiny("llama tied", BF16, vocab_size=8192, hidden_size=256)
    run, table = verify.run_of(model), model.lm_head.weight.nbytes
    assert run is not None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    assert table < peak(profiled) < 1.9 * table


def test_a_hook_on_a_tied_weight_may_write_into_its_gradient():
    model = tiny("llama tied", torch.float32)
    model.lm_head.weight.register_hook(lambda gradient: gradient.zero_())
    assert not (exercise := verify.Exercise(model)).trouble and exercise.again().ok


def test_memory_is_released_before_the_last_gradient_of_a_backward(monkeypatch):
    """The embeddings' is one of the two largest, and the pieces that layers have left hold no part of it."""
    table, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    computed: list[str] = []
    table.register_hook(lambda gradient: computed.append("table"))
    monkeypatch.setattr(verify.facts, "release_cached", lambda device, most: computed.append("released"))
    verify._sampled_gradients((table[[1, 2]] @ weight).sum(), {"table": table, "weight": weight})
    assert computed == ["released", "released", "table"]


def test_cudnn_compiles_nothing_for_a_comparison():
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    with verify.for_comparison(nn.Linear(2, 2), train_all=False):
        assert not enabled()
    assert enabled()


def test_the_weights_of_a_wider_copy_are_copied_once():
    net = nn.Sequential(nn.Linear(4, 4, dtype=BF16), nn.BatchNorm1d(4, dtype=BF16))
    net.append(net[0])
    with profile(activities=[ProfilerActivity.CPU]) as found:
        wide = verify._widened(net, torch.float32)
    assert sum(event.count for event in found.key_averages() if event.key == "aten::clone") <= len([*net.buffers()])
    assert {t.dtype for t in (*wide.parameters(), wide[1].running_mean)} == {torch.float32} and wide[2] is wide[0]
    assert all(a.float().equal(b) and a is not b for a, b in zip(net.parameters(), wide.parameters()))
    assert {t.dtype for t in (*net.parameters(), net[1].running_mean)} == {BF16}


def test_a_spent_copy_keeps_no_weight():
    """fp32 weights of a layer and their gradients, both whole, were the most that placing an 8b model took."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
    cases = [lambda dtype: (torch.randn(4, 6, dtype=dtype), {})] * 2
    torch.manual_seed(1)
    whole = verify.run(net, cases, torch.float32)
    copy = deepcopy(net)
    torch.manual_seed(1)
    assert verify.distances(verify.run(copy, cases, torch.float32, spent=True), whole) == dict.fromkeys(whole, 0.0)
    assert not any(p.numel() for p in copy.parameters()) and len(whole) == 12


def test_a_model_that_reads_ids_beside_embeddings_is_verified_on_ids():
    """DeepSeek-V4 chooses experts by the token. Fed embeddings alone, it seemed to fail by itself, and nothing was compared."""
    placement = gb.place(deepseek(), "cpu")
    assert placement.verified and placement.swapped and not placement.refused


class Dropping(nn.Module):
    """A part with dropout as a module, as Bloom has it, by the name that others give a number."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention_dropout = nn.LayerNorm(8), nn.Dropout(0.5)

    def forward(self, x):
        return self.attention_dropout(self.norm(x))


def test_dropout_that_is_a_module_is_called():
    model = Dropping()
    placement = gb.place(model, "cpu", example=torch.randn(4, 8))
    assert placement.verified and isinstance(model.attention_dropout, nn.Dropout)


def test_small_tensors_are_compared_in_few_operations(monkeypatch):
    class Counts(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Counts.operations += 1
            return function(*args, **(kwargs or {}))

    one, other = sketch(0.1, 1, sketch(0, 0)), sketch(0, 0)
    run, truth = ({f"{name} {i}": t for i in range(50) for name, t in of.items()} for of in (one, other))
    with Counts():
        together = verify.distances(run, truth)
    assert Counts.operations < 20 < len(together)
    monkeypatch.setattr(verify, "SMALL", 0)
    monkeypatch.setattr(verify, "PART", 7)
    assert verify.distances(run, truth) == pytest.approx(together, rel=1e-5)


def test_the_run_behind_the_last_swap_is_compared_with_the_original(monkeypatch):
    runs, compared, judged = [], [], []
    sketched, compare = verify._sketched, verify.compare

    def noted(model, *rest, **named):
        runs.append(sketched(model, *rest, **named))
        return runs[-1]

    def apart(after, before, dtype):
        compared.append((after, before))
        result = compare(after, before, dtype)
        return replace(result, error=2 * result.limit)

    def in_fp32(model, run, after, before, *_):
        judged.append((type(model).__name__, after["all gradients together"], before["all gradients together"]))
        return verify.Agreement()

    monkeypatch.setattr(verify, "_sketched", noted)
    monkeypatch.setattr(verify, "compare_in_fp32", in_fp32)
    monkeypatch.setattr(verify, "compare", apart)
    assert gb.place(tiny("llama", BF16), "cpu").verified
    assert len(runs) == 4  # the model before any swap, its stack before and after its swap, and the model after its own
    assert compared[-1][0]["loss"] is runs[3]["loss"] and compared[-1][1]["loss"] is runs[0]["loss"]
    together = [run["all gradients together"] for run in runs]
    assert [name for name, *_ in judged] == ["LlamaModel", "LlamaForCausalLM"]
    assert [judged[i][j] is together[k] for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 1, 3), (1, 2, 0))] == [True] * 4
    compared.clear()
    runs.clear()
    gb.place(tiny("llama", torch.float32), "cpu", example={"input_ids": torch.ones(1, 5, dtype=torch.int64)})
    assert len(runs) == 6  # of the example


def test_layers_are_compared_on_values_that_are_drawn_once(monkeypatch):
    first = registry.noise((2, 3), torch.empty(0), seed=7)
    first.requires_grad_().data.zero_()  # by who got them
    monkeypatch.setattr(torch, "randn", lambda *_, **named: pytest.fail("drawn again"))
    again = registry.noise((2, 3), torch.empty(0), seed=7)
    assert again.count_nonzero() == 6 and not again.requires_grad
    assert torch.equal(registry.noise((2, 3), torch.empty(0, dtype=BF16), seed=7), again.bfloat16())
