"""One process beside several computes by the definitions, as the ranks do (processes.py)."""

import pytest


@pytest.fixture(autouse=True)
def on_definitions(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
