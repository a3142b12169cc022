"""An op is written twice: its definition in kernels/<file>.py and its kernel in kernels/triton/<file>.py, of one signature. The
ops of a single family are in its own package of these two folders.

Its public function takes the same arguments: it is above the definition, or if the op is a variant, above that of another one.
It has a test file. Helpers in triton/ start with _, or their files do.
"""

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from gpubound.kernels.registry import FAMILIES, every, load

pytestmark = pytest.mark.interpreted  # it imports kernel files, and Triton decides then whether they are interpreted

TESTS = Path(__file__).parent
OPS = every()
PACKAGES = ("gpubound.kernels", *FAMILIES)
FILES = sorted({(op.package, op.file) for op in OPS.values()})


def functions(package: str, file: str) -> dict[str, Callable]:
    """The public functions written in that file of triton/."""
    module = import_module(f"{package}.triton.{file}")
    here = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    return {name: f for name, f in here.items() if not name.startswith("_")}


def public(op: str) -> Callable:
    return getattr(import_module(OPS[op].package), OPS[op].function)


def parameters(f: Callable) -> list[str]:
    return list(inspect.signature(f).parameters)


@pytest.mark.parametrize("package", PACKAGES)
def test_same_files(package):
    found = pkgutil.iter_modules(import_module(f"{package}.triton").__path__)
    assert sorted(m.name for m in found if not m.name.startswith("_")) == [file for home, file in FILES if home == package]


@pytest.mark.parametrize(("package", "file"), FILES)
def test_same_functions_and_signatures(package, file):
    want = {name: str(inspect.signature(op.reference)) for name, op in OPS.items() if (op.package, op.file) == (package, file)}
    got = {name: str(inspect.signature(f)) for name, f in functions(package, file).items()}
    assert got == want


def test_the_public_function_stands_beside_the_definition():
    for op in OPS:
        module = import_module(f"{OPS[op].package}.{OPS[op].file}")
        assert public(op) is getattr(module, op, public(op)) and hasattr(module, op) == (OPS[op].function == op)
        assert load("reference", op) is getattr(module, f"{op}_reference")


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_public_is_an_op(package):
    found = {name for name, f in vars(import_module(package)).items() if inspect.isfunction(f)}
    assert found - {"reference"} == {op.function for op in OPS.values() if op.package == package}


def test_the_public_function_takes_what_the_op_takes():
    """The same names mean the same. Those of a function are its variants', and `tiled`, which chooses one."""
    own = {op: parameters(OPS[op].reference) for op in OPS}
    for op in OPS:
        assert [name for name in parameters(public(op)) if name in own[op]] == own[op], op
        variants = [name for other, names in own.items() if OPS[other].function == OPS[op].function for name in names]
        assert {*parameters(public(op))} <= {*variants, "tiled"}, op


def test_defaults_agree():
    """A default that an op states is its public function's too: the op called directly means the same."""
    for op in OPS:
        (own, ours) = (inspect.signature(f).parameters.values() for f in (OPS[op].reference, public(op)))
        assert {p.name: p.default for p in own if p.default is not p.empty}.items() <= {p.name: p.default for p in ours}.items()


@pytest.mark.parametrize(("package", "file"), FILES)
def test_every_file_has_a_test_file(package, file):
    assert (TESTS.joinpath(*package.split(".")[1:]) / f"test_{file}.py").exists()
