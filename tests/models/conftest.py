import pytest


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    """On a CPU the doors take the reference here: the kernels' own tests hold the interpreter to it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
