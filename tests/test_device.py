"""The device policy: which machine state leads to which device or which sentence. No GPU is needed: it is pretended."""

import gc
import os
import platform
import subprocess
import sys
import weakref
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound import device as policy, trace
from gpubound.device import Sight, cure, exercise, fast_bf16, label, look, resolve
from gpubound.errors import DeviceError
from tests.messages import message, refusal

ONE, TWO = Sight(1, "1 visible"), Sight(2, "2 visible")
NONE = Sight(0, "no GPU is visible to CUDA")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, request):
    """No verdict and no notice of another test; no variable of the machine that the suite runs on. The test of this machine's
    GPU keeps them: CUDA has counted GPUs by them."""
    monkeypatch.setattr(trace, "_printed", set())
    for name in () if request.node.get_closest_marker("gpu") else ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    verdicts = policy._tested
    verdicts.cache_clear()
    yield
    verdicts.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """machine(sight, cause=None): pretend that this is what can be seen, and that every GPU's test ends with `cause`."""

    def pretend(sight, cause=None):
        tested = []

        def test(index):
            tested.append(index)
            return cause

        monkeypatch.setattr(policy, "look", lambda: sight)
        monkeypatch.setattr(policy, "_tested", test)
        return tested

    return pretend


@pytest.fixture
def cuda_build(monkeypatch):
    """cuda_build(count): torch is a CUDA build that counts so many GPUs. hardware: a device file exists; failure: of init."""

    def pretend(count, hardware=True, failure=None):
        def init():
            if failure is not None:
                raise RuntimeError(failure)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(policy.glob, "glob", lambda pattern: ["/dev/nvidia0"] if hardware else [])

    return pretend


def test_a_gpu_that_passes_is_used(machine):
    tested = machine(TWO)
    assert [resolve(s) for s in ("auto", "require", "cuda", "cuda:1", torch.device("cuda:1"))] == [
        torch.device("cuda", i) for i in (0, 0, 0, 1, 1)
    ]
    assert tested == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("local", "own"), [("1", 1), ("2", 0)], ids=["all see all", "each sees one"])
def test_of_several_processes_each_has_its_own_gpu(machine, monkeypatch, local, own):
    machine(TWO)
    monkeypatch.setenv("LOCAL_RANK", local)
    assert [resolve(s) for s in ("auto", "require", "cuda", "cuda:0")] == [torch.device("cuda", i) for i in (own, own, own, 0)]


def test_the_cpu_by_choice_is_silent_and_tests_nothing(machine, capsys):
    tested = machine(ONE)
    assert resolve("cpu") == torch.device("cpu")
    assert tested == [] and capsys.readouterr().err == ""


def test_no_gpu_is_the_cpu_said_once(machine, capsys):
    machine(NONE)
    assert resolve() == resolve("auto") == torch.device("cpu")
    assert capsys.readouterr().err == message("device:no_gpu_is_the_cpu_said_o")


@pytest.mark.parametrize("spec", ["require", "cuda", "cuda:0"])
def test_a_required_gpu_that_is_not_there(machine, spec):
    machine(Sight(0, "CUDA_VISIBLE_DEVICES='' hides every GPU"))
    assert refusal(DeviceError, lambda: resolve(spec)) == message("device:a_required_gpu_that_is_n", spec)


@pytest.mark.parametrize("spec", ["auto", "require", "cuda:0"])
def test_a_visible_gpu_that_fails_never_becomes_the_cpu(machine, spec):
    machine(ONE, "CUDA error: no kernel image is available for execution on the device")
    assert refusal(DeviceError, lambda: resolve(spec)) == message("device:a_visible_gpu_that_fails")


def test_an_index_beyond_the_last(machine):
    tested = machine(TWO)
    assert refusal(DeviceError, lambda: resolve("cuda:7")) == message("device:an_index_beyond_the_last")
    assert tested == []


@pytest.mark.parametrize(
    "spec", ["gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:1:0", "cuda:²", "auto:0", "cpu:0", "", None]
)
def test_names_that_mean_nothing(spec):
    assert refusal(ValueError, lambda: resolve(spec)) == message("device:names_that_mean_nothing", spec)


