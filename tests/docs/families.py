"""The table of docs/models.md that lists transformers' models by name, from the registry.

`python -m tests.docs.families` writes it.
"""

from importlib import import_module
from pathlib import Path

import transformers
import yaml

from gpubound.models import registry
from gpubound.place.candidates import STACKS

from ..models.wrappers import SOUNDS, STATES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: by tests/docs/families.py -->\n", "<!-- end of families -->"
NAMES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
EXPERTS = {"gpt_oss": "MXFP4 by codes"}
CODED = (  # whose MLPs no part of placing swaps
    "arcee", "gpt_bigcode", "gpt_neo", "gptj", "hyperclovax", "jais2", "lfm2", "mamba2", "nemotron", "nemotron_h", "opt", "phi",
    "qwen3_5", "stablelm", "starcoder2",
)  # fmt: skip
PLAIN = ("falcon", "gpt2")  # whose projections are of a class of their own
TEXTS = ("gemma4", "gemma4_unified", *STATES)  # whose prompts with images no test has tried, or which keep states or latents
MIXED = ("gemma3n",)  # whose blocks no step of the kernels computes
SPARSE = (  # whose MLPs are experts
    *registry.FAMILIES["mixtral"], "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "granitemoehybrid",
    "minicpm3", "mistral4", "qwen3_5_moe", "qwen3_next", "youtu",
)  # fmt: skip
GRIDS = ("cosmos3_omni", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # stacks of models of images and text
TRAINED_BY_NAME = ("llama", "mistral", "qwen2", "qwen3")  # those that models/llama/checkpoint.py reads


def family_of(kind: str) -> str:
    return next(family for family, types in registry.FAMILIES.items() if kind in types)


def config_of(kind: str):
    """The default configuration of a model_type's text model."""
    return transformers.CONFIG_MAPPING[kind]().get_text_config()


def placed(swaps) -> str:
    parts = {
        "Attention": "attention",
        "GatedDeltaNet": "delta rule",
        "Mixer": "Mamba-2",
        "Mamba2Mixer": "Mamba-2",
        "MambaLayer": "Mamba-2",
        "MLP": "MLP",
    }
    found = ["norms", *(name for role, name in parts.items() if swaps.keys() & {role, f"Text{role}"})]
    return ", ".join([*found, "residual adds"] if set(STACKS) & swaps.keys() else found)


def loss(kind: str, swaps) -> str:
    if swaps and "ForCausalLM" not in swaps:
        return "transformers'"
    if not swaps and getattr(config_of(kind), "logits_scaling", None):
        return "transformers': its logits are scaled"
    return "fused"


def row(kind: str) -> list[str]:
    family = family_of(kind)
    module = import_module(f"gpubound.models.{family}.family" if family == "deepseek_v4" else f"gpubound.models.{family}")
    table = module.SWAPS.get(kind, module.SWAPS)
    swaps = {role: swap for role, swap in table.items() if (kind, role) != ("mamba2", "MLP")}  # its table is Bamba's
    own = family in registry.RUNNERS
    some = kind == "lfm2_moe" or (kind in SPARSE and kind not in ("minicpm3", "youtu"))
    adapters = "none" if own or kind in PLAIN else "attention's" if some else "all"
    if kind in MIXED:
        return [
            NAMES[kind],
            placed(swaps),
            loss(kind, swaps),
            "its own forward, on a CPU",
            adapters,
            "transformers",
            "by transformers",
        ]
    if own:
        return [NAMES[kind], "torch's norms", "transformers'", "fused", adapters, "transformers", "as published"]
    loaded = "gpubound" if kind in TRAINED_BY_NAME else "transformers"
    quantised = quantised_folders(kind, swaps)
    return [NAMES[kind], placed(swaps), loss(kind, swaps), "fused", adapters, loaded, quantised]


def quantised_folders(kind: str, swaps) -> str:
    if kind == "gpt_neox":  # its q, k and v are rows of one weight, by head
        return "kept, by its own forward"
    coded = kind in CODED or (swaps.keys() & {"MLP", "TextMLP"} and kind not in SPARSE)
    return "by codes" if coded else EXPERTS.get(kind, "by transformers")


def wrapper_rows() -> list[list[str]]:
    """A row for what prompts of models of images or sounds and text may have."""
    alone = [kind for kind in registry.WRAPPERS if kind in GRIDS or kind in TEXTS or kind.startswith("qwen3_5")]
    images = [kind for kind in registry.WRAPPERS if kind not in (*alone, *SOUNDS)]
    rows = {"texts": alone, "texts and images": images, "texts and sounds": SOUNDS}
    return [[what, ", ".join(sorted((NAMES[kind] for kind in kinds), key=str.lower))] for what, kinds in rows.items()]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *sorted(rows, key=lambda line: line[0].strip("[").lower())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text() -> str:
    kinds = [kind for types in registry.FAMILIES.values() for kind in types if kind not in GRIDS]
    head = ["model", "`gb.place` swaps", "loss", "`gb.decoder`", "adapters in a decoder", "folders are read by"]
    head.append("[quantised folders](#quantised-folders) are decoded")
    inside = ["`gb.decoder` generates from", "models of images or sounds and text"]
    return f"\n{table(head, [row(kind) for kind in kinds])}\n{table(inside, wrapper_rows())}\n"


def parts() -> tuple[str, str, str]:
    """The page before, within and after the tables."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    within, after = rest.split(END)
    return before, within, after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(f"{before}{BEGIN}{text()}{END}{after}", encoding="utf-8")
