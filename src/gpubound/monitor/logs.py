"""A run's records for TensorBoard, Weights & Biases or trackio, each through its own library. The tape stays."""

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

KINDS = ("tensorboard", "wandb", "trackio")


class Log:
    """`with open_log(...) as log: log.write(record)`. This one, for none, writes nothing."""

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def check_log(kind: str | None) -> None:
    """Refuse a logger that cannot be opened, before hours are spent on what it was to log."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"log: got {kind!r}, wanted one of {', '.join(KINDS)}.")
    if kind is not None:
        _library(kind)


def open_log(kind: str | None, folder: Path, name: str, config: dict[str, Any]) -> Log:
    check_log(kind)
    if kind is None:
        return Log()
    if kind == "tensorboard":
        return TensorBoard(import_module("torch.utils.tensorboard"), folder)
    return Tracker(_library(kind), folder, name, config)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"log: {name} is not installed; pip install {name}, or leave --log out.") from error


class TensorBoard(Log):
    """Event files in <folder>/tensorboard."""

    def __init__(self, library: Any, folder: Path):
        self._writer = library.SummaryWriter(str(folder / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        for what, value in _figures(record).items():
            self._writer.add_scalar(what, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Tracker(Log):
    """Weights & Biases, or trackio, which keeps to its interface. What they print goes to stderr: --json has stdout."""

    def __init__(self, library: Any, folder: Path, name: str, config: dict[str, Any]):
        self._library = library
        where = {"dir": str(folder)} if library.__name__ == "wandb" else {}
        with redirect_stdout(sys.stderr):
            library.init(project="gpubound", name=name, config=config, **where)

    def write(self, record: dict[str, Any]) -> None:
        self._library.log(_figures(record), step=record["step"])

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._library.finish()


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    return {what: value for what, value in record.items() if what != "step" and isinstance(value, int | float)}