@pytest.mark.parametrize("value", ["", " ", "-1", "none", "None", "-1,0"])
def test_cuda_visible_devices_that_hides_every_gpu(monkeypatch, cuda_build, value):
    cuda_build(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert look() == Sight(0, f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU")


@pytest.mark.parametrize("value", ["0", "1,0", "GPU-8f2c", "MIG-1a"])
def test_cuda_visible_devices_that_shows_some(monkeypatch, cuda_build, value):
    cuda_build(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert look() == ONE


def test_a_containers_variable_does_not_hide_what_cuda_shows(monkeypatch, cuda_build):
    """NVIDIA_VISIBLE_DEVICES=void is set where a GPU comes into a container through CDI: believing it would mean the CPU."""
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    cuda_build(1)
    assert look() == ONE
    cuda_build(0)
    assert look() == Sight(0, "NVIDIA_VISIBLE_DEVICES='void' hides every GPU")


def test_a_cpu_build_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(policy.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert refusal(DeviceError, lambda: resolve("auto")) == message("device:a_cpu_build_beside_a_gpu")


def test_a_cpu_build_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(policy.glob, "glob", lambda pattern: [])
    assert resolve("auto") == torch.device("cpu")
    assert capsys.readouterr().err == message("device:a_cpu_build_without_a_gp")


def test_a_driver_that_is_too_old_is_named(cuda_build):
    """CUDA counts no GPU then; the cause comes out only when it is started."""
    cuda_build(0, failure="The NVIDIA driver on your system is too old (found version 11040).\nPlease update.")
    assert refusal(DeviceError, lambda: resolve("auto")) == message("device:a_driver_that_is_too_old")


def test_visible_devices_that_do_not_exist(monkeypatch, cuda_build):
    cuda_build(0, failure="No CUDA GPUs are available")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert refusal(DeviceError, lambda: resolve("auto")) == message("device:visible_devices_that_do")


def test_a_cuda_build_without_hardware_is_the_cpu(cuda_build):
    cuda_build(0, hardware=False)
    assert look() == NONE and resolve("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported"), "device:cuda_that_cannot_start_e"),
        (AssertionError(), "device:an_error_without_words_i"),
    ],
    ids=["of CUDA", "without words"],
)
def test_cuda_that_cannot_start_ends_in_the_policys_sentence(monkeypatch, cuda_build, error, said):
    """One GPU is counted (through NVML), but starting CUDA raises: the policy must not pass that on raw."""
    cuda_build(1)

    def broken(where):
        raise error

    monkeypatch.setattr(policy, "exercise", broken)
    assert refusal(DeviceError, lambda: resolve("auto")) == message(said)


def test_the_test_runs_once_a_process(monkeypatch, cuda_build):
    cuda_build(1)
    runs = []
    monkeypatch.setattr(policy, "exercise", runs.append)
    assert resolve("auto") == resolve("cuda:0") == torch.device("cuda", 0)
    assert runs == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    "mode",
    [
        nullcontext, torch.no_grad, torch.inference_mode, partial(torch.device, "meta"),
        partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    ],
    ids=["none", "no_grad", "inference_mode", "default_device", "autocast"],
)  # fmt: skip
def test_exercise_is_not_disturbed_by_the_mode_that_its_caller_is_in(mode):
    """A decoder over four GPUs was refused inside no_grad: "GPU 1 is visible but does not work"."""
    with mode():
        exercise(torch.device("cpu"))


