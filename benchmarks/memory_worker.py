"""One recipe of examples/small_gpus in this process, or one small step with each of several options: the peak of each phase
within the recipe's memory, with random weights.

The only argument is a JSON object: recipe (a file), or options (keys of recipes by name), shape, seq and micro; device, dry.
The answer is one line, as a contender's (serving.py): what was found, by name.
"""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import gpubound
from gpubound.cli import arguments
from gpubound.cli.train_options import from_file
from gpubound.device import CONTEXT, grow_segments, memory_size
from gpubound.generate.options import Generate
from gpubound.measure.memory_phases import MemoryPhases
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.place import place
from gpubound.plan import phases
from gpubound.plan.step import META, outlined
from gpubound.train import adapters
from gpubound.train.objectives.word_loss import NextToken
from gpubound.train.recipe import Recipe

from .harness import release
from .serving import answer, settle
from .shapes import SHAPES, Shape

MORE = {"3b": Shape(3072, 8192, 28, 24, 8, 128256, True)}
STEPS = 3  # after the first


class RandomWeights:
    """A family whose folders hold random weights of one config, which are drawn where others are read."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def unread(self, folder: Path) -> Decoder:
        return Decoder(self.config, device=META)

    @staticmethod
    def read_parts(folder: Path, parts: dict[str, tuple[Tensor, Any]]) -> None:
        for tensor, _ in parts.values():
            tensor.detach().normal_(0.0, 0.02) if tensor.dim() > 1 else tensor.detach().fill_(1.0)


def config_of(recipe: Path, dry: bool) -> DecoderConfig:
    """Return the config of the shape in the file's name: ..._8b_12gb.yaml."""
    found = re.search(r"_(\d+b)_", recipe.stem)
    assert found is not None, f"{recipe}: its name has no shape"
    s = SHAPES["tiny"] if dry else (SHAPES | MORE)[found[1]]
    return DecoderConfig(s.hidden, s.intermediate, s.layers, s.heads, s.kv_heads, s.vocab, tied=s.tied)


def small(recipe: Recipe) -> Recipe:
    """Return the recipe with few tokens, for a model of two blocks."""
    recompute = "1" if recipe.recompute.isdecimal() else recipe.recompute
    return replace(recipe, seq=16, accumulate=min(2, recipe.accumulate), recompute=recompute)


def measured(recipe: Recipe, config: DecoderConfig, device: torch.device) -> tuple[MemoryPhases, dict[str, int]]:
    """Return the peaks of the recipe's phases, and the bytes that its step holds besides activations, by name."""
    memory, lora, dtype = MemoryPhases(device), recipe.adapters, torch.bfloat16
    with memory("place"):
        if lora is not None and lora.base is not None:
            with patch.object(adapters, "read_parts", RandomWeights.read_parts):
                model: Any = adapters.load_quantised("", RandomWeights(config), lora.base, device, dtype)
        else:
            model = Decoder(config, device=device, dtype=dtype)
        place(model, device)
        if lora is not None:
            lora.add(model)
    recipe = replace(recipe, precision="bf16" if recipe.precision == "auto" else recipe.precision)
    ids = torch.randint(config.vocabulary, (recipe.micro_batch, recipe.seq), device=device)
    batches = [{"input_ids": ids, "labels": ids}] * recipe.accumulate
    with memory("make step"):
        step = recipe.make_step(model.train(), NextToken(), device)
    for phase, steps in (("first step", 1), ("steps", STEPS)):
        with memory(phase):
            for _ in range(steps):
                loss = step(batches).read().loss
            settle(device.type)
    assert loss == loss, "the loss is not a number"
    return memory, step.memory


def decode(file: Path, device: torch.device, dry: bool) -> None:
    """Measure the command of a script: a model of random weights in host memory, and its decoder on the device."""
    command = shlex.split(next(line for line in file.read_text().splitlines() if line.startswith("gpubound generate ")))
    options, memory = arguments(Generate, command[2:], "generate"), MemoryPhases(device)
    assert options.memory is not None, f"{file}: it names no memory"
    if device.type == "cuda":
        gpubound.limit(options.memory)
    model = Decoder(config_of(file, dry), device=META, dtype=torch.bfloat16).to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # on the device: a CPU draws 8 billion in minutes
            drawn = torch.empty_like(parameter, device=device)
            parameter.copy_(drawn.normal_(0.0, 0.02) if parameter.dim() > 1 else drawn.fill_(1.0))
    with memory("make decoder"):
        decoder = gpubound.decoder(model, max_length=options.max_length or 2048, weights=options.weights, device=device)
    with memory("generate"):
        decoder.generate([list(range(64))], max_new_tokens=8 if dry else 256, stop=())
    peaks = {phase: peak._asdict() for phase, peak in memory.peaks.items()}
    room, state = memory_size(options.memory) - CONTEXT, {"weights": decoder.body.weight_bytes}
    answer({file.stem: {"peaks": peaks, "predicted": {}, "room": room, "state": state}})


def trained(recipe: Recipe, config: DecoderConfig, device: torch.device) -> dict[str, Any]:
    """Return what was predicted and what was measured of a recipe's step."""
    torch.manual_seed(0)
    step = outlined(
        Decoder(config, device=META), recipe.numbers, "bf16" if recipe.precision == "auto" else recipe.precision, recipe.seq,
        recipe.micro_batch, recipe.accumulate, recompute=recipe.recompute, in_backward=recipe.update_in_backward,
        offload=recipe.offload_optimizer, lora=recipe.adapters,
    )  # fmt: skip
    memory, state = measured(recipe, config, device)
    peaks = {phase: peak._asdict() for phase, peak in memory.peaks.items()}
    return {"peaks": peaks, "predicted": phases(step, stored=2), "state": state}


def by_option(job: dict[str, Any], device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the facts of one step with each of the job's options, in turn, in growing segments as `gpubound train`.

    In plain ones adapters of 350m reserved 12 % more than is predicted: the pieces that the runs before had left.
    """
    grow_segments(device)
    s, found = SHAPES["tiny" if job["dry"] else job["shape"]], dict[str, dict[str, Any]]()
    config = DecoderConfig(s.hidden, s.intermediate, s.layers, s.heads, s.kv_heads, s.vocab, tied=s.tied)
    for name, keys in job["options"].items():
        recipe = Recipe(model="a folder", data=("none",), seq=job["seq"], micro_batch=job["micro"], accumulate=1, **keys)
        recipe = small(recipe) if job["dry"] else recipe
        found[f"{job['shape']} {recipe.micro_batch} x {recipe.seq:,}, {name}"] = trained(recipe, config, device)
        release(device)
    return found


def main(job: dict[str, Any]) -> None:
    device, file = torch.device(job["device"]), Path(job["recipe"])
    if job.get("options"):
        answer(by_option(job, device))
        return
    if file.suffix == ".sh":
        decode(file, device, job["dry"])
        return
    options, config = from_file(str(file)), config_of(file, job["dry"])
    recipe = small(options.recipe()) if job["dry"] else options.recipe()
    assert options.memory is not None, f"{file}: it names no memory"
    if device.type == "cuda":
        gpubound.limit(options.memory)
    answer({file.stem: trained(recipe, config, device) | {"room": memory_size(options.memory) - CONTEXT}})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
