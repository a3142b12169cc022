"""What decoding is asked to reach, by shape."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Goal:
    """Tokens a second, (gate, moonshot), by batch; seconds to the first token, and whether they are a gate."""

    speed: dict[int, tuple[float, float]] = field(default_factory=dict)
    first_token_s: float = 3.0
    gated: bool = False
    far: tuple[float, float | None] | None = None
    """one row behind 4,096 tokens"""
    packed: dict[str, tuple[float, float]] = field(default_factory=dict)
    """one row, by the format of the weights"""


GOALS = {
    "135m": Goal(),
    "350m": Goal({1: (2_650, 3_250), 32: (36_000, 40_000)}, 1.0, gated=True, far=(2_050, None)),
    "1b": Goal({1: (1_380, 1_500), 32: (30_000, 33_000)}, far=(1_230, None)),
    "8b": Goal({1: (266, 277), 32: (6_600, 7_000)}, 3.0, gated=True, far=(250, None), packed={"int4": (600, 750)}),
    "moe": Goal(),
    "tiny": Goal(),
}
