"""Every block of README and docs does what the page says."""

import argparse
import json
import os
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from gpubound.cli import rl
from gpubound.cli.train_options import from_file
from tests.messages import message

from .. import forked
from ..processes import plain_environment
from .blocks import MARKS, PAGES, PYTHON, ROOT, SHELL, Block, blocks, commands, plain
from .follow import _differs

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
