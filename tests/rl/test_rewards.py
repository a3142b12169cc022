"""Rewards that the library gives, how others are read, and code in a process with limits."""

import pytest
import tokenizers

from gpubound.data import Tokenizer
from gpubound.errors import DataError, RewardError
from gpubound.rl import Episode, ExactMatch, Regex, UnitTests, run_code
from gpubound.rl.rewards import AnswerGroup, RLPrompt, Scoring, means_of_parts, read_prompts, read_rewards, with_signal


def test_a_prompt_that_a_template_has_written_begins_once():
    """A tokenizer like Llama's begins each text with <s>; one that began with it had two, unlike the same text generated."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    inner.add_special_tokens(["<s>"])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(inner, "<s>")
    assert [prompt.ids for prompt in read_prompts(["a b", "<s> a b"], tokenizer)] == [[0, 1, 2]] * 2
    with pytest.raises(DataError, match="half a surrogate pair"):
        read_prompts(["\ud800"], tokenizer)


def test_exact_match_compares_all_of_an_answer_or_what_is_extracted():
    assert ExactMatch()(completions=[" 12\n", "12.", "x"], answer=[12, "12", "x"]) == [1, 0, 1]
    by_mark = ExactMatch(extract=r"#### *(\S+)")
    assert by_mark(completions=["#### 1, no: #### 12", "12", "####"], answer=[12, 12, 12]) == [1, 0, 0]


def test_regex_matches_the_whole_answer():
    assert Regex(r"<a>.*</a>")(completions=["<a>x\ny</a> ", "<a>x</a> and more"]) == [1, 0]
    assert Regex()(completions=["aa", "b"], pattern=["a+", "a+"]) == [1, 0]


def test_what_is_no_regular_expression_is_found_before_a_run():
    with pytest.raises(ValueError, match=r"exact_match: extract: got '\[', wanted a regular expression: "):
        read_rewards({"exact_match": {"extract": "["}})
    with pytest.raises(ValueError, match="regex: pattern: got 3, wanted a regular expression: "):
        read_rewards({"regex": {"pattern": 3}})


def test_unit_tests_run_the_last_block_of_code():
    good = "So:\n```python\ndef f(n):\n    return n + 1\n```\nThat is all."
    answers = [good, good.replace("+ 1", "+ 2"), "def f(n): return n + 1", "def f(n: return"]
    assert UnitTests()(completions=answers, tests=["assert f(1) == 2"] * 4) == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "0.5 seconds"),
        ("import time; time.sleep(60)", "0.5 seconds"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("open('file', 'wb').write(bytes(1 << 22))", ""),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("exit(0)\nassert False", "exit"),
        ("import os\nos._exit(0)\nassert False", "exit"),
        ("import sys\nwhile True: sys.stderr.write('x' * 4096)", "x"),
    ],
    ids=["computes", "sleeps", "memory", "disk", "exit code", "exit", "os._exit", "errors"],
)
@pytest.mark.slow
def test_code_meets_its_limits(code, words):
    passed, why, _ = run_code(code, seconds=0.5)
    assert not passed and words in why


@pytest.mark.slow
def test_an_answer_cannot_exit_before_its_tests():
    answers = [
        "def f(n): exit(0)",
        "import os\ndef f(n): os._exit(0)",
        "raise SystemExit",
        "def f(n): return n + 1",
        "def f(n): 3",
    ]
    case = "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(1), 2)\nunittest.main()"
    assert UnitTests()(completions=answers, tests=["assert f(1) == 2"] * 5) == [0, 0, 0, 1, 0]
    assert UnitTests()(completions=answers, tests=[case] * 5) == [0, 0, 0, 1, 0]


def test_code_that_ends_passes_without_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert run_code("import os; assert 'SECRET' not in os.environ; print(7)") == (True, "", "7")


def test_functions_are_named_and_weighted():
    def length(completions):
        return [0.0] * len(completions)

    assert [(f.name, f.weight) for f in read_rewards(length)] == [("length", 1.0)]
    functions = read_rewards({length: 0.1, "regex": {"pattern": "a", "weight": 2}, "exact_match": 1})
    assert [(f.name, f.weight) for f in functions] == [("length", 0.1), ("regex", 2.0), ("exact_match", 1.0)]
    assert functions[1].call == Regex("a") and read_rewards("regex")[0].call == Regex()


def test_numbers_may_be_those_of_numpy():
    import numpy as np

    from gpubound.rl.rewards import _call

    assert _call(lambda: np.ones(2, np.float32), {}) == _call(lambda: [np.float32(1), True], {}) == [1.0, 1.0]


def test_a_function_may_say_nothing_of_an_answer():
    def first(completion_ids):
        return [1.0, None, None]

    def second(completion_ids):
        return [4.0, 2.0, None if len(completion_ids[2]) else 3.0]

    def scored(last):
        group = AnswerGroup(RLPrompt(None, [1]), [Episode(None, 0, i, ids=ids) for i, ids in enumerate(([1], [2], last))])
        with Scoring(read_rewards({first: 1.0, second: 0.5})) as scoring:
            scoring.submit(group)
            scoring.collect()
        return group

    group = scored([])
    assert group.rewards == [3.0, 1.0, 1.5] and means_of_parts([group]) == {"first": 1.0, "second": 3.0}
    with pytest.raises(RewardError, match="no function gave a number"):
        scored([1])


def test_a_function_that_changes_its_lists_changes_nothing_for_others():
    def empties(completions, completion_ids, prompts):
        return [
            ids.clear() or one.clear() or prompt.clear() or 0.0
            for ids, one, prompt in zip(completion_ids, completions, prompts)
        ]

    def counts(completions, completion_ids, prompts):
        return [float(len(ids) + len(one) + len(prompt)) for ids, one, prompt in zip(completion_ids, completions, prompts)]

    group = AnswerGroup(RLPrompt(None, [1, 2, 3]), [Episode(None, 0, i, ids=[4, 5]) for i in range(2)])
    for functions in ([empties, counts], [counts]):
        with Scoring(read_rewards(functions)) as scoring:
            scoring.submit(group)
            scoring.collect()
        assert group.rewards == [7.0, 7.0]


def test_single_answers_are_compared_with_those_to_other_prompts():
    groups = [AnswerGroup(RLPrompt(None, [1]), rewards=rewards) for rewards in ([1.0], [1.0], [2.0], [1.0, 1.0], [1.0, 2.0])]
    assert with_signal(groups[:2]) == [] and with_signal(groups[:3]) == groups[:3] and with_signal(groups[3:]) == groups[4:]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([], "function"),
        ("exact_mach", "exact_match"),
        ({"exact": 1}, "exact_match"),
        ({"exact_match": "much"}, "weight"),
        ({"regex": {"patern": "a"}}, "pattern"),
        ([len, len], "twice"),
    ],
)
def test_what_is_no_reward_is_refused(rewards, words):
    with pytest.raises(ValueError, match=words):
        read_rewards(rewards)