@pytest.mark.parametrize("factor", [1.1, float("nan")], ids=["wrong", "nan"])
def test_exercise_catches_gradients_that_are_wrong(monkeypatch, factor):
    """A product whose fp32 form is off, as on a GPU that computes garbage; the fp64 form it is compared with stays right."""
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) * (factor if a.dtype == torch.float32 else 1.0))
    with pytest.raises(DeviceError) as error:
        exercise(torch.device("cpu"))
    off = "nan" if factor != factor else "0.21"
    assert str(error.value) == message("device:exercise_catches_gradien", off)


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("CUDA out of memory. Tried to allocate", "another process holds its memory"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the NVIDIA driver"),
        ("libcudart.so.12: cannot open shared object file", "two CUDA builds are mixed"),
        ("undefined symbol: cublasLtGetVersion", "two CUDA builds are mixed"),
        ("all CUDA-capable devices are busy: exclusive mode", "the GPU is in exclusive mode"),
        ("something new", "check driver, CUDA and torch against each other"),
    ],
)
def test_every_known_cause_has_its_cure(cause, fix):
    assert cure(cause).startswith(fix)


def test_memory_that_torch_does_not_count_is_counted_while_its_owner_lives():
    class Owner:
        pass

    one, other = Owner(), Owner()
    policy.count_memory(one, torch.device("cuda:1"), 100)
    policy.count_memory(other, torch.device("cuda:0"), 7)
    assert [policy.uncounted_bytes(torch.device("cuda", index)) for index in (0, 1)] == [7, 100]
    del one
    gc.collect()
    assert [policy.uncounted_bytes(torch.device("cuda", index)) for index in (0, 1)] == [7, 0]


@pytest.mark.parametrize(
    ("variable", "said", "set_to"),
    [
        ("", "", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", None),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", None),
    ],
)
def test_segments_grow_unless_the_user_says_whether(monkeypatch, variable, said, set_to):
    seen, cuda = [], torch.device("cuda", 0)
    monkeypatch.setattr(policy, "set_allocator", seen.append)
    monkeypatch.setattr(policy, "_growing", False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, said)
    policy.grow_segments(torch.device("cpu"))
    assert not seen
    for _ in range(2):
        with policy.growing_segments(cuda):
            policy.grow_segments(cuda)
    assert seen == ([] if set_to is None else [set_to, set_to.replace("True", "False")] * 2)
    del seen[:]
    policy.grow_segments(cuda)
    with policy.growing_segments(cuda):
        pass
    assert seen == ([] if set_to is None else [set_to])


def test_cached_memory_is_released_above_a_bound(monkeypatch):
    released, reserved = [], 10
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(reserved))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 6)
    for name, most in (("cpu", 0), ("cuda", 4), ("cuda", 3)):
        policy.release_cached(torch.device(name), most)
    assert released == [10]


def test_torch_takes_the_allocators_settings():
    policy.set_allocator("expandable_segments:False")  # as it begins; a torch without the call fails here


def test_label():
    assert label(torch.device("cpu")) == f"CPU ({torch.get_num_threads()} threads)"
    assert label(torch.device("meta")) == "meta"


@pytest.mark.gpu
def test_this_machines_gpu_passes():
    device = resolve("require")
    assert device.type == "cuda" and label(device) == f"{torch.cuda.get_device_name(device)} ({device})"


# --- products in 16 bits ---


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variables choose among x86's instruction sets")
def test_a_cpu_without_units_for_bf16_is_slow_in_it():
    """AVX2 alone, on any x86 processor: there fp32 is at least ten times faster."""
    code = "import torch; from gpubound.device import fast_bf16; print(fast_bf16(torch.device('cpu')))"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "False\n"


def test_a_cpus_products_are_timed_once_on_real_tensors(monkeypatch):
    """Modes of the caller (fake tensors, counters of operations) see nothing of it, nor do its random numbers."""

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            recorded.append(function)
            return function(*args, **(kwargs or {}))

    policy._cpu_is_faster_in_bf16.cache_clear()
    clock, recorded, before = count(), [], torch.get_rng_state()
    monkeypatch.setattr(policy, "perf_counter", lambda: next(clock))
    with Recorder():
        answers = [fast_bf16(torch.device("cpu"))]
        calls = next(clock)
        answers.append(fast_bf16(torch.device("cpu")))
    assert answers[0] is answers[1] and next(clock) == calls + 1 and calls > 10
    assert not recorded and torch.equal(torch.get_rng_state(), before)
    policy._cpu_is_faster_in_bf16.cache_clear()


