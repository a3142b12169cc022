"""kernels/reference and kernels/triton are one list of ops, written twice: same files, functions, signatures.

Each op has a door that takes the same arguments, a self-test and a test file. Helpers are in _private files or start with _.
"""

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from gpubound import kernels
from gpubound.kernels import reference, selftest, triton

TESTS = Path(__file__).parent / "kernels"


def files(package) -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def functions(source: str, file: str) -> dict[str, Callable]:
    """The public functions written in that file."""
    module = import_module(f"gpubound.kernels.{source}.{file}")
    here = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    return {name: f for name, f in here.items() if not name.startswith("_")}


def ops() -> dict[str, Callable]:
    """'file.function' -> its reference."""
    return {f"{file}.{name}": f for file in files(reference) for name, f in functions("reference", file).items()}


def doors() -> dict[str, Callable]:
    return {name: f for name, f in vars(kernels).items() if inspect.isfunction(f) and not name.startswith("_")}


def parameters(f: Callable) -> list[str]:
    return list(inspect.signature(f).parameters)


def test_same_files():
    assert files(reference) == files(triton)


@pytest.mark.parametrize("file", files(reference))
def test_same_functions_and_signatures(file):
    want = {name: str(inspect.signature(f)) for name, f in functions("reference", file).items()}
    got = {name: str(inspect.signature(f)) for name, f in functions("triton", file).items()}
    assert got == want


def test_every_op_has_a_self_test():
    """An example is named as doors name the op: 'file', or 'file.function' where they differ."""
    assert sorted(op if "." in op else f"{op}.{op}" for op in selftest.EXAMPLES) == sorted(ops())


def test_every_op_has_a_door_and_every_door_an_op():
    assert sorted(doors()) == sorted(f.__name__ for f in ops().values())


@pytest.mark.parametrize("name", doors())
def test_the_door_takes_what_the_op_takes(name):
    """The same names mean the same. The optimizer's doors order them for their callers and take both betas as one."""
    op, door = next(f for f in ops().values() if f.__name__ == name), doors()[name]
    if "betas" in parameters(door):
        assert {*parameters(door), "beta1", "beta2"} - {"betas"} == set(parameters(op))
    else:
        assert parameters(door) == parameters(op)


@pytest.mark.parametrize("name", doors())
def test_defaults_agree(name):
    """A default that an op states is its door's too: the op called directly means what the door means."""
    op, door = next(f for f in ops().values() if f.__name__ == name), doors()[name]
    stated = {p.name: p.default for p in inspect.signature(op).parameters.values() if p.default is not p.empty}
    assert stated.items() <= {p.name: p.default for p in inspect.signature(door).parameters.values()}.items()


@pytest.mark.parametrize("file", files(reference))
def test_every_file_has_a_test_file(file):
    assert (TESTS / f"test_{file}.py").exists()
