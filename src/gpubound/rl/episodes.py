"""Answers of one turn, or of several with what an environment replies between them; environments that the library gives.

An environment is a function that gets an Episode when a turn of the policy has ended, and returns its reply: a
text, messages ({"role": ..., "content": ...}), token ids, or None to end the conversation. It runs in a thread, while other
conversations are sampled. The policy reads its tokens; they are not learnt.
"""

import inspect
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from ..errors import GpuboundError, RewardError
from ..formatting import counted, hint, shown
from ..trace import notice
from .rewards import CODE, WORKERS, FromFile, RLPrompt, one_line, run_code

if TYPE_CHECKING:
    from ..data import Tokenizer  # with torch, which a process that computes rewards does not import


POLL = 0.1  # seconds between two looks at Ctrl-C
WANTED = "a text, messages such as [{'role': 'tool', 'content': ...}], token ids, or None"


@dataclass(eq=False)
class Episode:
    """An answer to a prompt, of one turn or of several.

    turns   the policy's, {"role": "assistant", "content": ...}, and the environment's messages between; a content is a text,
            without a tokenizer token ids
    text, ids, finish
            of the policy's last turn. finish is "stop" or "length"
    state   a dict that is the environment's own, which rewards may read
    """

    prompt: RLPrompt
    number: int  # of the prompt, among those asked
    sample: int  # its number among those of the prompt
    turns: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    ids: list[int] = field(default_factory=list)
    finish: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    policy_turns: int = 0  # turns of the policy
    # Of all turns, the environment's included:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)

    @property
    def columns(self) -> dict[str, Any]:
        """The keys of the prompt's row besides the prompt."""
        return self.prompt.columns

    def add_turn(self, sequence: Any, text: str | None) -> None:
        """Add a turn of the policy: a sequence of a rollout."""
        # A copy: the rollout goes on from the sequence's own tokens, whatever an environment does to those that it gets.
        self.ids, self.text, self.finish, self.policy_turns = [*sequence.tokens], text, sequence.finish, self.policy_turns + 1
        self.turns.append({"role": "assistant", "content": self.ids if text is None else text})
        self._add(sequence.tokens, sequence.logprobs, True)

    def add_reply(self, messages: list[dict[str, Any]], ids: list[int]) -> None:
        """Add the environment's reply."""
        self.turns += messages
        self._add(ids, [0.0] * len(ids), False)

    def _add(self, ids: list[int], logprobs: list[float], learnt: bool) -> None:
        self.tokens, self.logprobs = [*self.tokens, *ids], [*self.logprobs, *logprobs]
        self.learnt += [learnt] * len(ids)


