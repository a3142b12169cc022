"""One vocabulary of host events: what makes a GPU wait for its host, why, and what to write instead.

An event has a kind (sync, h2d, launch, ...) and says in a few words what was called. Sensors count events, the ledger adds
them up, `no_stall` forbids some, and a graph cannot hold others: all of them take causes and remedies from here. `ops.py` finds
the events among dispatched ops and among Python calls that dispatch none.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """Effect of a line, as the end of a sentence that begins with the line, and the remedy."""

    does: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.does}; {self.remedy}"


def shape(remedy: str) -> Cause:
    """Return the cause of an op whose result has a size that is read back first."""
    return Cause("makes a shape that depends on the values", remedy)


READ = Cause(
    "reads the device from the host",
    "keep the value on the device (torch.where, masks), or read it a step later from pinned memory",
)
WAIT = Cause("waits for the device", "leave it out, or wait once at the end; the device keeps its order without it")
UPLOAD = Cause(
    "copies a CPU tensor to the device",
    "make it there, or copy it from pinned memory with non_blocking=True (gpubound.feed does both)",
)
DOWNLOAD = Cause("copies the device to the host", "copy into pinned memory with non_blocking=True, and read it a step later")
HOST_DATA = Cause(
    "builds a tensor from host data", "make it once before the step, or from sizes alone (torch.full, torch.arange)"
)
NUMBER = Cause("copies a Python number from the host into one place", "write x[i : i + 1] = number, or use index_fill_")
FILL_VALUE = Cause("reads the value to fill with from the device", "pass a Python number, or use torch.where(mask, value, x)")
DEVIATION = Cause(
    "checks from the host that no standard deviation is negative",
    "write mean + std * torch.randn_like(mean), or rsample().detach() of a distribution, which do not check",
)
BOUNDS = Cause("reads the smallest and the largest value for its bounds", "pass min= and max=")
FACTORISING = ("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq", "linalg_matrix_exp", "linalg_pinv")
FACTORISED = Cause(
    "waits for a factorisation and its error code", "factorise every n steps, or iterate on the device by products"
)
MASK = shape("use torch.where or multiply by the mask instead of indexing with it")
MASK_PUT = shape("use torch.where(mask, values, x) instead of assigning through the mask")
PRINT = Cause("prints a tensor, which reads the device from the host", "print it a step later, or a copy of it")

_COUNT = shape("count with scatter_add into a tensor of fixed size")

# Ops that read a size or a value back from the device before they return: roughly the user's expression, and the cause.
WAITING_OPS: dict[str, tuple[str, Cause]] = {
    "_local_scalar_dense": ("item", READ),
    "equal": ("torch.equal", READ),
    "allclose": ("allclose", READ),
    "nonzero": ("nonzero", shape("use torch.where(condition, a, b), or torch.nonzero_static with a fixed size")),
    "masked_select": ("masked_select", shape("use torch.where, or multiply by the mask")),
    "masked_scatter_backward": (
        "masked_scatter's backward",
        shape("gather by mask.cumsum(-1) - 1 and choose by torch.where instead of masked_scatter"),
    ),
    "_unique2": ("unique", _COUNT),
    "unique_dim": ("unique", _COUNT),
    "unique_consecutive": ("unique_consecutive", _COUNT),
    "unique_dim_consecutive": ("unique_consecutive", _COUNT),
    "bincount": ("bincount", shape("use scatter_add into torch.zeros(bins)")),
    "repeat_interleave": ("repeat_interleave", shape("pass output_size=")),
    "_linalg_check_errors": (
        "linalg error check",
        Cause("checks a factorisation from the host", "use the _ex form (torch.linalg.inv_ex, solve_ex, cholesky_ex)"),
    ),
    **{name: (name.strip("_").replace("_", ".", 1), FACTORISED) for name in FACTORISING},
    "_to_sparse": ("to_sparse", shape("keep it dense, or make the sparse tensor once")),
}

# Python calls that read or wait without a dispatched op, named as in ops.py.
SCALARS = "torch.tensor of device scalars"
WAITING_CALLS: dict[str, Cause] = {
    "print": PRINT,
    SCALARS: Cause("reads each scalar from the device", "use torch.stack"),
}

# Files of torch whose reads of the device have a special remedy.
THROUGH: dict[str, Cause] = {
    "torch/optim/": Cause(
        "reads the optimizer's step from the host", "build the optimizer with capturable=True (on a CPU: fused=True)"
    ),
    "torch/amp/grad_scaler": Cause("reads the scaler's found_inf from the host", "train in bf16 without a GradScaler"),
    "torch/nn/utils/clip_grad": Cause("reads the gradient norm from the host", "pass error_if_nonfinite=False"),
}

# Every kind of event, with its cause unless a table above has a more specific one.
KINDS: dict[str, Cause] = {
    "sync": WAIT,
    "h2d": UPLOAD,
    "d2h": DOWNLOAD,
    "repeat": Cause("uploads bytes that are on the device already", "upload them once and keep the device's tensor"),
    "clone": Cause("clones a tensor whose source is not used again", "use the source itself"),
    "launch": Cause("launches work on the device", "fuse it, or capture the step in a graph (gpubound.capture)"),
    "cpu_op": Cause("computes on the host", "move the tensors to the device, or the work into the loader"),
    "alloc": Cause("asks the driver for memory, which stops the device", "run the largest shapes first; keep shapes fixed"),
    "free": Cause("gives memory back to the driver, which stops the device", "leave out torch.cuda.empty_cache()"),
    "retry": Cause("runs out of memory, frees what is unused and tries again", "make the batch or the model smaller"),
    "pin": Cause("pins host memory, which stops the device", "pin a buffer once, and use it again"),
    "compile": Cause("compiles", "warm up with every shape, or mark what varies as dynamic"),
    "gc": Cause("collects garbage", "call gc.freeze() after the warm-up, or collect between steps"),
    "fallback": Cause("takes a slow path", "fix what its reason names"),
}

MASKING = "boolean mask"  # name of the wait of an op with a boolean mask
FILLING, DRAWING, BINNING = "fill value", "torch.normal", "histc"
EMPTIED = "empty_cache"  # frees memory
_BY_WORDS = (
    WAITING_CALLS | dict(WAITING_OPS.values()) | {MASKING: MASK, FILLING: FILL_VALUE, DRAWING: DEVIATION, BINNING: BOUNDS}
)


def cause_of(kind: str, what: str = "", through: str = "") -> Cause:
    """Return the cause of an event of this kind. `through` is a key of THROUGH, for a read by a file of torch."""
    if kind == "sync" and through in THROUGH:
        return THROUGH[through]
    return _BY_WORDS.get(what, KINDS[kind]) if kind == "sync" else KINDS[kind]
