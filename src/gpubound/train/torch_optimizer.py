"""Any torch.optim.Optimizer inside a TrainStep: its update runs behind the device's decision, on fp32 weights.

Gradients are summed, divided, clipped and judged on the device as for our own optimizers. Then the optimizer's own `step()`
runs on one Parameter for each of the model's, over the fp32 masters where there are any.

An optimizer that torch calls capturable becomes a graph of its own, from its second update on: the first one makes its state.
Inside, a step that is not finite runs like any other, and old values are put back over what it wrote. Any other optimizer runs
call by call, and the host waits for the device once a step to learn whether to run it and at which rate.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import GraphError
from ..graph import Captured, capture
from ..kernels import plan_update
from ..trace import fallback
from .flat_buffers import FlatLayout, Weights, lay_out
from .optimizer import FlatAdamW
from .precision import Precision, read, spelled
from .schedule import is_rate

PREFIX, CLASS = "optimizer.", "optimizer.class"  # of the names of its state
LOOKS_FARTHER = ("Adafactor", "LBFGS", "Muon")  # of torch.optim: those whose update of an element depends on others
NUMBERS = {"bool": bool, "int": int, "float": float}  # what an optimizer may keep beside tensors


class TorchOptimizer:
    """What makes a torch optimizer of a list of Parameters, for one TrainStep; it stands where our AdamW(...) does."""

    def __init__(self, make: Callable[[list[Parameter]], Optimizer], graph: str):
        self.make, self.graph = make, graph

    def lay_out(self, model: Any, precision: Precision) -> FlatLayout:
        """As AdamW's; and makes the optimizer, over fp32 stand-ins for the parameters."""
        precision.check_not_at_random("a torch optimizer")
        layout = lay_out(model.named_parameters(), precision.dtype, others=model.named_buffers())
        self.parameters = [Parameter(slot.parameter.detach().float()) for slot in layout.slots]
        self.optimizer = _made(self.make, self.parameters)
        self.lrs = [_lr(self.optimizer, group) for group in self.optimizer.param_groups]
        self.lr = max(self.lrs)
        if self.graph == "require" and (why := _not_capturable(self.optimizer)):
            raise GraphError(f"TrainStep: {why}; take graph='auto', which runs it call by call.")
        return layout

    @property
    def whole(self) -> str | None:
        """Why it must see whole matrices, as far as is known."""
        name = type(self.optimizer).__name__
        return f"{name} looks at whole matrices, or at all of them" if name in LOOKS_FARTHER else None

    def moment_bytes(self, layout: FlatLayout) -> int:
        """None that are known: what it keeps it makes at its first step."""
        return 0

    def flat(self, *rest: Any) -> "FlatTorchOptimizer":
        return FlatTorchOptimizer(self, *rest)


