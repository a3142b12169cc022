"""The formulas between seconds and the figures that are printed. One place, so that two figures never mean different things."""


def bandwidth(bytes_moved: float, seconds: float) -> float:
    """Bytes a second. `bytes_moved` counts each input read once and each output written once, whatever an implementation does.

    >>> bandwidth(2e9, 0.001) / 1e12
    2.0
    """
    return _per_second("bandwidth", bytes_moved, seconds)


def rate(flops: float, seconds: float) -> float:
    """Floating-point operations a second; an (m, k) by (k, n) product is 2·m·k·n, and recomputed work is not counted."""
    return _per_second("rate", flops, seconds)


def train_flops_per_token(params_in_products: int, layers: int, hidden: int, seq: int) -> int:
    """Operations to train a decoder on one token: 6·P + 6·layers·seq·hidden.

    P counts the weights that enter a matrix product for every token: all linear layers and the output head, not the embedding's
    lookup (tied weights count once, for the head). Each costs a multiply and an add forward, and twice that backward.
    Attention's two products cost 4·seq·hidden a layer forward over the full square, 12 with the backward; a causal mask needs
    half of it, and half is what is counted. `hidden` is query heads · head size where that differs from the model's width.

    >>> train_flops_per_token(1_000_000, layers=2, hidden=64, seq=128)
    6098304
    """
    return 6 * params_in_products + 6 * layers * seq * hidden


def mfu(tokens_per_s: float, flops_per_token: float, flops_per_s: float) -> float:
    """Model FLOPs utilisation: the share of `flops_per_s` that useful work takes. Say whose: a datasheet's, or this machine's.

    >>> mfu(tokens_per_s=100_000, flops_per_token=4e9, flops_per_s=800e12)
    0.5
    """
    if not flops_per_s > 0:
        raise ValueError(f"mfu: flops_per_s must be positive, got {flops_per_s}; take it from measure.ceilings().")
    return tokens_per_s * flops_per_token / flops_per_s


def _per_second(what: str, amount: float, seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{what}: seconds must be positive, got {seconds}; time more work in one run.")
    return amount / seconds
