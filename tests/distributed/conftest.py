from pathlib import Path


def pytest_collection_modifyitems(items):
    """All tests of a file with ranks are slow: the server that ranks are forked from takes 5 s of CPU to start."""
    for item in items:
        if item.path.parent == Path(__file__).parent and {"on_ranks", "each_on_ranks"} & vars(item.module).keys():
            item.add_marker("slow")
