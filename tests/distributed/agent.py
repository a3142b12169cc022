"""What tests of torch's agent need: it leaves the files open that it gave to processes which have ended."""

import gc

import pytest

LEAVES_FILES = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True, scope="module")
def collected():
    """While those warnings are ignored."""
    yield
    gc.collect()
