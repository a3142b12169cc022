"""Prompts of a run, and rewards: Python functions from answers to numbers, run while other answers are still being sampled.

A reward function is called with keywords, for the answers to one prompt: `completions` (texts), `completion_ids`, `prompts`,
`finish` ("stop" or "length"), `turns` and `states` of conversations (episodes.py; the others are then of their last turns),
and each other key of the prompt's row, all of them lists of one length. It takes those that it names, or all as **kwargs, and
returns a number for each answer, or None where it says nothing of it.

`run_code` runs Python that a model has written, in a separate process with limits of time, memory and file size. The limits
keep a run from being held up, and its machine from being filled. They are no wall against an attacker: the code may read what
this user may read, and reach the network where the machine does. Run models that you do not trust in a container.

Prompts are read, tokenised, and drawn in another order each epoch.
"""

import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult, ThreadPool
from numbers import Real
from pathlib import Path
from secrets import token_hex
from statistics import fmean
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from ..data.formats import as_text
from ..errors import DataError, RewardError
from ..files import reading
from ..formatting import counted, hint, shown
from ..trace import notice

if TYPE_CHECKING:
    from ..data import Tokenizer  # with torch, which a process that computes rewards does not import


WANTED = "a text, messages such as [{'role': 'user', 'content': ...}], token ids, or a dict with one of these as 'prompt'"


@dataclass(frozen=True)
class RLPrompt:
    """A prompt, and what its row holds besides, which goes to the rewards."""

    text: Any  # a text, or messages; None for token ids
    ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


def read_prompts(source: Any, tokenizer: "Tokenizer | None", what: str = "prompts") -> list[RLPrompt]:
    """Return the prompts of a .jsonl file, or of an iterable."""
    where = what
    if isinstance(source, str | Path):
        source, where = _rows(Path(source), what), str(source)
    if not isinstance(source, Iterable):
        raise ValueError(f"{what}: got a {type(source).__name__}, wanted a .jsonl file or a list of prompts.")
    prompts = [_prompt(row, tokenizer, f"{where}[{number}]") for number, row in enumerate(source)]
    if not prompts:
        raise ValueError(f"{where}: holds no prompt; give at least one.")
    return prompts


def _rows(path: Path, what: str) -> list[Any]:
    if not path.is_file():
        raise ValueError(f"{what}: {path} {'is a folder' if path.is_dir() else 'does not exist'}; give a .jsonl file.")
    rows = []
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: is not JSON ({error}); every line must be one JSON object.") from error
    return rows


def _prompt(row: Any, tokenizer: "Tokenizer | None", where: str) -> RLPrompt:
    columns = {key: value for key, value in row.items() if key != "prompt"} if isinstance(row, Mapping) else {}
    text = row.get("prompt") if isinstance(row, Mapping) else row
    if isinstance(text, Sequence) and text and not isinstance(text, str) and all(type(token) is int for token in text):
        return RLPrompt(None, list(text), columns)
    messages = isinstance(text, Sequence) and text and all(isinstance(turn, Mapping) for turn in text)
    if not text or not (isinstance(text, str) or messages):
        raise ValueError(f"{where}: got {shown(row)}, wanted {WANTED}.")
    if tokenizer is None:
        raise ValueError(f"{where}: got a text, and there is no tokenizer; pass tokenizer=, or prompts of token ids.")
    if isinstance(text, str):
        from ..decode.text import TextCodec  # here, because it brings torch

        return RLPrompt(text, TextCodec(tokenizer, "rl").encode(as_text(text, where)), columns)
    ids = tokenizer.inner.encode(tokenizer.render(list(text), prompt=True), add_special_tokens=False).ids
    return RLPrompt(text, ids, columns)


def fitting(prompts: list[RLPrompt], seq: int, new: int, what: str) -> list[RLPrompt]:
    """Return the prompts that leave room for `new` tokens in `seq`; report how many do not."""
    fit = [prompt for prompt in prompts if len(prompt.ids) + new <= seq]
    longest = max(len(prompt.ids) for prompt in prompts)
    if not fit:
        raise ValueError(
            f"rl: {what}: the shortest has {min(len(prompt.ids) for prompt in prompts):,} tokens, and {new:,} new ones must "
            f"follow in seq, {seq:,}; give a larger seq, smaller max_new_tokens, or shorter prompts."
        )
    if len(fit) < len(prompts):
        left_out = counted(len(prompts) - len(fit), "prompt")
        notice(
            f"rl: {what}: {left_out} of {len(prompts):,} left out: up to {longest:,} tokens, with {new:,} new ones beyond seq."
        )
    return fit


