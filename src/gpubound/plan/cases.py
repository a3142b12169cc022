"""What was measured and can be predicted: cases of `gpubound bench train`, `bench lora` and `bench ranks`, as settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..models.llama.decoder import PRESETS, Decoder
from ..train.adapters import Lora
from ..train.optimizer import AdamW
from .lora import LoraSetting, adapted
from .reading import META, outlined
from .setting import Setting

CASES: dict[str, tuple[str, int, int, int, str, str]] = {
    "350m": ("350m", 1024, 16, 1, "cheap", "bf16"),
    "350m-x8": ("350m", 1024, 16, 8, "cheap", "bf16"),
    "350m-fp8": ("350m", 1024, 16, 1, "cheap", "fp8"),
    "135m": ("135m", 1024, 1, 1, "cheap", "bf16"),
    "1b-x8": ("1b", 2048, 4, 8, "none", "bf16"),
}
"""A case of `bench train` -> preset, seq, micro-batch, accumulate, recompute, precision."""
LORA_CASES: dict[str, tuple[str, int, int, str | None]] = {
    "1b": ("1b", 1024, 8, None),
    "1b-nf4": ("1b", 1024, 8, "nf4"),
    "135m": ("135m", 512, 1, None),
    "8b": ("8b", 4096, 1, None),
    "8b-fp8": ("8b", 4096, 1, "fp8"),
}
"""A case of `bench lora` -> preset, seq, micro-batch, the base's format."""
RANKS_CASES: tuple[tuple[str, int, int, int, str, int, bool], ...] = (
    ("350m", 1024, 16, 1, "cheap", 2, False),
    ("350m", 1024, 16, 1, "cheap", 4, False),
    ("1b", 2048, 4, 8, "none", 4, False),
    ("8b", 4096, 4, 1, "cheap", 2, True),
    ("8b", 4096, 4, 1, "cheap", 4, True),
)
"""Of a case of `bench ranks`: preset, seq, micro-batch, accumulate of a rank, recompute, GPUs, whether in shards."""
ROWS_CASES = (("8b", 4096, 4, None, 2),)
"""Of a case of `bench ranks` with adapters over a base in shards: preset, seq, micro-batch, the base's format, GPUs."""
RANK = 16
AS_PEER = {"1b": "1b, eight adapters in one batch"}
"""A case that is measured as another one's peer, too, under the name OURS."""
OURS = "ours-lora"
DRAWN = 4  # bytes of a number that `bench lora` draws, before it is cast to bf16 on the GPU


@dataclass(frozen=True)
class Case:
    """One case of a benchmark as a setting."""

    bench: str
    name: str
    setting: Setting

    def newest(self, lines: Sequence[dict[str, Any]], what: str, unit: str) -> tuple[float, str] | None:
        """The figure of the newest line, and its commit. `what` follows the case's name."""
        found = None
        for line in lines:
            if line["bench"] != self.bench or line["unit"] != unit or line["dirty"]:
                continue
            if line["case"] == self.name + what:
                found = line["ours"], line["commit"]
            elif line["case"] == AS_PEER.get(self.name, "") + what and line["peer_name"] == OURS:
                found = line["peer"], line["commit"]
        return found


def cases() -> Iterator[Case]:
    for name, asked in CASES.items():
        yield Case("train", name, setting_of_case(*asked))
    for name, of_adapters in LORA_CASES.items():
        yield Case("lora", name, lora_setting_of_case(*of_adapters))
    for preset, seq, rows, accumulate, recompute, world, sharded in RANKS_CASES:
        one = setting_of_case(preset, seq, rows, accumulate, recompute, "bf16")
        yield Case("ranks", f"{preset} on {world}", replace(one, world=world, sharded=sharded))
    for preset, seq, rows, base, world in ROWS_CASES:
        over = lora_setting_of_case(preset, seq, rows, base)
        yield Case("ranks", f"{preset}-lora on {world}", replace(over, world=world, sharded=True))


def setting_of_case(preset: str, seq: int, rows: int, accumulate: int, recompute: str, precision: str) -> Setting:
    outline = outlined(Decoder(PRESETS[preset], device=META))
    return Setting(outline, AdamW(), precision, seq, rows, accumulate, recompute)


def lora_setting_of_case(preset: str, seq: int, rows: int, base: str | None) -> LoraSetting:
    model = Decoder(PRESETS[preset], device=META)
    whole = Setting(outlined(model), AdamW(), "bf16", seq, rows, 1)
    return replace(adapted(whole, Lora(RANK, base=base), model), cast_from=DRAWN)
