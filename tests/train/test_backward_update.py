"""Updates inside backward: the numbers of a step that updates after it, bit for bit, in less memory; skipped; refused."""

import pytest
import torch
from torch import nn

from gpubound.layers.linear_product import linear
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.train import AdamW, AdamW8bit, Muon, TrainStep
from gpubound.train.device_step import gradient_bytes

from .conftest import small, summed


def decoder(tied: bool, dtype=None) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(64, 128, 3, 4, 2, 256, tied=tied), dtype=dtype).train()


class Plain(nn.Module):
    """torch's own layers alone, whose gradients autograd computes; one matrix gets none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3)
        )
        self.head, self.unused = nn.Linear(64, 256, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def plain_loss(model, batch):
    return summed(model, (batch["input_ids"], batch["labels"]))


def both(model, **options) -> tuple[TrainStep, TrainStep]:
    """A step that updates inside backward, and one that does after it, of equal models."""
    loss = "next_token" if model is not Plain else plain_loss
    made = (model() for _ in range(2))
    return tuple(TrainStep(m, loss, **options, update_in_backward=early) for m, early in zip(made, (True, False)))  # type: ignore[return-value]


MODELS = {"tied": lambda: decoder(True), "untied": lambda: decoder(False), "plain": Plain}
OFF = [
    {"precision": "fp32", "graph": "off"},
    {"precision": "bf16", "graph": "off"},
    {"precision": "bf16", "graph": "off", "recompute": "blocks"},
]
CAPTURED = [
    {"precision": "bf16-split", "graph": "require"},
    {"precision": "bf16", "graph": "require", "optimizer": AdamW8bit(lr=1e-2)},
]
CASES = [
    *((kind, options) for kind in ("tied", "plain") for options in OFF),
    *(pytest.param("untied", options, marks=pytest.mark.slow) for options in OFF),
    *(pytest.param(kind, options, marks=pytest.mark.slow) for kind in ("tied", "plain") for options in CAPTURED),
]


def spelled(options: object) -> str:
    """The name of a case, the same in every process: an optimizer's repr has the address of a function."""
    if not isinstance(options, dict):
        return str(options)
    return " ".join(f"{name}={v if isinstance(v, str | int | float) else type(v).__name__}" for name, v in options.items())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "options"), CASES, ids=spelled)
def test_the_numbers_are_those_of_an_update_after_backward(kind, options):
    early, late = both(MODELS[kind], **{"optimizer": AdamW(lr=1e-2)} | options)
    for seed in range(2):
        got, want = early(batch(seed)).read(), late(batch(seed)).read()
        assert (got.loss, got.updates, got.lr, got.tokens) == (want.loss, want.updates, want.lr, want.tokens)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
    here, there = early.state_dict(), late.state_dict()
    assert here.keys() == there.keys() and all(t.equal(there[name]) for name, t in here.items())
    assert all(p.equal(q) for p, q in zip(early.model.parameters(), late.model.parameters()))
    assert early.memory["gradient"] < 0.7 * late.memory["gradient"]
    assert bool(early.captured) == (options["graph"] == "require")


def test_the_memory_is_that_of_a_block_and_of_the_largest_other_matrix():
    model = decoder(False)
    step = TrainStep(model, "next_token", precision="bf16", graph="off", update_in_backward=True)
    block = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert step.memory["gradient"] == 4 * (block + model.lm_head.weight.numel() + vectors)
    held = {p.main_grad.untyped_storage().data_ptr(): p.main_grad.untyped_storage().nbytes() for p in model.parameters()}
    assert list(held.values()) == [step.memory["gradient"]] == [gradient_bytes(step.flat_weights.layout, model)]


