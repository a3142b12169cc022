"""What the trainer's tests share: the reference kernels, and a small model whose data and loss have uneven items."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpubound.data import Corpus
from gpubound.models.llama import checkpoint as llama

from .runs import CHATS, build_corpus, recipe, texts, train


@pytest.fixture(scope="session")  # nobody writes to it
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """A run of the small recipe, all of its steps: for tests that leave it as it is."""
    return train(recipe(corpus, tmp_path_factory.mktemp("finished")))[0]


@pytest.fixture(scope="module")
def two_phases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (folder / "books").mkdir()
    for number, text in enumerate(texts()):
        (folder / "books" / f"{number}.txt").write_text(text)
    return {
        "vocabulary": 300,
        "phases": (
            {"name": "pretrain", "data": (str(folder / "books"),), "steps": 6},
            {"name": "instruct", "data": (str(folder / "chats.jsonl"),), "steps": 5, "lr": 1e-4, "accumulate": 1},
        ),
    }


class Small(nn.Module):
    """Token -> logits, with what a layout must cope with: a table, a matrix with bias, a norm, and (tied) the table again."""

    def __init__(self, tied: bool = True, words: int = 13, width: int = 8, dropout: float = 0.0):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(words, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.dropout(torch.tanh(self.mix(x)))))


def small(seed: int = 0, **options) -> Small:
    torch.manual_seed(seed)
    return Small(**options)


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    ids, labels = batch
    logits = model(ids)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"), (labels != -100).sum()


def spoiled(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`summed` times a factor of the batch's own, which a NaN turns into a step that must be skipped."""
    ids, labels, factor = batch
    total, items = summed(model, (ids, labels))
    return total * factor, items


def usual_step(model: nn.Module, batch: tuple[Tensor, Tensor], *optimizers) -> tuple[float, float]:
    """A step of the usual loop over a whole batch: mean loss, clip_grad_norm_, step. Return the loss and the norm."""
    total, items = summed(model, batch)
    (total / items).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return (total / items).item(), norm.item()


def run_spoiled(step, start: int, stop: int) -> list[str]:
    """What steps start..stop report, in words that are equal where the bits are. Step 2 is not finite."""
    factors = [torch.tensor(float("nan") if i == 2 else 1.0) for i in range(start, stop)]
    return [repr(step((*draw(4, seed=i), factor)).read()) for i, factor in zip(range(start, stop), factors)]


def check_captured_skipped_and_resumed(fresh) -> dict[str, Tensor]:
    """The captured step is the eager one bit for bit, a step that is not finite among them; a resumed run is the whole one.

    `fresh(graph)` makes a model and its step. Returned is the state behind four steps.
    """
    (model, step), (twin, captured) = fresh("off"), fresh("require")
    first = run_spoiled(step, 0, 4)
    assert run_spoiled(captured, 0, 4) == first and "skipped=1" in first[-1]
    assert all(p.equal(q) for p, q in zip(model.parameters(), twin.parameters()))
    assert captured.captured[0].certificate.bitwise
    saved, weights = {k: v.clone() for k, v in step.state_dict().items()}, named(model)
    want = run_spoiled(step, 4, 7)
    again, resumed = fresh("off")
    resumed.load_state_dict(saved)
    again.load_state_dict(weights, strict=False)
    assert run_spoiled(resumed, 4, 7) == want
    here, there = step.state_dict(), resumed.state_dict()
    assert here.keys() == there.keys() and all(here[name].equal(there[name]) for name in here)
    return saved


def draw(rows: int, seed: int = 0, tokens: int = 6, words: int = 13) -> tuple[Tensor, Tensor]:
    """Rows whose number of valid labels differs from row to row."""
    g = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(words, (rows, tokens), generator=g), torch.randint(words, (rows, tokens), generator=g)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=g)
    return ids, torch.where(torch.arange(tokens) < lengths, labels, -100)


def cut(batch: tuple[Tensor, ...], parts: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.tensor_split(parts) for t in batch)))


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="session")  # nobody writes to it
def base(corpus, tmp_path_factory):
    """A Hugging Face folder with the corpus's own tokenizer, whose weights are random."""
    torch.manual_seed(0)
    model = llama.make("tiny", 320, 4096, torch.device("cpu"))
    return llama.save(model, tmp_path_factory.mktemp("base") / "hf", Corpus.open(corpus).tokenizer())