def check_tokens(prompts: Sequence[RLPrompt], vocabulary: int, what: str) -> None:
    """Raise a ValueError for a token that the model does not know: its prompt may be drawn late in a run."""
    for number, prompt in enumerate(prompts):
        for token in (min(prompt.ids), max(prompt.ids)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"rl: {what}[{number}] holds the token {token}, outside the model's vocabulary of {vocabulary}; is the "
                    f"tokenizer this model's own?"
                )


@dataclass
class PromptOrder:
    """The order in which prompts are drawn: all of them in each epoch. `position` is all that a resumed run needs."""

    count: int
    seed: int
    position: int = 0

    def take(self, number: int) -> list[int]:
        """Return the next indices."""
        numbers = [self._at(self.position + i) for i in range(number)]
        self.position += number
        return numbers

    def _at(self, position: int) -> int:
        epoch, nth = divmod(position, self.count)
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return int(self._order[nth])


FILE_BYTES = 1 << 20  # that the code may write to a file
SHOWN = 2000  # characters of the output that are kept

# Limits itself before it reads the code, so that nothing has to run between fork and exec of a process with many threads. It
# writes a token once the code has run to its end: code that calls exit(0) before its tests has not passed them. unittest.main
# calls exit after all tests.
CHILD = """
import os, resource, runpy, sys
seconds, memory, size, end, token, path = *map(int, sys.argv[1:5]), *sys.argv[5:]
for kind, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
sys.argv = [path]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as stop:
    at = stop.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    if stop.code or at.tb_frame.f_code.co_filename != getattr(sys.modules.get("unittest.main"), "__file__", ""):
        raise
os.write(end, token.encode())
"""


class SandboxResult(NamedTuple):
    passed: bool  # the code ran to its end, without an error
    why: str  # "", or the end of its errors, or the limit that it met
    output: str = ""  # the end of what it printed