class Spoiled(nn.Module):
    """Multiplies by a factor whose gradient is not finite where the loss is: the root of zero."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x, spoil):
        x = self.blocks[0](x)
        x = x + (x * spoil).sqrt().nan_to_num() if spoil is not None else x
        return self.blocks[1](x)


def test_a_block_whose_gradient_is_not_finite_keeps_its_weights():
    """The gradient of a root is infinite at zero: the first block's is NaN, the second one's is not."""
    torch.manual_seed(0)
    model = Spoiled()
    step = TrainStep(
        model, lambda m, b: (m(*b).sum(), 1), AdamW(lr=1e-2), precision="fp32", graph="off", update_in_backward=True
    )
    before = [p.detach().clone() for p in model.parameters()]
    values = step((torch.ones(2, 64), torch.zeros(()))).read()
    assert values.skipped == 1 and not torch.tensor(values.grad_norm).isfinite()
    first, _, second, _ = (not p.equal(q) for p, q in zip(model.parameters(), before))
    assert not first and second and all(p.isfinite().all() for p in model.parameters())
    values = step((torch.full((2, 64), float("nan")), None)).read()
    assert values.skipped == 2, "a loss that is not finite moves no weight"
    assert all(p.isfinite().all() for p in model.parameters())


class Braided(nn.Module):
    """The second block's gradient is begun, then the first one's, before the second's is complete."""

    def __init__(self, product):
        super().__init__()
        torch.manual_seed(0)
        self.product = product
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2)) for _ in range(2))

    def forward(self, x):
        (a, b), (c, d) = self.blocks
        for layer in (a, c, b, d):
            x = self.product(x, layer.weight).tanh()
        return x.sum()


def braided(product, early: bool) -> TrainStep:
    return TrainStep(Braided(product), lambda m, x: (m(x), 1), AdamW(), precision="fp32", graph="off", update_in_backward=early)


def test_blocks_that_take_no_turns():
    """Gradients that autograd computes wait for their block; those that products add to main_grad are too early, an error."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    early, late = (braided(nn.functional.linear, early) for early in (True, False))
    for step in (early, late):
        step(x)
    assert all(p.equal(q) for p, q in zip(early.model.parameters(), late.model.parameters()))
    with pytest.raises(ValueError, match="the same memory"):
        braided(linear, True)(x)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"accumulate": 2}, "accumulate=1"),
        ({"clip": 1.0}, "clip=None"),
        ({"optimizer": Muon()}, "AdamW"),
        ({"optimizer": torch.optim.SGD}, "AdamW"),
        ({"precision": "fp16"}, "bf16"),
        ({"overlap": True}, "overlap=False"),
    ],
    ids=spelled,
)
def test_what_needs_the_whole_gradient_is_refused(options, wanted):
    with pytest.raises(ValueError, match=f"update_in_backward.*{wanted}"):
        TrainStep(decoder(True), "next_token", **options, update_in_backward=True)


def test_models_without_blocks_and_moments_that_share_a_scale_are_refused():
    with pytest.raises(ValueError, match=r"update_in_backward.*no list of blocks"):
        TrainStep(small(), summed, precision="fp32", update_in_backward=True)
    torch.manual_seed(0)
    odd = Decoder(DecoderConfig(40, 88, 2, 4, 2, 256))
    with pytest.raises(ValueError, match=r"update_in_backward.*scale"):
        TrainStep(odd, "next_token", AdamW8bit(), precision="fp32", update_in_backward=True)
    small_blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)) for _ in range(2)))
    with pytest.raises(ValueError, match=r"update_in_backward.*0\.0\.weight and 0\.1\.weight.*one after the other"):
        TrainStep(small_blocks, summed, AdamW8bit(), precision="fp32", update_in_backward=True)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3), AdamW8bit(lr=1e-3)], ids=lambda config: type(config).__name__)
def test_captured_on_the_gpu(optimizer):
    """Attention's backward adds in another order at every run, so losses are near, and gradients are held for a block alone."""
    models = [decoder(True).cuda() for _ in range(2)]
    steps = [
        TrainStep(model, "next_token", optimizer, precision="bf16-split", graph="require", update_in_backward=early)
        for model, early in zip(models, (True, False))
    ]
    for seed in range(6):
        here = {name: t.cuda() for name, t in batch(seed).items()}
        got, want = (step(here).read() for step in steps)
        assert got.loss == pytest.approx(want.loss, rel=1e-2) and got.grad_norm == pytest.approx(want.grad_norm, rel=3e-2)
    assert len(steps[0].captured) == 1 and steps[0].memory["gradient"] < steps[1].memory["gradient"]
