"""Pages of the notebooks in examples/notebooks: Markdown cells as they are, and code cells as blocks of code."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page_of(path)))
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))


def page_of(path: Path) -> str:
    """Return a notebook as Markdown. The line under its title says where the notebook is."""
    first, *cells = [_markdown(cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    title, _, rest = first.partition("\n")
    where = f"*A notebook, [{path.name}]({path.name}): `examples/notebooks/` in a clone. It runs on a CPU, too.*"
    return "\n\n".join([title, where, rest.strip(), *cells]) + "\n"


def _markdown(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    needs = " # needs a GPU" if "gpu" in cell["metadata"].get("tags", ()) else ""
    if source.startswith("!"):
        return f"```sh\n{source.removeprefix('!')}{needs}\n```"
    return f"```python\n{source}\n```"
