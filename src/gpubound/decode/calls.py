"""What the steps of a bound model call, so that its kernels' self-tests can begin side by side (kernels/dispatch.py)."""

from ..kernels.decode_product import form
from ..kernels.dispatch import Call
from ..models.decoding import DenseWeights
from .lora import form_of_layers
from .weight_view import WeightView
from .weights import weight_format


def kernel_calls(live: WeightView, weights: str | None, together: bool = False, many: bool = False) -> list[Call]:
    """The products of its steps, in the forms that its layers ask for; also those of steps that take rows `together`, and what
    adds adapters to those of `many` rows."""
    norm, prefix = live.layers[0].attention.norm, weight_format(weights).prefix
    product, add, gate_up = (f"{prefix}{op}" for op in ("norm_product", "add_product", "norm_gate_up"))
    found: list[Call] = [(product, form(norm, 0.0)), (add, ())]
    found.append((product, form(live.norm, live.shape.logit_cap)))
    if live.reader.routers():
        found += [("route", ()), (f"{prefix}routed_gate_up", ()), (f"{prefix}add_routed", ())]
    activation = live.reader.activation()
    found.append((gate_up, form(norm, activation)))
    if together and not live.adapted:
        found += [("tiled_norm_product", form(norm)), ("tiled_norm_gate_up", form(norm, activation)), ("tiled_add_product", ())]
    for attention, mlp in live.layers if live.adapted else ():
        found.append((product, form(norm, 0.0, added=form_of_layers(attention.q, attention.k, attention.v))))
        found.append((add, form_of_layers(attention.o)))
        if isinstance(mlp, DenseWeights):
            found.append((gate_up, form(norm, activation, added=form_of_layers(mlp.gate, mlp.up))))
            found.append((add, form_of_layers(mlp.down)))
    if many:
        found += [("add_adapters", added) for op, added in found if op == add and added]
    return found
