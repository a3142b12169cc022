"""README and docs agree with each other and with the code, and every block does what its page says."""

import argparse
import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

import gpubound as gb
from benchmarks import figures
from gpubound import cli
from gpubound.cli import COMMANDS, rl
from gpubound.cli.train_options import from_file
from gpubound.models import registry
from tests.messages import message

from .. import forked
from ..processes import plain_environment
from .blocks import MARKS, PAGES, PYTHON, ROOT, SHELL, Block, blocks, commands, plain, prose
from .families import NAMES, parts, text
from .follow import _differs

DOCS = ROOT / "docs"
SOURCE = sorted((ROOT / "src/gpubound").rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
OTHERS_OPTIONS = {"--max-restarts", "--strict", "--dist", "--commit"}  # of torchrun, mkdocs, pytest, git


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_the_manual_is_short():
    """Pages by hand, with CONTRIBUTING, and their words outside of code. Docstrings and --help have the rest."""
    pages = [ROOT / "CONTRIBUTING.md", *(page for page in DOCS.glob("*.md") if page.name not in ("api.md", "figures.md"))]
    assert len(pages) <= 16
    assert sum(len(prose(page).split()) for page in pages) <= 25_000
    assert len(re.sub(r"<[^>]*>", "", prose(ROOT / "README.md")).split()) <= 500


def test_the_figures_are_those_of_the_results(capsys):
    assert figures.main(["--check"]) == 0, capsys.readouterr().err


def test_the_picture_of_the_doctor_is_of_a_committed_run():
    """The numbers that README tells of the picture are those of the run that it shows."""
    run = json.loads((ROOT / "benchmarks/results/doctor_slow_loop.json").read_text(encoding="utf-8"))
    (text,) = re.findall(r'doctor-light.png"[^>]*alt="([^"]+)"', README)
    told = {float(number) for number in re.findall(r"\d+\.\d(?= ms)", text)}
    costs = {finding["ms"] for finding in run["findings"]}
    assert told == {run["step_ms"], *costs, round(run["step_ms"] - run["together_ms"], 1)}
    assert f"busy {run['shares']['busy']:.0f} %" in text and run["gpu"].removeprefix("NVIDIA ") in text
    assert {int(line) for line in re.findall(r"line (\d+)", text)} == {finding["line"] for finding in run["findings"]}


# --- links ---


def anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ +(.+?)(?: \{#([\w-]+)\})?$", text, flags=re.MULTILINE)
    return {own or re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head, own in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) + re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text()):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name}: {target}"
        if page.parent == DOCS:
            assert file.resolve().is_relative_to(DOCS), (
                f"{page.name}: {target} is outside the site; give its address on the web"
            )
        if anchor and not anchor.startswith("only-") and file.name != "api.md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_is_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name in site, f"mkdocs.yml: {page.name} is not in the navigation"


# --- what the code has, the pages name ---


def errors() -> list[str]:
    return [name for name in gb.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("name", errors())
def test_every_error_has_its_section(name):
    text = (DOCS / "troubleshooting.md").read_text()
    section = re.search(rf"^## .*\b{name}\b.*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert section and len(section[0]) > 200, f"troubleshooting.md has no section on {name}"


def raises() -> str:
    """Every piece of a message in the source: the literal parts of strings and f-strings."""
    parts = []
    for path in SOURCE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


@pytest.mark.slow
def test_quoted_messages_are_in_the_source():
    """A message in troubleshooting is quoted as a block, its varying parts as <...>."""
    source = re.sub(r"\s+", " ", raises())
    quoted = [b for b in blocks(DOCS / "troubleshooting.md") if b.mark == "message"]
    assert len(quoted) >= len(errors()) - 1
    for block in quoted:
        for piece in re.split(r"<[^<>]*>|\n", block.text):
            piece = re.sub(r"\s+", " ", piece).strip()
            assert piece in source, f"{block.where}: no message says {piece!r}"


def variables() -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE)
    return set(re.findall(r'"((?:GPUBOUND|CUDA|NVIDIA|TRITON|XDG|HF|LOCAL|WORLD|RANK)(?:_[A-Z]+)+)"', text))


def test_every_environment_variable_is_named():
    page = (DOCS / "troubleshooting.md").read_text()
    named = set(re.findall(r"^\| `([A-Z_]+)", page, flags=re.MULTILINE))
    assert variables() <= named, f"troubleshooting.md lacks {variables() - named}"
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE)
    assert not [name for name in named if name not in text], "troubleshooting.md names a variable that no module reads"


def options() -> set[str]:
    """Every option of every command and benchmark."""
    modules = [import_module(f"gpubound.cli.{path.stem}") for path in (ROOT / "src/gpubound/cli").glob("[a-z]*.py")]
    modules += [import_module(f"benchmarks.{path.stem}") for path in (ROOT / "benchmarks").glob("bench_*.py")]
    kinds = {kind for m in modules for kind in vars(m).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    names = {f.name.rstrip("_").replace("_", "-") for kind in kinds for f in dataclasses.fields(kind)}
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names} | {"--help", "--version", "--check", "--dry"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page):
    named = {word for code in re.findall(r"`([^`\n]+)`", prose(page)) for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    assert named <= options() | OTHERS_OPTIONS, f"{page.name}: {sorted(named - options() - OTHERS_OPTIONS)}"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        code = "\n".join([*re.findall(r"`(make [^`\n]+)`", page.read_text()), *(b.text for b in blocks(page))])
        named = set(re.findall(r"^make ([a-z][\w-]*)", code, flags=re.MULTILINE))
        assert named <= targets, f"{page.name}: make has no {sorted(named - targets)}"


def public() -> list[str]:
    """What a user may call: the front's names, and those that the packages behind it show."""
    names = [
        f"gpubound.{name}"
        for name in gb.__all__
        if name not in ("__version__", "kernels", "lora", "distributed", "train") and not name.endswith("Error")
    ]
    for package in ("train", "lora", "data", "models", "measure", "kernels", "distributed"):
        module = import_module(f"gpubound.{package}")
        shown = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        things = [(name, getattr(module, name)) for name in shown]
        names += [f"gpubound.{package}.{n}" for n, thing in things if callable(thing) and thing.__module__ != "typing"]
    return sorted({*names, "gpubound.cli.train.train"})  # gpubound.train(...)


def test_every_public_name_is_in_the_reference():
    shown = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    there = {_place(name) for name in shown}
    missing = [name for name in public() if _place(name) not in there]
    assert not missing, f"api.md lacks {missing}"


def test_members_that_a_page_names_are_in_the_reference():
    """api.md shows a class with chosen members; a page's table of its calls has no others."""
    shown = re.search(r"::: gpubound.distributed.Ranks\n.*?\n +members: \[(.+?)\]", (DOCS / "api.md").read_text())
    table = (DOCS / "many-gpus.md").read_text().partition("| call | does |\n")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)[^`]*`", " ".join(line.split(" | ")[0] for line in table.splitlines()))
    assert "together" in named and set(named) <= set(shown[1].split(", "))


def test_every_exit_code_is_explained():
    codes = re.findall(r"\b\d+\b", cli.__doc__.partition("Exit codes")[2])
    page = (DOCS / "troubleshooting.md").read_text().partition("- Exit codes:")[2].partition("\n\n")[0]
    assert len(codes) == 6 and set(codes) <= set(re.findall(r"\b\d+\b", page))


def _place(name: str) -> str:
    """Where the object behind a dotted name is defined, so that gb.place and gpubound.place.placer.place are one."""
    home, _, last = name.rpartition(".")
    try:
        package = gb if home == "gpubound" else import_module(home)
        thing = inspect.unwrap(getattr(package, last)) if hasattr(package, last) else import_module(name)
    except ImportError:
        pytest.fail(f"api.md: there is no {name}")
    return f"{getattr(thing, '__module__', home)}.{getattr(thing, '__qualname__', last)}"


@pytest.mark.slow
def test_the_page_has_every_command_and_its_options():
    spec = importlib.util.spec_from_file_location("docs_commands", ROOT / "docs/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sections = module.page().split("\n## gpubound ")[1:]
    assert [section.partition("\n")[0] for section in sections] == list(COMMANDS)
    for section in sections:
        assert "usage: gpubound " in section and "--help" in section


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))  # comes with the docs extra
    spec = importlib.util.spec_from_file_location("docs_docstrings", ROOT / "docs/docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.listed


def test_columns_become_a_list(listed):
    text = "Do it.\n\nclip        the largest norm;\n            None does not clip\npad, rows   see bucket: pad={}"
    assert listed(text) == message("docs/docstrings:columns_become_a_list")


def test_prose_and_tables_stay(listed):
    text = "One line\nand another.\n\n| a | b |\n|---|---|\n\nclip   is here\nbut this is a sentence"
    assert listed(text) == text


def test_a_doctest_becomes_code(listed):
    assert listed(">>> 1 + 1\n2") == "```pycon\n>>> 1 + 1\n2\n```"


def test_the_page_lists_the_registrys_models():
    assert parts()[1] == text()


def test_every_model_has_a_name():
    assert {*registry.WRAPPERS, *(kind for types in registry.FAMILIES.values() for kind in types)} <= NAMES.keys()


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


ALL = [block for page in PAGES for block in blocks(page)]
RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]


def with_commands(folder: Path) -> dict[str, str]:
    """The environment of a page's shell, where `gpubound` is this tree's, whether or not one is installed."""
    command, there = folder / "gpubound", plain_environment()
    command.write_text(f'#!/bin/sh\nexec {forked.python()} -m gpubound "$@"\n')
    command.chmod(0o700)
    return there | {"PATH": os.pathsep.join([str(folder), there.get("PATH", "")])}


@pytest.mark.slow
def test_pages_can_be_followed(tmp_path):
    """All in one process that is not ours, without Triton's interpreter, as a reader's would be. A page that makes the pretend
    device has a process of its own: torch has one place for such a device."""
    alone = [page for page in RUN if "simgpu()" in page.read_text()]
    results, environment = [], with_commands(tmp_path)
    for pages in ([page for page in RUN if page not in alone], *([page] for page in alone)):
        command = [forked.python(), str(Path(__file__).parent / "follow.py"), *map(str, pages)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page"')]
        assert done.returncode == any(result["wrong"] for result in found), done.stderr[-4000:]
        results += found
    for page in RUN:
        of_page = [result for result in results if result["page"] == page.name]
        assert len([block for block in blocks(page) if block.runs]) <= len(of_page), page.name
    wrong = [f"{result['where']}: {result['wrong']}" for result in results if result["wrong"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("block", [b for b in ALL if b.language in PYTHON], ids=lambda b: b.where)
def test_python_that_is_not_run_compiles(block):
    compile(block.text, block.where, "exec")


def test_marks_are_known_and_have_a_reason():
    for block in ALL:
        if block.mark in ("", *MARKS) or not re.match("run|not run|output", block.mark):
            continue
        assert re.fullmatch(r"not run: \w.{8,}", block.mark), f"{block.where}: {block.mark}"


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "yaml"], ids=lambda b: b.where)
def test_a_config_is_one(block, tmp_path):
    (tmp_path / "config.yaml").write_text(block.text)
    read = rl.from_file if "\nrewards:" in block.text else from_file
    read(str(tmp_path / "config.yaml"))


class Parsed(Exception):
    pass


def _stopping(parse):
    def stop(*arguments, **options):
        parse(*arguments, **options)
        raise Parsed

    return stop


def lines_of_gpubound() -> list:
    found = [(b, line) for b in ALL if b.language in SHELL for line in commands(b)]
    inline = [
        (Block(page, 0, "", "", ""), line)
        for page in PAGES
        for line in re.findall(r"`(gpubound [a-z]+ [^`]+)`", page.read_text())
    ]
    return [(b.where, part.strip()) for b, line in found + inline for part in line.split("|") if "gpubound " in part]


@pytest.mark.parametrize(("where", "line"), lines_of_gpubound())
def test_a_command_line_parses(where, line, monkeypatch, capsys):
    """Its options are the command's own. Nothing is run: the parser's answer ends it."""
    for owner, name in ((tyro, "cli"), (argparse.ArgumentParser, "parse_args")):
        monkeypatch.setattr(owner, name, _stopping(getattr(owner, name)))
    words = shlex.split(re.sub(r"2?>+ *\S+", "", line.replace("...", "")))
    words = words[words.index("gpubound") + 1 :]
    if not words or words[0].startswith("-") or words[0] == "COMMAND":
        return
    command, *rest = words
    if command in ("train", "plan", "rl") and rest and not rest[0].startswith("-"):
        rest.pop(0)  # the YAML file, which may be the reader's own
    module = f"gpubound.cli.{command}"
    if command == "bench" and rest and not rest[0].startswith("-"):
        module = f"benchmarks.bench_{rest.pop(0)}"
    try:
        import_module(module).main(rest)
    except Parsed:
        return
    except SystemExit as end:
        assert "--help" in rest and not end.code, f"{where}: {line}: {capsys.readouterr().err}"
    else:
        pytest.fail(f"{where}: {line}: the command parsed nothing")


def test_shown_output_is_compared():
    block = Block(ROOT / "README.md", 1, "text", "a 1.5 s  b\n...\nend 3\n", "output")
    assert _differs(block, "a 22.75 s b\nmore\nmore\nend 4\n") == ""
    assert "line 1" in _differs(block, "another\nend 4\n")
    assert "line 3" in _differs(block, "a 1 s b\nmore\n")
    assert plain("x 1,024.5 tok/s | ------ |") == [message("docs/blocks:shown_output_is_compared")]