@pytest.mark.parametrize("capability, bf16", [(61, False), (75, False), (80, True), (90, True)])
def test_a_gpu_is_asked_for_its_capability(capability, bf16, monkeypatch):
    monkeypatch.setattr(policy, "_chip", lambda index: policy.Chip(capability, 1, 1, "pretended"))
    gpu = torch.device("cuda", 0)
    assert fast_bf16(gpu) == bf16


@pytest.fixture
def unlimited():
    yield
    policy._limit = None


@pytest.mark.parametrize(
    ("memory", "size"), [("24 GB", 24 * 10**9), ("22.5GiB", 45 << 29), ("22.5", 45 << 29), (24, 24 << 30), (1.5, 3 << 29)]
)
def test_sizes_of_memory(memory, size):
    assert policy.memory_size(memory) == size


@pytest.mark.parametrize("memory", ["", "much", "-1", "24 XB", "inf", float("nan"), 0, "10000000 TB", True])
def test_what_is_no_size_of_memory(memory):
    with pytest.raises(ValueError, match=r"^memory: got "):
        policy.memory_size(memory)


def test_a_limit_makes_a_gpu_smaller_for_this_process_and_never_larger(machine, monkeypatch, unlimited):
    """The allocator gets what CUDA's context leaves of it, on each device that is resolved."""
    fractions = []
    machine(TWO)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    card = type("Properties", (), {"total_memory": 80 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append((fraction, device.index))
    )
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    policy.limit(24)
    resolve("cuda:1")
    left = ((24 << 30) - policy.CONTEXT) / (80 << 30)
    assert set(fractions) == {(left, 0), (left, 1)} and policy.total_bytes(first) == policy.total_bytes(second) == 24 << 30
    policy.limit("96 GiB")
    assert fractions[-1] == (1.0, 0) and policy.total_bytes(first) == 80 << 30
    policy.limit(24)
    policy.limit(None)
    assert fractions[-1] == (1.0, 0) and policy.total_bytes(first) == 80 << 30
    with pytest.raises(ValueError, match=r"^memory: got 0\.5, wanted more than"):
        policy.limit(0.5)


def test_a_limit_waits_for_a_gpu_where_there_is_none(machine, unlimited):
    machine(NONE)
    policy.limit("24 GB")
    assert resolve("cpu") == torch.device("cpu")


@pytest.mark.gpu
def test_beyond_a_limit_there_is_no_memory(unlimited):
    torch.cuda.empty_cache()
    policy.limit((torch.cuda.memory_reserved() + policy.CONTEXT + (1 << 30)) / 2**30)
    torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 << 28, dtype=torch.uint8, device="cuda")
    policy.limit(None)
    torch.empty(5 << 28, dtype=torch.uint8, device="cuda")


def test_the_collector_looks_at_new_objects_alone(monkeypatch):
    class Node:
        """Of a cycle."""

    def cycle():
        node = Node()
        node.own = node
        return weakref.ref(node)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(policy, "total_bytes", lambda device: 10)
    frozen = gc.get_freeze_count() > 0  # as the suite does
    gc.unfreeze()
    gc.disable()  # or it could come between
    try:
        old = cycle()
        with suppress(KeyError), policy.collecting_new_objects(torch.device("cuda", 0)):
            new = cycle()
            gc.collect()
            assert old() is not None and new() is None
            raise KeyError
        assert gc.get_freeze_count() == 0, "the old one, which a collection of all would take 1 s to find, is in reach of it"
        gc.freeze()  # by the caller, who may have forked
        with policy.collecting_new_objects(torch.device("cuda", 0)):
            pass
        assert gc.get_freeze_count() > 0
    finally:
        if not frozen:
            gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("allocated", [4, 6])
def test_an_earlier_model_is_collected_where_the_gpu_is_full(allocated, monkeypatch):
    """Of 10 bytes, more than half."""
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(None))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # the suite's own objects are frozen
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(policy, "total_bytes", lambda device: 10)
    with policy.collecting_new_objects(torch.device("cuda", 0)):
        pass
    assert len(calls) == (allocated > 5)
