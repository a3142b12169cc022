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
    "350m": Goal({1: (2_000, 3_000), 32: (17_900, 26_800)}, 1.0, gated=True),
    "1b": Goal({1: (1_250, 1_450), 32: (25_200, 32_000)}),
    "8b": Goal({1: (250, 265), 32: (6_000, 6_800)}, 3.0, gated=True),
    "moe": Goal(),
    "tiny": Goal(),
}