def run_code(code: str, seconds: float = 5.0, memory: int = 512 << 20) -> SandboxResult:
    """Run `code` and return how it ended. Processes that it has started end with it."""
    with tempfile.TemporaryDirectory(prefix="gpubound-") as folder:
        path = Path(folder, "answer.py")
        path.write_text(code, encoding="utf-8", errors="replace")
        limits, token, (reads, writes) = [max(1, int(seconds + 1)), memory, FILE_BYTES], token_hex(16), os.pipe()
        os.set_blocking(reads, False)  # a process that has left the group may keep the other end open
        # Into files, whose size is limited: a pipe would take as much memory as the code prints.
        with open(Path(folder, "output"), "w+b") as output, open(Path(folder, "errors"), "w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", CHILD, *map(str, limits), str(writes), token, str(path)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, start_new_session=True, pass_fds=[writes],
                env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                why = f"it took more than {seconds:g} seconds"
            else:
                why = "" if process.returncode == 0 else _end(errors) or f"exit code {process.returncode}"
                if not why and _received(reads) != token:
                    why = "it called exit before its end"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                os.close(reads)
                os.close(writes)
            return SandboxResult(not why, why, _end(output))


def _received(pipe: int) -> str:
    with suppress(BlockingIOError):
        return os.read(pipe, 64).decode(errors="replace")
    return ""


def _end(file: BinaryIO) -> str:
    """Return the last SHOWN characters of a file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * SHOWN))
    return file.read().decode(errors="replace")[-SHOWN:].strip()


LARGEST = 3e38  # of a number in fp32
POLL = 0.5  # seconds between two looks at processes
WORKERS = min(8, os.cpu_count() or 1)
INTERRUPTS_IGNORED = (signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the run answers it
CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)


def _check_pattern(name: str, pattern: str | None) -> None:
    """Raise a ValueError now: the first reward may be minutes away."""
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise ValueError(f"{name}: got {shown(pattern)}, wanted a regular expression: {error}.") from None


@dataclass(frozen=True)
class ExactMatch:
    """1 where an answer is the row's `answer`, without white space around it; else 0.

    extract  a regular expression: what its last match in the answer holds, its group where it has one, is compared
    """

    extract: str | None = None

    def __post_init__(self) -> None:
        _check_pattern("exact_match: extract", self.extract)

    def __call__(self, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
        return [float(self._answer(text) == str(wanted).strip()) for text, wanted in zip(completions, answer)]

    def _answer(self, text: str) -> str:
        if self.extract is None:
            return text.strip()
        matches = list(re.finditer(self.extract, text))
        return (matches[-1].group(min(1, matches[-1].re.groups)) or "").strip() if matches else ""


@dataclass(frozen=True)
class Regex:
    """1 where the whole answer, without white space around it, matches `pattern`; else 0. Without a pattern, the row's."""

    pattern: str | None = None

    def __post_init__(self) -> None:
        _check_pattern("regex: pattern", self.pattern)

    def __call__(self, completions: Sequence[str], pattern: Sequence[str] = (), **_: Any) -> list[float]:
        patterns = [self.pattern] * len(completions) if self.pattern is not None else pattern
        if not patterns:
            raise ValueError("there is no pattern; give regex one, or each row of the prompts its own")
        return [
            float(re.fullmatch(wanted, text.strip(), re.DOTALL) is not None)
            for wanted, text in zip(patterns, completions, strict=True)
        ]


@dataclass(frozen=True)
class UnitTests:
    """1 where the row's `tests`, Python code, pass after the answer's code (its last fenced block, or all of it); else 0.

    Each answer runs in a separate process, for up to `seconds`, with up to `memory` bytes.
    """

    seconds: float = 5.0
    memory: int = 512 << 20

    def __call__(self, completions: Sequence[str], tests: Sequence[str], **_: Any) -> list[float]:
        codes = [(CODE.findall(text) or [text])[-1] for text in completions]
        return [float(run_code(f"{code}\n\n{test}\n", self.seconds, self.memory).passed) for code, test in zip(codes, tests)]


GIVEN = ("completions", "completion_ids", "prompts", "finish", "turns", "states")  # what every function may take
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
KNOWN: dict[str, type] = {"exact_match": ExactMatch, "regex": Regex, "unit_tests": UnitTests}


class RewardFunction(NamedTuple):
    name: str
    call: Callable[..., Any]
    weight: float = 1.0


def read_rewards(rewards: Any) -> list[RewardFunction]:
    """Return the reward functions: of one function, a list of functions, or a dict from functions, or their names, to weights.

    A name is one of KNOWN or file.py:function. In place of a weight there may be a dict: weight, and the function's options.
    """
    if callable(rewards) or (isinstance(rewards, str) and rewards):
        rewards = [rewards]
    if not isinstance(rewards, Mapping | Iterable) or not rewards:
        raise ValueError(f"rewards: got {shown(rewards)}, wanted a function, a list of them, or a dict with their weights.")
    pairs = rewards.items() if isinstance(rewards, Mapping) else ((each, 1.0) for each in rewards)
    functions = [_function(what, value) for what, value in pairs]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"rewards: {twice} is there twice; give the functions different names (__name__).")
    return functions


def _function(what: Any, value: Any) -> RewardFunction:
    options = dict(value) if isinstance(value, Mapping) else {"weight": value}
    weight = options.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"rewards: the weight of {what}: got {shown(weight)}, wanted a number.")
    if callable(what):
        return RewardFunction(getattr(what, "__name__", type(what).__name__), what, float(weight))
    name = str(what)
    if name in KNOWN:
        known = list(inspect.signature(KNOWN[name]).parameters)
        if wrong := next((key for key in options if key not in known), None):
            raise ValueError(f"rewards: {name}: {shown(wrong)} is no option; {hint(wrong, ('weight', *known), 'they are')}")
        return RewardFunction(name, KNOWN[name](**options), float(weight))
    path, _, function = name.rpartition(":")
    if not path:
        raise ValueError(f"rewards: got {name!r}, wanted file.py:function; {hint(name, KNOWN, 'those with a name are')}")
    return RewardFunction(function, FromFile(path, function), float(weight))


