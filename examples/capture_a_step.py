"""A whole training step as one CUDA graph that checks itself. On a CPU the same checks surround eager calls."""

import torch
from torch import nn

import gpubound as gb

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
# The rate is a tensor, so that it can be changed without a new capture; capturable keeps the step count on the device.
rate = torch.tensor(1e-2, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)


def step(x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def batch():
    x = torch.randn(256, 16, device=device)
    return x, x.sum(1, keepdim=True)


def main() -> None:
    captured = gb.capture(step, *batch())
    print(captured)
    print(captured.certificate)
    for number in range(300):
        loss = captured(*batch())
        if number % 100 == 99:
            print(f"step {number + 1}: loss {loss.item():.4f}")  # the one read, once in a hundred steps
            rate.mul_(0.5)
    model[0].weight.data = model[0].weight.data.clone()  # resharding, .to() or a careless line does this
    try:
        captured(*batch())
    except gb.GraphError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
