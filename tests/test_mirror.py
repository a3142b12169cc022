"""An op is written twice: its definition in kernels/<file>.py and its kernel in kernels/triton/<file>.py, of one signature.

Its public function, above the definition, takes the same arguments. It has a test file. Helpers in triton/ start with _, or
their files do.
"""

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from gpubound import kernels
from gpubound.kernels import triton
from gpubound.kernels.ops import OPS, load

TESTS = Path(__file__).parent / "kernels"
FILES = sorted({op.file for op in OPS.values()})


def functions(file: str) -> dict[str, Callable]:
    """The public functions written in that file of triton/."""
    module = import_module(f"gpubound.kernels.triton.{file}")
    here = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    return {name: f for name, f in here.items() if not name.startswith("_")}


def parameters(f: Callable) -> list[str]:
    return list(inspect.signature(f).parameters)


def test_same_files():
    assert sorted(m.name for m in pkgutil.iter_modules(triton.__path__) if not m.name.startswith("_")) == FILES


@pytest.mark.parametrize("file", FILES)
def test_same_functions_and_signatures(file):
    want = {name: str(inspect.signature(op.reference)) for name, op in OPS.items() if op.file == file}
    got = {name: str(inspect.signature(f)) for name, f in functions(file).items()}
    assert got == want


@pytest.mark.parametrize("op", OPS)
def test_the_public_function_stands_beside_the_definition(op):
    module = import_module(f"gpubound.kernels.{OPS[op].file}")
    assert getattr(kernels, op) is getattr(module, op)
    assert load("reference", op) is getattr(module, f"{op}_reference")


def test_what_is_public_is_an_op():
    public = {name for name, f in vars(kernels).items() if inspect.isfunction(f)}
    assert public - {"reference"} == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_public_function_takes_what_the_op_takes(op):
    """The same names mean the same."""
    assert parameters(getattr(kernels, op)) == parameters(OPS[op].reference)


@pytest.mark.parametrize("op", OPS)
def test_defaults_agree(op):
    """A default that an op states is its public function's too: the op called directly means the same."""
    stated = {p.name: p.default for p in inspect.signature(OPS[op].reference).parameters.values() if p.default is not p.empty}
    assert stated.items() <= {p.name: p.default for p in inspect.signature(getattr(kernels, op)).parameters.values()}.items()


@pytest.mark.parametrize("file", FILES)
def test_every_file_has_a_test_file(file):
    assert (TESTS / f"test_{file}.py").exists()
