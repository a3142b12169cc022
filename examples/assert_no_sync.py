"""Assert that a training step never makes the GPU wait for its host. Without a GPU it runs on the pretend device.

python examples/assert_no_sync.py
"""

import torch

from gpubound.errors import BudgetError, StallError
from gpubound.watch import no_stall, watch
from gpubound.watch.pretend import simgpu

device = torch.device("cuda") if torch.cuda.is_available() else simgpu()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.rand(64, 16).pin_memory()
best = float("inf")


def step(careless: bool = False) -> None:
    global best
    loss = model(batch.to(device, non_blocking=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if careless:
        best = min(best, loss.item())


step()  # warm up: first allocations do not count

with watch() as ledger:
    for _ in range(3):
        step()
        ledger.step()
ledger.assert_within(syncs=0, d2h_bytes=0, pageable_copies=0)
print("the careful step: no sync,", ledger.totals["h2d_bytes"] // 3, "bytes uploaded a step, all from pinned memory\n")

with watch() as ledger:
    step(careless=True)
try:
    ledger.assert_within(syncs=0)
except BudgetError as error:
    print("the careless step:", error, "\n")

try:
    with no_stall():
        step(careless=True)
except StallError as error:
    print("under the guard:", error)
