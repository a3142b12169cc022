"""What the package shows is what it says it shows, and showing it costs nothing until it is used."""

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import gpubound as gb
from tests.messages import message, refusal

from .kernels.apart import apart


def test_all_is_what_is_there():
    assert len(set(gb.__all__)) == len(gb.__all__)
    for name in gb.__all__:
        assert getattr(gb, name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("package", ["place", "data", "watch", "train", "graph", "models"])
def test_importing_a_package_leaves_the_function_its_name(package):
    code = (
        f"import sys, types\nfor name in [n for n in sys.modules if n.startswith('gpubound')]: del sys.modules[name]\n"
        f"print('gpubound.{package}' in sys.modules)\n"
        f"import gpubound as gb, gpubound.{package}; from gpubound.{package} import *\n"
        f"print([n for n in ('place', 'watch') if isinstance(getattr(gb, n), types.ModuleType)])"
    )
    assert apart(code) == "False\n[]\n"


ROOT = Path(gb.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "cli")  # which is a program


def imported(package: str) -> dict[str, str | None]:
    """The names that a package takes from its own modules, with what it calls each: None for a plain import."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.name: alias.asname for node in froms for alias in node.names if not alias.name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_what_it_imports(package):
    """`X as X`, or `X` in __all__: to a type checker a name imported in another way is not the package's own."""
    module, names = importlib.import_module(f"gpubound.{package}"), imported(package)
    assert names, f"gpubound.{package} exports nothing"
    listed = getattr(module, "__all__", None)
    if listed is None:
        assert {name: name for name in names} == names
    else:
        assert sorted(listed) == sorted(set(listed)) == sorted(names)
    star = {}
    exec(f"from gpubound.{package} import *", star)
    for name in names:
        assert star[name] is getattr(module, name) and name in dir(module)


def test_dir_shows_what_can_be_taken():
    assert set(gb.__all__) <= set(dir(gb)) and "__path__" in dir(gb)


def test_an_unknown_name():
    with pytest.raises(AttributeError) as error:
        gb.plaice  # noqa: B018
    assert str(error.value) == message("exports:an_unknown_name")


MISSPELT = (
    lambda: gb.place(None, devise="cpu"),
    lambda: gb.TrainStep(None, "causal_lm", optimiser=None),
    lambda: gb.feed([], bach_size=4),
    lambda: gb.capture(print, tolerence=0),
    lambda: gb.lora.add(None, rnk=8),
    lambda: gb.AdamW(learning=1),
    lambda: gb.Corpus.build([], None, "x", shard_token=300),
    lambda: gb.rl.UnitTests(second=1),
    lambda: gb.distributed.launched(world=2),
    lambda: gb.no_stall(alow=1),
    lambda: gb.Corpus.batches(None, 8, 2, bukets=3),
    lambda: gb.Corpus.open("x", verfy=False),
)


@pytest.mark.parametrize("number", range(1, 1 + len(MISSPELT)))
def test_a_misspelt_keyword(number):
    assert refusal(TypeError, MISSPELT[number - 1]) == message("exports:a_misspelt_keyword" + f".{number}")


def test_a_public_function_is_pickled_and_read_as_it_was_written():
    for call in (gb.place, gb.feed, gb.lora.add, gb.rl.run_code):
        assert pickle.loads(pickle.dumps(call)) is call
        assert f"def {call.__name__}(" in inspect.getsource(call) and call.__doc__
    assert next(iter(inspect.signature(gb.AdamW).parameters)) == "lr"


def test_a_step_is_called_directly():
    for call in (gb.TrainStep.__call__, gb.train.StepResult.__init__, gb.Captured.__call__):
        assert not hasattr(call, "__wrapped__")


def test_the_plugin_and_the_package_import_neither_torch_nor_triton():
    """Every pytest run on a machine that has gpubound loads the plugin."""
    code = "import sys, gpubound.watch.pytest_plugin; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_the_kernels_do_not_import_triton_until_one_runs():
    code = "import sys, gpubound.kernels, gpubound.train, gpubound.place, gpubound.decode; "
    code += "print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_changelog_names_this_version():
    changelog = Path(__file__).parents[1] / "CHANGELOG.md"
    assert f"\n## {gb.__version__}" in changelog.read_text()
