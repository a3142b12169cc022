"""The notebooks run top to bottom on a CPU, but for cells with the tag `gpu`, in an empty folder."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from .. import forked
from ..processes import plain_environment

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert document["nbformat"] == 4 and all(not cell["outputs"] for cell in cells), "kept without outputs"
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if source.startswith("!"):
            assert source.startswith("!gpubound ") and "\n" not in source
            if "gpu" not in cell["metadata"].get("tags", ()):
                command = f"{forked.python()} -m gpubound {source.removeprefix('!gpubound ')}"
                subprocess.run(command, shell=True, check=True, env=plain_environment(), capture_output=True)
            continue
        code = compile(ast.parse(source), f"{notebook.name}[{number}]", "exec")
        if "gpu" not in cell["metadata"].get("tags", ()):
            exec(code, namespace)
