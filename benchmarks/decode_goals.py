"""What decoding is asked to reach, by shape."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Goal:
    """Tokens a second, (gate, moonshot) by batch; seconds to the first token, and whether they are a gate."""

    speed: dict[int, tuple[float, float]] = field(default_factory=dict)
    first_token_s: float = 3.0
    gated: bool = False


GOALS = {
    "135m": Goal(),
    "350m": Goal({1: (2_650, 3_250), 32: (36_000, 40_000)}, 1.0, gated=True),
    "1b": Goal({1: (1_380, 1_500), 32: (30_000, 33_000)}),
    "8b": Goal({1: (266, 277), 32: (6_600, 7_000)}, 3.0, gated=True),
    "moe": Goal(),
    "tiny": Goal(),
}
