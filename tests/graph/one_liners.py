"""Lines that no graph can hold, each on a line of its own: test_operations.py asserts that the error names it."""

import numpy as np
import torch

cpu = torch.device("cpu")


def item(x):
    return x * x.sum().item()  # LINE


def branch(x):
    if x.sum() > 0:  # LINE
        return x
    return -x


def number(x):
    return x * float(x[0])  # LINE


def as_list(x):
    return x * x.tolist()[0]  # LINE


def as_numpy(x):
    return x * np.asarray(x.detach())[0].item()  # LINE


def to_host(x):
    return x.cpu() * 2  # LINE


def printed(x):
    print(x)  # LINE
    return x


def formatted(x):
    name = f"{x[0]:.3f}"  # LINE
    return x * len(name)


def nonzero(x):
    return x.nonzero().float()  # LINE


def where(x):
    return torch.where(x > 0)[0]  # LINE


def mask(x):
    return x[x > 0].sum()  # LINE


def assign(x):
    y = x.clone()
    y[y > 0] = y[:1].repeat(int((y > 0).shape[0]))[y > 0]  # LINE
    return y


def selected(x):
    return torch.masked_select(x, x > 0).sum()  # LINE


def unique(x):
    return torch.unique(x)  # LINE


def equal(x):
    return x if torch.equal(x, x) else -x  # LINE


def close(x):
    return x if torch.allclose(x, x) else -x  # LINE


def counted(x):
    return torch.bincount((x > 0).long())  # LINE


def repeated(x):
    return x.repeat_interleave((x > 0).long())  # LINE


def built(x):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])  # LINE


def listed(x):
    return x[[0, 2]]  # LINE


def inverted(x):
    return torch.linalg.inv(torch.eye(4) * x)  # LINE


def sliced(x):
    return x[: (x > 0).sum()]  # LINE


def element(x):
    y = x.clone()
    y[0] = 2.0  # LINE
    return y


def scattered(x):
    y, at = x.clone(), torch.arange(2)
    y[at] = 2.0  # LINE
    return y


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 if gradient.sum() > 0 else gradient  # LINE backward


def backward(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(ReadInBackward.apply(x).sum(), x)[0]


def hooked(x):
    x = x.detach().requires_grad_()
    y = x * 2
    y.register_hook(lambda gradient: gradient if gradient.max() > 0 else None)  # LINE
    return torch.autograd.grad(y.sum(), x)[0]
