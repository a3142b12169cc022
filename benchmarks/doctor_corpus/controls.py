"""Scripts without a stall: whatever is found in one is wrong, but that the launch-bound model is bound by its launches."""

from .kinds import PLANTS
from .plant import Calm

FEED = {
    "imports": "from gpubound.data import feed",
    "data": "batches = feed([(host_rows(), host_rows()) for _ in range(4)], device)\nbatches = iter(batches.take, None)",
}
# a loss is copied into pinned memory, and read 49 steps later
LATE = {
    "setup": "state.mirror, state.seen = pinned(torch.zeros(())), []",
    "report": """if step % 50 == 48:
    state.seen.append(float(state.mirror))
if step % 50 == 49:
    state.mirror.copy_(loss.detach(), non_blocking=True)""",
}
ACCUMULATED = {
    "zero": "if state.step % 2 == 0:\n    optimizer.zero_grad()",
    "update": "if state.step % 2 == 1:\n    optimizer.step()",
}
SCHEDULED = {
    "setup": "state.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)",
    "after_update": "state.schedule.step()",
}
CONTROLS: dict[str, Calm] = {
    "plain_launch_bound": Calm({}, "plain", "launch-bound"),
    "plain_gpu_bound": Calm({}, "plain"),
    "trainer_launch_bound": Calm({}, "trainer", "launch-bound"),
    "helper_gpu_bound": Calm({}, "helper"),
    "clipped": Calm(PLANTS["clip_check"].clean, "trainer"),
    "read_late": Calm(LATE, "helper"),
    "scheduled": Calm(SCHEDULED, "plain", "launch-bound"),
    "accumulated": Calm(ACCUMULATED, "trainer"),
    "pinned_copies": Calm(PLANTS["pageable_copy"].clean | {"data": PLANTS["host_augmentation"].clean["data"]}, "helper"),
    "fed": Calm(FEED, "plain"),
}