def check_columns(functions: Sequence[RewardFunction], prompts: Sequence[RLPrompt], what: str) -> None:
    """Raise ValueError for a function that needs a key which a row of the prompts does not have."""
    for name, call, _ in functions:
        needed = [key for key, p in _parameters(call).items() if p.default is p.empty and p.kind not in VARIADIC]
        for key in needed:
            row = next((i for i, prompt in enumerate(prompts) if key not in (*GIVEN, *prompt.columns)), None)
            if row is not None:
                has = ", ".join(prompts[row].columns) or "none"
                raise ValueError(
                    f"rewards: {name} needs {key!r}, and {what}[{row}] has {has} besides its prompt; add it to each row, or "
                    f"take one of {', '.join(GIVEN)}."
                )


def check_sendable(functions: Sequence[RewardFunction]) -> None:
    """Raise ValueError for a function that no process can be sent: the first reward may be minutes away."""
    for name, call, _ in functions:
        try:
            pickle.dumps(call)
        except Exception as error:
            raise ValueError(
                f"rl: processes: {name} cannot be sent to a process ({one_line(error)}); define it in a file, not inside a "
                f"function, or leave processes out."
            ) from error


def _parameters(call: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(call.function if isinstance(call, FromFile) else call).parameters


@dataclass(frozen=True)
class FromFile:
    """A function of a Python file, which each process reads for itself."""

    path: str
    name: str
    what: str = "rewards"

    def __post_init__(self) -> None:
        assert self.function is not None  # reads the file

    @property
    def function(self) -> Callable[..., Any]:
        key = str(Path(self.path).resolve()), self.name
        if key not in _LOADED:
            if not Path(self.path).is_file():
                raise ValueError(f"{self.what}: {self.path} does not exist; give file.py:function.")
            spec = importlib.util.spec_from_file_location(Path(self.path).stem, key[0])
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except (Exception, SystemExit) as error:
                raise ValueError(f"{self.what}: {self.path} raised {one_line(error)}.") from error
            function = getattr(module, self.name, None)
            if not callable(function):
                raise ValueError(f"{self.what}: {self.path} has no function {self.name!r}.")
            _LOADED[key] = function
        return _LOADED[key]

    def __call__(self, **keywords: Any) -> Any:
        return _accepted(self.function, keywords)


_LOADED: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(eq=False)
class AnswerGroup:
    """The answers to one prompt, and once they are scored, their rewards: in all, and by function."""

    prompt: RLPrompt
    answers: list[Any] = field(default_factory=list)  # Conversations
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, list[float | None]] = field(default_factory=dict)


def with_signal(groups: Sequence[AnswerGroup]) -> list[AnswerGroup]:
    """Return the groups whose answers' rewards differ, so that something is learnt from them. Single answers are compared with
    those to the other prompts."""
    if all(len(group.rewards) == 1 for group in groups):
        return [*groups] if len({group.rewards[0] for group in groups}) > 1 else []
    return [group for group in groups if max(group.rewards) > min(group.rewards)]


def means_of_parts(groups: Sequence[AnswerGroup]) -> dict[str, float]:
    """Return the mean of each function's numbers, where it gave some."""
    values = {name: [v for group in groups for v in group.parts[name] if v is not None] for name in groups[0].parts}
    return {name: fmean(numbers) for name, numbers in values.items() if numbers}


