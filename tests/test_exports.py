"""What the package shows is what it says it shows, and showing it costs nothing until it is used."""

import importlib
import subprocess
import sys

import pytest

import gpubound as gb


def test_all_is_what_is_there():
    assert len(set(gb.__all__)) == len(gb.__all__)
    for name in gb.__all__:
        assert getattr(gb, name) is not None


@pytest.mark.parametrize("name", ["place", "feed", "watch", "capture", "no_stall", "strict", "TrainStep", "Corpus"])
def test_calls_are_calls(name):
    assert callable(getattr(gb, name)) and not isinstance(getattr(gb, name), type(sys))


@pytest.mark.parametrize("package", ["place", "feed", "watch", "train", "graph", "models"])
def test_importing_a_package_leaves_the_function_its_name(package):
    code = (
        f"import gpubound as gb, gpubound.{package}, types; from gpubound.{package} import *; "
        f"print([n for n in ('place', 'feed', 'watch') if isinstance(getattr(gb, n), types.ModuleType)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("package", ["feed", "graph", "layers", "models", "monitor", "place", "train", "watch"])
def test_a_package_exports_what_it_imports(package):
    module = importlib.import_module(f"gpubound.{package}")
    for name in getattr(module, "__all__", []):
        assert getattr(module, name) is not None


def test_an_unknown_name():
    with pytest.raises(AttributeError) as error:
        gb.plaice  # noqa: B018
    assert str(error.value) == "module 'gpubound' has no attribute 'plaice'"


def test_the_plugin_and_the_package_import_neither_torch_nor_triton():
    """Every pytest run on a machine that has gpubound loads the plugin."""
    code = "import sys, gpubound.watch.pytest_plugin; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_kernels_do_not_import_triton_until_one_runs():
    code = "import sys, gpubound.kernels, gpubound.train, gpubound.place; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_changelog_names_this_version():
    from pathlib import Path

    changelog = Path(__file__).parents[1] / "CHANGELOG.md"
    assert f"\n## {gb.__version__}" in changelog.read_text()
