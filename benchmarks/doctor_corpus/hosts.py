"""The training scripts that stalls are planted into. All do the same; they differ in where a line of it stands.

A script is made of slots. The code of a slot sees `model, optimizer, device, state, x, y, loss, step` as far as they exist
there. `state` is a namespace for whatever a plant wants to keep from step to step.
"""

from collections.abc import Callable
from pathlib import Path
from textwrap import indent

from .plant import HERE, Script, Slots

# (width, hidden, depth, rows) of a stack of MLP blocks. The first is bound by launches: 24 layers of small kernels. In the
# second a step has 3.3 TFLOP in 100 launches, and the host is far ahead. 67M parameters are soon built on the host.
MODELS = {"launch-bound": (64, 128, 24, 32), "gpu-bound": (1024, 8192, 4, 8192)}
TINY = (8, 16, 2, 4)  # for a CPU

HEAD = '''"""A training script of the planted-stall corpus."""

import argparse
import itertools
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
{imports}

SIZES = {{"full": {full}, "tiny": {tiny}}}
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="full")
parser.add_argument("--steps", type=int, default=120)
options = parser.parse_args()
WIDTH, HIDDEN, DEPTH, ROWS = SIZES[options.size]
WORKERS = 8 if options.size == "full" else 0
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
torch.manual_seed(0)


def host_rows():
    return torch.randn(WIDTH, dtype=dtype).repeat(ROWS, 1)


def pinned(tensor):
    return tensor if device.type == "cpu" else tensor.pin_memory()


{classes}
'''

SLOTS = {
    "imports": "",
    "classes": """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))
""",
    "more_classes": "",
    "build": "model = nn.Sequential(*(Block() for _ in range(DEPTH))).to(device, dtype)",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)",
    "data": "batches = itertools.cycle([(host_rows().to(device), host_rows().to(device)) for _ in range(4)])",
    "setup": "",
    "upload": "",
    "forward": "loss = functional.mse_loss(model(x), y)",
    "zero": "optimizer.zero_grad()",
    "backward": "loss.backward()",
    "after_backward": "",
    "update": "optimizer.step()",
    "after_update": "",
    "report": "",
}

PLAIN = """
def main():
    state = SimpleNamespace(step=0)
{built}
    for step, (x, y) in zip(range(options.steps), batches):{loop}
        state.step = step
{upload}
{forward}
{updated}
{report}


if __name__ == "__main__":
    main()
"""

TRAINER = """
class Trainer:
    def __init__(self):
        state = SimpleNamespace(step=0)
{built}
        self.model, self.optimizer, self.batches, self.state = model, optimizer, batches, state

    def train(self, steps):
        for step, (x, y) in zip(range(steps), self.batches):{loop}
            self.state.step = step
            loss = self.compute_loss(*self.prepare(x, y))
            self.update(loss)
            self.log(loss, step)

    def prepare(self, x, y):
        state = self.state
{upload}
        return x, y

    def compute_loss(self, x, y):
        model, state = self.model, self.state
{forward}
        return loss

    def update(self, loss):
        model, optimizer, state = self.model, self.optimizer, self.state
{updated}

    def log(self, loss, step):
        model, state = self.model, self.state
{report}


if __name__ == "__main__":
    Trainer().train(options.steps)
"""

HELPER = """
def build():
    state = SimpleNamespace(step=0)
{built}
    return model, optimizer, batches, state


def prepare(x, y, state):
{upload}
    return x, y


def compute_loss(model, x, y, state):
{forward}
    return loss


def update(model, optimizer, loss, state):
{updated}


def log(model, loss, step, state):
{report}
    return loss
"""

HELPED = '''"""A training script of the planted-stall corpus, whose work lies in another file."""

import helper

model, optimizer, batches, state = helper.build()
for step, (x, y) in zip(range(helper.options.steps), batches):{loop}
    state.step = step
    x, y = helper.prepare(x, y, state)
    loss = helper.compute_loss(model, x, y, state)
    helper.update(model, optimizer, loss, state)
    helper.log(model, loss, step, state)
'''


def _filled(body: str, slots: Slots, model: str, depths: dict[str, int], loop: str) -> str:
    """A file with its slots filled, each group of them at its own depth of indentation."""
    groups = {
        "built": ("build", "optimizer", "data", "setup"),
        "upload": ("upload",),
        "forward": ("forward",),
        "updated": ("zero", "backward", "after_backward", "update", "after_update"),
        "report": ("report",),
    }
    text = {
        group: indent("\n".join(slots[name] for name in names if slots[name]), "    " * depths[group])
        for group, names in groups.items()
    }
    classes = "\n\n".join(slots[name] for name in ("classes", "more_classes") if slots[name])
    head = HEAD.format(imports=slots["imports"], full=MODELS[model], tiny=TINY, classes=classes)
    written = head + body.format(loop=loop, **text)
    return written.replace("\n\n\n\n", "\n\n\n")


def _everywhere(depth: int, **others: int) -> dict[str, int]:
    return dict.fromkeys(("built", "upload", "forward", "updated", "report"), depth) | others


def plain(slots: Slots, model: str, loop: str) -> dict[str, str]:
    return {"train.py": _filled(PLAIN, slots, model, _everywhere(2, built=1), loop)}


def trainer(slots: Slots, model: str, loop: str) -> dict[str, str]:
    return {"train.py": _filled(TRAINER, slots, model, _everywhere(2), loop)}


def helper(slots: Slots, model: str, loop: str) -> dict[str, str]:
    return {"train.py": HELPED.format(loop=loop), "helper.py": _filled(HELPER, slots, model, _everywhere(1), "")}


Host = Callable[[Slots, str, str], dict[str, str]]
HOSTS: dict[str, Host] = {"plain": plain, "trainer": trainer, "helper": helper}


def write(folder: Path, slots: Slots, *, host: str, model: str, kinds: tuple[str, ...] = (), loop: bool = False) -> Script:
    """Write the files of one script into `folder`."""
    if unknown := sorted(set(slots) - set(SLOTS)):
        raise ValueError(f"doctor_corpus: there is no slot {unknown[0]!r}; wanted some of {', '.join(SLOTS)}.")
    files = HOSTS[host](SLOTS | dict(slots), model, f"  {HERE}" if loop else "")
    folder.mkdir(parents=True, exist_ok=True)
    blamed = set()
    for name, text in files.items():
        lines = text.split("\n")
        blamed |= {(name, number) for number, line in enumerate(lines, 1) if line.endswith(HERE)}
        (folder / name).write_text("\n".join(line.removesuffix(HERE).rstrip() for line in lines), encoding="utf-8")
    return Script(folder / "train.py", kinds, frozenset(blamed))
