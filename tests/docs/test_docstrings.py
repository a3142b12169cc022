"""The API page: columns of arguments in a docstring become a list, doctests a block of code, and prose stays prose."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from tests.messages import message

from .blocks import ROOT


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