class Episodes:
    """The policy, and the environment where there is one: inside `with`, `play` yields the conversations of a rollout.

    turns    the most turns of the policy in a conversation
    new      the most tokens of a turn
    seq      the most tokens of a prompt with its conversation
    timeout  seconds that a reply may take
    """

    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        environment: Callable[[Episode], Any] | None = None,
        turns: int = 1,
        new: int = 1,
        seq: int = 2,
        timeout: float = 60.0,
    ):
        self.tokenizer, self.environment, self.turns, self.new, self.seq = tokenizer, environment, turns, new, seq
        self.timeout = timeout
        self._pool: Any = None

    def __enter__(self) -> "Episodes":
        if self.environment is not None:
            self._pool = ThreadPool(WORKERS)  # of daemons: one that hangs ends with the process
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def play(self, rollout: Any, asked: Sequence[RLPrompt], stopping: Callable[[], Any]) -> Generator[Episode, None, None]:
        """Yield the conversations as they end, those of `asked[n]` being those of the rollout's prompt n."""
        running: dict[tuple[int, int], Episode] = {}
        replies: SimpleQueue[tuple[Any, Episode, Any]] = SimpleQueue()
        ended: list[Episode] = []
        observed = pending = decoded = 0
        texts: dict[tuple[int, int], str] = {}  # of turns that have ended and were not yielded yet
        vocabulary = rollout.decoder.body.vocab

        def listen() -> None:
            """Go on with the conversations that got a reply. Wait for one where the rollout would end without."""
            nonlocal pending
            began = time.perf_counter()
            while pending:
                waits = observed == rollout.total
                try:
                    sequence, episode, reply = replies.get(timeout=POLL) if waits else replies.get_nowait()
                except Empty:
                    if not waits or stopping():
                        return
                    if time.perf_counter() - began > self.timeout:
                        raise RewardError(
                            f"environment: gave nothing within {self.timeout:g} seconds; give it a larger timeout."
                        ) from None
                    continue
                pending -= 1
                if isinstance(reply, BaseException):
                    if isinstance(reply, GpuboundError):
                        raise reply
                    where = shown(episode.prompt.text or episode.prompt.ids)
                    raise RewardError(f"environment: raised {one_line(reply)} in the conversation after {where}.") from reply
                messages, ids = reply
                if not len(episode.tokens) == len(episode.logprobs) == len(episode.learnt):
                    raise RewardError("environment: changed the tokens of its conversation; write into its state alone.")
                room = self.seq - len(episode.prompt.ids) - len(episode.tokens) - len(ids)
                if not ids or room < 1:
                    if ids:
                        notice(
                            f"rl: a conversation ended after {counted(episode.policy_turns, 'turn')}, where a reply of "
                            f"{counted(len(ids), 'token')} leaves no room in seq, {self.seq:,}; give a larger seq, or fewer "
                            f"max_new_tokens.",
                            key="rl: a conversation without room",
                        )
                    ended.append(episode)
                    continue
                if wrong := next((token for token in ids if not 0 <= token < vocabulary), None):
                    raise RewardError(f"environment: returned the token {wrong}, wanted 0 to {vocabulary - 1}.")
                episode.add_reply(messages, ids)
                rollout.extend(sequence, ids, min(self.new, room))

        def text_of(key: tuple[int, int]) -> str | None:
            """Return a turn's text. Those that ended together are decoded together: the GPU may wait for the last ones."""
            nonlocal decoded
            if self.tokenizer is None:
                return None
            if key not in texts:
                new = rollout.finished[decoded:]
                decoded += len(new)
                decode = self.tokenizer.decode_batch([one.tokens for one in new], skip_special=True)
                texts.update(((one.prompt, one.sample), text) for one, text in zip(new, decode))
            return texts.pop(key)

        rollout.each_launch = listen
        try:
            for sequence in rollout:
                key = sequence.prompt, sequence.sample
                episode = running.setdefault(key, Episode(asked[sequence.prompt], *key))
                episode.add_turn(sequence, text_of(key))
                observed += 1
                if self._pool is not None and episode.policy_turns < self.turns:
                    pending += 1
                    self._pool.apply_async(self._ask, (sequence, episode, replies.put))
                else:
                    ended.append(episode)
                listen()
                while ended:
                    yield ended.pop(0)
        finally:
            rollout.close()

    def _ask(self, sequence: Any, episode: Episode, put: Callable[[Any], None]) -> None:
        """Put (sequence, episode, the environment's messages and their tokens, or what it raised)."""
        assert self.environment is not None
        try:
            reply = self.environment(episode)
            put((sequence, episode, ([], []) if reply is None else self._written(episode, reply)))
        except BaseException as error:  # SystemExit, too, which would end the thread in silence
            put((sequence, episode, error))

    def _written(self, episode: Episode, reply: Any) -> tuple[list[dict[str, Any]], list[int]]:
        """Return a reply as messages, and the tokens that follow the conversation's, up to the policy's next turn."""
        tokenizer, text = self.tokenizer, episode.prompt.text
        if hasattr(reply, "tolist"):
            reply = reply.tolist()
        if isinstance(reply, Mapping):
            reply = [reply]
        if isinstance(reply, Sequence) and reply and all(type(token) is int for token in reply):
            return [{"role": "environment", "content": list(reply)}], list(reply)
        messages = [{"role": "user", "content": reply}] if isinstance(reply, str) and reply else reply
        if (
            not messages
            or not isinstance(messages, Sequence)
            or not all(isinstance(m, Mapping) and "role" in m for m in messages)
        ):
            raise RewardError(f"environment: returned {shown(reply)}, wanted {WANTED}.")
        if tokenizer is None:
            raise RewardError(
                f"environment: returned {shown(reply)}, and there is no tokenizer; pass one, or return token ids."
            )
        if text is None or isinstance(text, str):
            if not isinstance(reply, str):
                raise RewardError(
                    f"environment: returned {shown(reply)} to a prompt that is no chat, wanted a text or token ids."
                )
            return list(messages), tokenizer.inner.encode(reply, add_special_tokens=False).ids
        messages = json.loads(json.dumps(messages, default=str))  # they are rendered, shown and saved
        mark = token_hex(16)
        chat = [*text, {"role": "assistant", "content": mark}, *messages]
        _, separator, after = tokenizer.render(chat, prompt=True).rpartition(mark)
        if not separator:
            raise RewardError("environment: the chat template does not write the assistant's turns as they are; use another.")
        ids = tokenizer.inner.encode(after, add_special_tokens=False).ids
        if episode.finish == "stop" and ids[:1] == episode.tokens[-1:]:  # the policy itself ended its turn
            del ids[0]
        return messages, ids


@dataclass(frozen=True)
class PythonTool:
    """Run the turn's last fenced block of Python, and reply with what it printed. A turn without code ends the conversation.

    The code runs in a process with limits (rewards.py), for up to `seconds`, with up to `memory` bytes.
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
        if "tests" not in episode.columns:
            raise RewardError("environment: retry_tests needs 'tests', and a prompt's row has none; add it to each row.")
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