class Scoring:
    """`with Scoring(functions) as scoring`: `submit` groups as they are complete, then `collect` the rewards of all."""

    def __init__(self, functions: list[RewardFunction], processes: bool = False, timeout: float = 60.0):
        self.functions, self.processes, self.timeout = functions, processes, timeout
        self._pool: Any = None
        self._processes: list[Any] = []  # those that the pool began with: it replaces one that ends, and its result never comes
        self._pending: list[tuple[AnswerGroup, list[AsyncResult]]] = []

    def __enter__(self) -> "Scoring":
        # A forked process would share CUDA's context, so processes are spawned.
        if self.processes:
            before = multiprocessing.active_children()
            self._pool = multiprocessing.get_context("spawn").Pool(WORKERS, signal.signal, INTERRUPTS_IGNORED)
            self._processes = [child for child in multiprocessing.active_children() if child not in before]
        else:
            self._pool = ThreadPool(WORKERS)
        return self

    def __exit__(self, *_: object) -> None:
        if self.processes:
            self._pool.terminate()  # threads that hang are daemons: they end with the process
        else:
            self._pool.close()

    def submit(self, group: AnswerGroup) -> None:
        results = [self._pool.apply_async(_call, (function.call, _keywords(group))) for function in self.functions]
        self._pending.append((group, results))

    def collect(self) -> None:
        """Give every submitted group its rewards. Raise RewardError for a function that failed."""
        pending, self._pending = self._pending, []
        for group, results in pending:
            group.rewards = [0.0] * len(group.answers)
            for function, result in zip(self.functions, results):
                values = self._values(function, group, result)
                group.parts[function.name] = values
                group.rewards = [total + function.weight * (value or 0.0) for total, value in zip(group.rewards, values)]
            if any(all(value is None for value in each) for each in zip(*group.parts.values())):
                raise RewardError(
                    f"rewards: no function gave a number for an answer to {_named(group)}, wanted one of at least one function."
                )
            if wrong := [total for total in group.rewards if not abs(total) <= LARGEST]:
                raise RewardError(
                    f"rewards: their weighted sum is {wrong[0]:g} for an answer to {_named(group)}, wanted numbers that are "
                    f"finite in fp32."
                )

    def _values(self, function: RewardFunction, group: AnswerGroup, result: AsyncResult) -> list[float | None]:
        what = f"rewards: {function.name}"
        where = f"for the answers to {_named(group)}"
        try:
            # Those before it are done, so this one runs by now, and has all of the time from here on.
            began, left = time.perf_counter(), self.timeout
            while not result.ready() and left > 0:
                result.wait(min(left, POLL))
                left = began + self.timeout - time.perf_counter()
                if not result.ready() and (code := next((one.exitcode for one in self._processes if one.exitcode), None)):
                    raise RewardError(
                        f"{what}: its process ended with exit code {code}. Where a script calls gb.rl.train at its top level, "
                        f"each process runs it again: put the call under if __name__ == '__main__'."
                    )
            values = result.get(0)
        except multiprocessing.TimeoutError as error:
            raise RewardError(
                f"{what}: gave nothing within {self.timeout:g} seconds {where}; give it a larger timeout."
            ) from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{what}: raised {one_line(error)} {where}.") from error
        if not isinstance(values, list):
            raise RewardError(f"{what}: returned {values} {where}, wanted a list with a number for each of them.")
        if len(values) != len(group.answers):
            raise RewardError(
                f"{what}: returned {counted(len(values), 'number')} {where}, wanted {len(group.answers)}, one for each."
            )
        for value in values:
            if value is not None and not math.isfinite(value):
                raise RewardError(f"{what}: returned {value} {where}, wanted finite numbers.")
        return values


def _keywords(group: AnswerGroup) -> dict[str, list[Any]]:
    """Return what a function gets. The lists are its own: one that sorts or empties them changes nothing for the others."""
    answers, prompt = group.answers, group.prompt
    keywords = {name: [value] * len(answers) for name, value in prompt.columns.items()}
    keywords |= {"prompts": [[*prompt.ids] if prompt.text is None else prompt.text for _ in answers]}
    keywords |= {"completion_ids": [[*answer.ids] for answer in answers]}
    keywords |= {"completions": [[*answer.ids] if answer.text is None else answer.text for answer in answers]}
    keywords |= {name: [getattr(answer, name) for answer in answers] for name in ("finish", "turns")}
    return keywords | {"states": [answer.state for answer in answers]}


def _named(group: AnswerGroup) -> str:
    return shown(group.prompt.text or group.prompt.ids)


NOT_USERS = (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def one_line(error: BaseException) -> str:
    """Return an error's class and text on one line, with the last line of a user's file that it came through."""
    text = " ".join(str(error).split())
    lines = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    lines += re.findall(r'File "(.+?)", line (\d+)', str(error.__cause__))  # a process sends its traceback as text
    at = [f" ({Path(file).name}:{line})" for file, line in lines if not file.startswith(NOT_USERS)]
    return f"{type(error).__name__}{f': {text[:500]}' * bool(text)}{at[-1] if at else ''}"


def _call(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Return the function's values as a list of floats, or what it returned in words."""
    try:
        values = _accepted(function, keywords)
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the worker, and its result would never come
        raise RuntimeError(f"it ended its thread or process by {one_line(error)}") from None
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple) or not all(isinstance(value, Real | None) for value in values):  # NumPy's, too
        return f"{shown(values)}, a {type(values).__name__}"
    return [None if value is None else float(value) for value in values]


def _accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Call the function with those of `keywords` that it takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function(**keywords)
    return function(**{name: value for name, value in keywords.items() if name in parameters})
