"""The shape of a model of this family, and which parts it is made of."""

from dataclasses import dataclass, fields

from ...formatting import hint
from ..llama.decoder import DecoderConfig
from .kernels.poly_attention import DEGREES
from .parts import TABLES, NamedPart

TIMES = ("none", "film")


@dataclass(frozen=True)
class RichardsConfig(DecoderConfig):
    """A DecoderConfig and the names of its parts. An option that none of the chosen parts reads must keep its default."""

    attention: str = "softmax"
    mlp: str = "swiglu"
    norm: str = "rms"
    causal: bool = True  # False: every token sees all, as masked diffusion wants it
    time: str = "none"  # film: norms are scaled and shifted by a time, as a denoiser of continuous inputs wants it
    rope: bool = True  # False: no rotary positions
    degree: int = 3  # of poly attention: 1, 3, 5 or 7
    soft_clip: float = 8.0  # its scores are c tanh(s / c); 0: as they are
    window: int = 0  # a token sees those less than so far away; 0: all
    max_pos: int = 0  # distances that a learned table adds to the scores of; 0: no table
    gates: bool = False  # each head is multiplied by a Richards curve of x
    alpha: float = 0.5  # of dyt norms, tanh(alpha x), at first
    experts: int = 8  # of a moe, each `intermediate` wide
    slots: int = 2  # experts a token is given to
    balance: float = 0.01  # times how uneven the experts' load is: a part of the loss while a model is trained

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, table in TABLES.items():
            if (name := getattr(self, field)) not in table:
                raise ValueError(f"RichardsConfig: {field}: got {name!r}; {hint(name, table, 'there are')}")
        if self.time not in TIMES:
            raise ValueError(f"RichardsConfig: time: got {self.time!r}; {hint(self.time, TIMES, 'there are')}")
        if self.rope and self.head_dim % 2:
            raise ValueError(f"RichardsConfig: heads are {self.head_dim} wide, and rotation works on pairs; give rope=False.")
        if not self.causal and not all(part.backwards for part in self.parts):
            raise ValueError(
                f"RichardsConfig: causal: got False, but {self.attention} reads a text in one direction; take softmax or poly."
            )
        if not 1 <= self.slots <= self.experts or self.balance < 0:
            raise ValueError(
                f"RichardsConfig: experts, slots and balance: got {self.experts}, {self.slots} and {self.balance}; wanted "
                f"slots from 1 to experts, and a balance of 0 or more."
            )
        if self.degree not in DEGREES or self.soft_clip < 0 or self.window < 0 or self.max_pos < 0:
            raise ValueError(
                f"RichardsConfig: degree, soft_clip, window and max_pos: got {self.degree}, {self.soft_clip}, {self.window} "
                f"and {self.max_pos}; wanted a degree of {', '.join(map(str, DEGREES))}, and nothing below 0."
            )
        self._check_options()

    def _check_options(self) -> None:
        """A window that softmax attention would ignore is refused, not dropped."""
        read = {option for part in self.parts for option in part.options}
        known = {option for table in TABLES.values() for part in table.values() for option in part.options}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in known - read and value != field.default:
                chosen = ", ".join(getattr(self, field) for field in TABLES)
                of = [name for table in TABLES.values() for name, part in table.items() if field.name in part.options]
                raise ValueError(
                    f"RichardsConfig: {field.name}: got {value!r}, but none of {chosen} reads it; it is an "
                    f"option of {' and '.join(of)}."
                )

    @property
    def parts(self) -> list[NamedPart]:
        return [table[getattr(self, field)] for field, table in TABLES.items()]

    @property
    def embedded(self) -> float:
        """What embeddings are multiplied by. Drawn as everything, they are so small that a tanh in a norm's place would leave
        the first layers next to nothing: Zhu et al. lift them likewise."""
        return self.hidden**0.5 if any(part.lifts for part in self.parts) else 1.0

    @property
    def product_parameters(self) -> int:
        """The number of parameters that every token is multiplied by. The embedding is a lookup and does not count."""
        return self.layers * sum(part.products(self) for part in self.parts) + self.vocabulary * self.hidden
