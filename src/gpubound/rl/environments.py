"""Environments that the library gives, and how others are named: functions that reply to a policy's turns."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..formatting import hint, shown
from .episodes import Episode
from .rewards import CODE, FromFile, one_line
from .sandbox import run_code


@dataclass(frozen=True)
class PythonTool:
    """Run the turn's last fenced block of Python, and reply with what it printed. A turn without code ends the conversation.

    The code runs in a process with limits (sandbox.py), for up to `seconds`, with up to `memory` bytes.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    role: str = "user"  # of the reply; "tool" where the chat template has it

    def __call__(self, episode: Episode) -> list[dict[str, str]] | None:
        blocks = CODE.findall(episode.text or "")
        if not blocks:
            return None
        result = run_code(blocks[-1], self.seconds, self.memory)
        return [{"role": self.role, "content": result.output.strip() or result.why or "(no output)"}]


@dataclass(frozen=True)
class RetryTests:
    """Run the row's `tests` after the turn's code, and reply with the error, until they pass. gb.rl.UnitTests rewards the last
    turn; state["passed"] is its outcome, too.
    """

    seconds: float = 5.0
    memory: int = 512 << 20

    def __call__(self, episode: Episode) -> str | None:
        code = (CODE.findall(episode.text or "") or [episode.text])[-1]
        result = run_code(f"{code}\n\n{episode.columns['tests']}\n", self.seconds, self.memory)
        episode.state["passed"] = result.passed
        return None if result.passed else f"The tests fail: {result.why}\nCorrect the code."


KNOWN: dict[str, Callable[[], Any]] = {"python_tool": PythonTool, "retry_tests": RetryTests}


def read_environment(environment: Any) -> Callable[[Episode], Any] | None:
    """Return the environment: a function, a class of which one is made, a name in KNOWN, or file.py:name of one of these."""
    if environment is None:
        return None
    if isinstance(environment, str):
        path, _, name = environment.rpartition(":")
        if not path and environment not in KNOWN:
            known = hint(environment, KNOWN, "those with a name are")
            raise ValueError(f"environment: got {environment!r}, wanted file.py:function; {known}")
        environment = FromFile(path, name, "environment").function if path else KNOWN[environment]
    if inspect.isclass(environment):
        try:
            environment = environment()
        except Exception as error:
            raise ValueError(f"environment: {environment.__name__}() raised {one_line(error)}.") from error
    if not callable(environment):
        raise ValueError(f"environment: got {shown(environment)}, wanted a function of a conversation.")
    return environment
