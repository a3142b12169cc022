"""Any torch.optim.Optimizer inside a TrainStep: its update follows the device's decision, on fp32 weights.

Gradients are summed, divided, clipped and checked on the device as for our own optimizers. Then the host waits for the step's
report to learn whether to update and at which rate, and the optimizer's own `step()` runs on one Parameter for each of the
model's, over the fp32 masters where there are any.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import GraphError
from ..kernels import plan_update
from ..trace import fallback
from .accumulate import FlatLayout, lay_out
from .adamw import FlatAdamW, Weights
from .precision import Precision, read, spelled
from .schedule import is_rate

if TYPE_CHECKING:
    from .device_step import StepResult

PREFIX, CLASS = "optimizer.", "optimizer.class"  # of names in a state
WHOLE_MATRICES = ("Adafactor", "LBFGS", "Muon")  # of torch.optim: their update of an element depends on others
NUMBERS = {"bool": bool, "int": int, "float": float}  # types that an optimizer may keep besides tensors


class _Holder:
    """Holds the optimizer out of sight of capture(), which does not look into slots: its rates are numbers of the host, which
    change from step to step and are no part of the graph."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer


class TorchOptimizer:
    """A function that makes a torch optimizer of a list of Parameters, in place of AdamW(...)."""

    def __init__(self, make: Callable[[list[Parameter]], Optimizer], graph: str):
        self.make, self.graph = make, graph

    def lay_out(self, model: nn.Module, named: Iterable[tuple[str, Parameter]], precision: Precision) -> FlatLayout:
        """Return the layout of the flat buffers, and make the optimizer over fp32 stand-ins for the parameters."""
        precision.check_rounded("a torch optimizer")
        layout = lay_out(named, precision.dtype, others=model.named_buffers())
        self.parameters = [Parameter(slot.parameter.detach().float()) for slot in layout.slots]
        self._holder = _Holder(self.make(self.parameters))
        _check_optimizer(self.optimizer, self.parameters)
        self.lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.lr = max(self.lrs)
        if self.graph == "require":
            raise GraphError(f"TrainStep: {self.why_not_captured}; take graph='auto', which runs it call by call.")
        return layout

    @property
    def optimizer(self) -> Optimizer:
        return self._holder.optimizer

    @property
    def why_not_captured(self) -> str:
        name = type(self.optimizer).__name__
        return f"{name} runs call by call, after a wait for the report of the step, and no graph holds its update"

    by_element = False  # its state is its own

    @property
    def whole(self) -> str | None:
        """The reason why it needs whole matrices, if it is known to."""
        name = type(self.optimizer).__name__
        return f"{name} looks at whole matrices, or at all of them" if name in WHOLE_MATRICES else None

    def moment_bytes(self, layout: FlatLayout) -> int:
        """Return 0: an optimizer creates its state at its first step."""
        return 0

    def flat(self, *rest: Any) -> "FlatTorchOptimizer":
        return FlatTorchOptimizer(self, *rest)


