"""The page of commands has each command's help."""

import importlib.util

import pytest

from gpubound.cli import COMMANDS

from .blocks import ROOT


@pytest.mark.slow
def test_the_page_has_every_command_and_its_options():
    spec = importlib.util.spec_from_file_location("docs_commands", ROOT / "docs/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sections = module.page().split("\n## gpubound ")[1:]
    assert [section.partition("\n")[0] for section in sections] == list(COMMANDS)
    for section in sections:
        assert "usage: gpubound " in section and "--help" in section