class FlatTorchOptimizer(FlatAdamW):
    """A torch optimizer in FlatAdamW's place: the same four numbers of state, the same schedule, clip and finite guard."""

    config: TorchOptimizer  # type: ignore[assignment]
    loads = (PREFIX,)

    def __init__(self, config: TorchOptimizer, weights: Weights, *rest: Any):
        super().__init__(config, weights, *rest)  # type: ignore[arg-type]
        layout, self.optimizer, self.parameters = weights.layout, config.optimizer, config.parameters
        homes = zip(layout.groups, weights.finest())
        for parameter, home in zip(self.parameters, [s.view(t, g.start) for g, t in homes for s in layout.slots_of(g)]):
            parameter.data = home
        self._ratios = [lr / config.lr if config.lr else 1.0 for lr in config.lrs]
        self._captured: Captured | None = None
        wanted, able = config.graph != "off", _not_capturable(self.optimizer) is None
        self._captures = able and wanted and layout.device.type == "cuda"
        self._says = not able and wanted and layout.device.type != "cpu"
        for group, lr in zip(self.optimizer.param_groups, config.lrs) if self._captures else ():
            # Its rate is a tensor from the first: the step's own graph is recorded before this one, and sees the groups.
            group["capturable"], group["lr"] = True, torch.tensor(lr, device=layout.device, dtype=torch.float32)
        self.decision = torch.zeros(2, dtype=torch.float64, device=layout.device)  # whether to update, and the rate
        self._gradients: list[Tensor] = []
        self._left = self._groups()

    def _begin_moments(self, layout: FlatLayout) -> None:
        """It makes its state itself, at its first step."""

    def hasten(self) -> None:
        """It calls no kernel of ours."""

    @property
    def moments(self) -> list[Tensor]:
        """What the captured part of a step writes; the optimizer's state is not of it."""
        return [self.decision]

    def update(self, gradient: Tensor, totals: Tensor) -> Tensor:
        """Decide, and scale the gradient. `carry_on` does the rest, outside of the step's own graph."""
        plan, report = plan_update(
            self.weights.of_norm(gradient),
            totals,
            self.state,
            self.rates,
            clip=self.clip,
            growth_interval=self.growth_interval,
        )
        gradient.mul_(plan[1])
        self.decision.copy_(torch.stack([plan[0].double(), report[4]]))
        return report

    def check(self) -> None:
        """Nobody else may move its rates, or add to its groups: it would be undone, or not be trained."""
        for number, (now, left) in enumerate(zip_longest(self._groups(), self._left)):
            if now is None or left is None or now[0] != left[0]:
                raise ValueError(
                    f"TrainStep: optimizer: its param_group {number} has other parameters than when it was made, and the step "
                    f"trains those it found then; close() this step and make a new one."
                )
            if now != left:
                rate = float(self.optimizer.param_groups[number]["lr"])
                raise ValueError(
                    f"TrainStep: optimizer: the lr of its param_group {number} was set to {rate:.3g} from outside, by a "
                    f"scheduler perhaps, and the step would set it back; pass schedule=Schedule(...) instead, or set the "
                    f"step's own lr."
                )

    def _groups(self) -> list[tuple]:
        """What tells that a group has changed, without a wait for the device: its size; its rate, or that tensor's version."""
        found = ((len(group["params"]), group["lr"]) for group in self.optimizer.param_groups)
        return [(size, (id(lr), lr._version) if isinstance(lr, Tensor) else lr) for size, lr in found]

    @torch.no_grad()
    def carry_on(self, gradient: Tensor) -> None:
        """The optimizer's own update, where the decision is to make one."""
        self._carry_on(gradient)
        self._left = self._groups()

    def _carry_on(self, gradient: Tensor) -> None:
        self._gradients = self._gradients or [slot.view(gradient) for slot in self.weights.layout.slots]
        if self._says:
            why = f"{_not_capturable(self.optimizer)}; it runs call by call, behind a wait for the device"
            fallback("train step: optimizer", why)
        if self._captures and self._captured is None and any(self.optimizer.state.values()):
            self._captured = self._capture()
        if self._captured is not None:
            self._captured()
            return
        apply, lr = self.decision.tolist()
        if apply:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * ratio)
                else:
                    group["lr"] = lr * ratio
            self._stepped()

    def _stepped(self) -> None:
        for parameter, gradient in zip(self.parameters, self._gradients):
            parameter.grad = gradient
        with torch.enable_grad():
            self.optimizer.step()
        self.weights.round_masters()

    def _capture(self) -> Captured | None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        kept = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        written = [*self.parameters, *kept]

        def optimizer_step() -> None:
            with torch.no_grad():
                for rate, ratio in zip(rates, self._ratios):
                    rate.copy_(self.decision[1] * ratio)
                before = [t.clone() for t in written]
                self._stepped()
                for t, old in zip(written, before):
                    torch.where(self.decision[0] != 0, t, old, out=t.data)
                self.weights.round_masters()

        try:
            return capture(optimizer_step, state=[written, self.weights.flat, rates], tolerance=5e-2)
        except (GraphError, torch.OutOfMemoryError) as error:
            if self.config.graph == "require":
                raise
            self._captures = False
            fallback("train step: optimizer", str(error))
            return None

    def _owners(self) -> dict[str, dict[str, Any]]:
        """What it keeps, where it keeps it: a dict for each parameter, by the parameter's name, and one for each group."""
        names = [slot.name for slot in self.weights.layout.slots]
        kept = {f"{PREFIX}{name}": self.optimizer.state[parameter] for name, parameter in zip(names, self.parameters)}
        return kept | {f"{PREFIX}group {i}": group for i, group in enumerate(self.optimizer.param_groups)}

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state by parameter name, and the numbers of its groups. Numbers are copies, tensors are live."""
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
        """Take what `named_moments` gave, whether this optimizer has made its state yet or not."""
        got, own = read(state[CLASS]) if CLASS in state else "another", type(self.optimizer).__name__
        if got != own:
            raise ValueError(
                f"load_state_dict: optimizer: got the state of {got}, wanted {own}'s; "
                f"make the TrainStep with the optimizer that the run began with."
            )
        given, known = [name for name in state if name.startswith(PREFIX) and name != CLASS], self._owners().keys()
        for name in given:
            if name.rpartition("/")[0] not in known:
                raise ValueError(f"load_state_dict: {name}: this model or optimizer has no such part; the state is another's.")
        self.optimizer.state.clear()
        owners = self._owners()
        for name in given:
            owner, _, key = name.rpartition("/")
            key, _, kind = key.partition("=")
            if kind in NUMBERS:
                owners[owner][key] = NUMBERS[kind](state[name].item())
            else:
                there = "cpu" if state[name].dim() == 0 and not self._captures else self.decision.device
                owners[owner][key] = state[name].detach().clone().to(there)
        self._captured = None


def _not_capturable(optimizer: Optimizer) -> str | None:
    if all("capturable" in group for group in optimizer.param_groups):
        return None
    name = type(optimizer).__name__
    return f"{name} is not capturable (its param_groups have no such key), so no graph can hold its update"


def _made(make: Callable[[list[Parameter]], Optimizer], parameters: list[Parameter]) -> Optimizer:
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"TrainStep: optimizer must make a torch.optim.Optimizer of a list of parameters, "
            f"got a {type(optimizer).__name__}; "
            f"as in optimizer=torch.optim.SGD or lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in parameters}:
        raise ValueError(
            f"TrainStep: optimizer must hold the {len(parameters)} parameters that it is given, got one with {len(held)}, "
            f"some of them others; make it of the whole list that it is given, and freeze what is not to be trained."
        )
    taken = list(inspect.signature(type(optimizer).step).parameters.values())[1:]  # a scheduler puts its own on the instance
    needed = [p.name for p in taken if p.default is p.empty and p.kind < 2]
    if needed:
        raise ValueError(
            f"TrainStep: {type(optimizer).__name__}.step needs {', '.join(needed)}, which a TrainStep cannot give: "
            f"it has computed the gradients already; take an optimizer whose step() stands alone."
        )
    return optimizer


def _lr(optimizer: Optimizer, group: dict[str, Any]) -> float:
    lr: Any = group.get("lr")
    lr = lr.item() if isinstance(lr, Tensor) else lr
    if not is_rate(lr):
        raise ValueError(
            f"TrainStep: {type(optimizer).__name__}: every param_group needs a finite lr of at least 0, got {lr!r}; "
            f"the schedule moves it."
        )
    return float(lr)