class FlatTorchOptimizer(FlatAdamW):
    """A torch optimizer in place of FlatAdamW, with the same four scalars of state, schedule, clipping and finite check."""

    config: TorchOptimizer  # type: ignore[assignment]
    loads = (PREFIX,)
    fused_update = False

    def __init__(self, config: TorchOptimizer, weights: Weights, *rest: Any):
        super().__init__(config, weights, *rest)  # type: ignore[arg-type]
        layout, self.parameters = weights.layout, config.parameters
        buffers = zip(layout.groups, weights.finest())
        views = [slot.view(buffer, group.start) for group, buffer in buffers for slot in layout.slots_of(group)]
        for parameter, view in zip(self.parameters, views):
            parameter.data = view
        self._ratios = [lr / config.lr if config.lr else 1.0 for lr in config.lrs]
        self._fallback = None if config.graph == "off" or layout.device.type == "cpu" else config.why_not_captured
        self._updates = 0  # before the present step
        self._gradients: list[Tensor] = []
        self._groups_before = self._groups()

    @property
    def optimizer(self) -> Optimizer:
        return self.config.optimizer

    def _begin_moments(self, layout: FlatLayout) -> None:
        """Do nothing: the optimizer creates its state at its first step."""

    def start_self_tests(self) -> None:
        """Do nothing: it calls none of our kernels."""

    @property
    def moments(self) -> list[Tensor]:
        """Return no tensors: a captured step does not write the optimizer's state."""
        return []

    def update(self, gradient: Tensor, totals: Tensor, of_norm: Tensor) -> Tensor:
        """Decide, and scale the gradient. `carry_on` does the rest, outside of the step's own graph."""
        plan, report = plan_update(
            of_norm,
            totals,
            self.state,
            self.rates,
            clip=self.clip,
            growth_interval=self.growth_interval,
        )
        gradient.mul_(plan[1])
        return report

    def check(self) -> None:
        """Raise ValueError if its groups or rates were changed since the last step: the step would undo or ignore that."""
        for number, (now, before) in enumerate(zip_longest(self._groups(), self._groups_before)):
            if now is None or before is None or now[0] != before[0]:
                raise ValueError(
                    f"TrainStep: optimizer: its param_group {number} has other parameters than when it was made, and the step "
                    f"trains those it found then; close() this step and make a new one."
                )
            if now != before:
                rate = float(self.optimizer.param_groups[number]["lr"])
                raise ValueError(
                    f"TrainStep: optimizer: the lr of its param_group {number} was set to {rate:.3g} from outside, by a "
                    f"scheduler perhaps, and the step would set it back; pass schedule=Schedule(...) instead, or set the "
                    f"step's own lr."
                )

    def _groups(self) -> list[tuple]:
        """Return each group's size and rate, or the version of a rate that is a tensor: no wait for the device."""
        groups = ((len(group["params"]), group["lr"]) for group in self.optimizer.param_groups)
        return [(size, (id(lr), lr._version) if isinstance(lr, Tensor) else lr) for size, lr in groups]

    @torch.no_grad()
    def carry_on(self, gradient: Tensor, result: "StepResult") -> None:
        """Run the optimizer's own update, if the report says that the weights move."""
        self._gradients = self._gradients or [slot.view(gradient) for slot in self.weights.layout.slots]
        if self._fallback:
            fallback("train step: optimizer", self._fallback)
        values = result.read()
        if values.updates != self._updates:
            self._updates = values.updates
            for group, ratio in zip(self.optimizer.param_groups, self._ratios):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(values.lr * ratio)
                else:
                    group["lr"] = values.lr * ratio
            for parameter, view in zip(self.parameters, self._gradients):
                parameter.grad = view
            with torch.enable_grad():
                self.optimizer.step()
            self.weights.round_masters()
        self._groups_before = self._groups()

    def _owners(self) -> dict[str, dict[str, Any]]:
        """Return the dicts that hold its state: one for each parameter, by name, and one for each group."""
        names = [slot.name for slot in self.weights.layout.slots]
        by_parameter = {f"{PREFIX}{name}": self.optimizer.state[p] for name, p in zip(names, self.parameters)}
        return by_parameter | {f"{PREFIX}group {i}": group for i, group in enumerate(self.optimizer.param_groups)}

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state by parameter name, and its groups' numbers. Numbers are copies, tensors are live."""
        yield CLASS, spelled(type(self.optimizer).__name__)
        for owner, values in self._owners().items():
            for key, value in values.items():
                kind = type(value).__name__
                if "params" in values and (key == "lr" or kind not in ("int", "float")):
                    continue  # of a group: its rate is the schedule's, and its options are not state
                if isinstance(value, Tensor):
                    yield f"{owner}/{key}", value
                elif kind in NUMBERS:
                    yield f"{owner}/{key}={kind}", torch.tensor(value, dtype=torch.float64, device="cpu")
                elif value is not None:
                    raise ValueError(
                        f"TrainStep: {owner} keeps {key} as a {kind}, wanted tensors and numbers: "
                        f"a checkpoint could not hold it."
                    )

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `named_moments` gave, whether or not this optimizer has created its state."""
        saved, own = read(state[CLASS]) if CLASS in state else "another", type(self.optimizer).__name__
        if saved != own:
            raise ValueError(
                f"load_state_dict: optimizer: got the state of {saved}, wanted {own}'s; "
                f"make the TrainStep with the optimizer that the run began with."
            )
        names = [name for name in state if name.startswith(PREFIX) and name != CLASS]
        self_owners = self._owners()
        for name in names:
            if name.rpartition("/")[0] not in self_owners:
                raise ValueError(f"load_state_dict: {name}: this model or optimizer has no such part; the state is another's.")
        self.optimizer.state.clear()
        owners, groups = self._owners(), self.optimizer.param_groups
        scalars_on_host = not any(group.get("capturable") or group.get("fused") for group in groups)
        for name in names:
            owner, _, key = name.rpartition("/")
            key, _, kind = key.partition("=")
            if kind in NUMBERS:
                owners[owner][key] = NUMBERS[kind](state[name].item())
            else:
                device = "cpu" if state[name].dim() == 0 and scalars_on_host else self.state.device
                owners[owner][key] = state[name].detach().clone().to(device)

    def loaded(self, state: dict[str, Tensor]) -> None:
        self._updates = int(self.state[0])


def _check_optimizer(optimizer: Any, parameters: list[Parameter]) -> None:
    """Raise ValueError for an optimizer that a TrainStep cannot run."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"TrainStep: optimizer must make a torch.optim.Optimizer of a list of parameters, "
            f"got a {type(optimizer).__name__}; "
            f"as in optimizer=torch.optim.SGD or lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    name, ids = type(optimizer).__name__, {id(p) for group in optimizer.param_groups for p in group["params"]}
    if ids != {id(p) for p in parameters}:
        raise ValueError(
            f"TrainStep: optimizer must hold the {len(parameters)} parameters that it is given, got one with {len(ids)}, "
            f"some of them others; make it of the whole list that it is given, and freeze the parameters that are not trained."
        )
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]  # a scheduler wraps the instance's
    if needed := [p.name for p in arguments if p.default is p.empty and p.kind < 2]:
        raise ValueError(
            f"TrainStep: {name}.step needs {', '.join(needed)}, which a TrainStep cannot give: "
            f"it has computed the gradients already; take an optimizer whose step() stands alone."
        )
    for group in optimizer.param_groups:
        lr: Any = group.get("lr")
        lr = lr.item() if isinstance(lr, Tensor) else lr
        if not is_rate(lr):
            raise ValueError(
                f"TrainStep: {name}: every param_group needs a finite lr of at least 0, got {lr!r}; the schedule moves it."
            )
