"""rl.train: a policy learns a task; runs resume exactly; faults end with a sentence and lose nothing."""

import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time

import pytest
import torch

import gpubound as gb
from gpubound.errors import DataError, DeviceError, RewardError
from gpubound.graph.runner import LentMemory
from gpubound.rl import loop as home
from gpubound.rl.batches import advantages, micro_batches
from gpubound.rl.episodes import Episode
from gpubound.rl.loop import prepare, sample
from gpubound.rl.recipe import RLRecipe
from gpubound.rl.rewards import AnswerGroup, RLPrompt, Scoring, read_rewards
from gpubound.rl.run import RLRun, figures_of
from gpubound.train.checkpoint.files import Staging
from gpubound.train.loop import Stop
from gpubound.train.step import TrainStep

from ..processes import forking
from .policies import KEYS, NEW, PROMPTS, WANTED, WORDS, policy, sevens, train, wide_policy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["grpo", "reinforce", "dapo"])
def test_a_policy_learns_to_say_a_token(variant, tmp_path):
    run = train(tmp_path, steps=16, eval_prompts=[[1, 2], [8]], variant=variant)
    records = run.tape.steps()
    first, last = records[1], records[-1]
    assert records[0]["eval_reward"] < 0.4 and last["eval_reward"] > 0.9
    assert first["reward"] < 0.2 and last["reward"] > 0.8 and last["entropy"] < first["entropy"]
    assert run.decoder.generate([8], max_new_tokens=NEW, stop=()).sequences[0].tokens == [WANTED] * NEW
    assert max(record["largest_gap"] for record in records[1:]) < 1e-4, "sampler and trainer compute the same in fp32"
    shares = [sum(record[f"{phase}_share"] for phase in ("sample", "reward", "learn")) for record in records[1:]]
    assert shares == pytest.approx([1] * len(shares))
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == set(range(1, 17)) and rows[0]["finish"] == "length"
    page = (tmp_path / "report.html").read_text()
    assert "held-out reward" in page and "time in sampling" in page and "step 16" in page


@pytest.mark.slow
def test_a_policy_with_adapters_learns_against_its_base(tmp_path):
    model = policy()
    for p in model.parameters():  # far from uniform, so that the layers before the head matter
        p.data.mul_(4)
    gb.lora.add(model, rank=4)
    base = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    run = train(tmp_path, model=model, steps=10, kl=0.02, lr=5e-2)
    records = run.tape.steps()
    assert records[-1]["reward"] > records[0]["reward"] + 0.2
    assert max(record["largest_gap"] for record in records) < 1e-4, "the decoder follows the adapters"
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6) and records[-1]["kl"] > 0.01
    for before, now in zip(base, (p for p in model.parameters() if not p.requires_grad), strict=True):
        assert torch.equal(before, now)


def test_several_passes_are_clipped_and_a_reference_is_kept(tmp_path):
    run = train(tmp_path, steps=3, passes=3, kl=0.1, temperature=0.7)
    records = run.tape.steps()
    assert run.reference is not None
    assert records[0]["kl"] > 0, "the last pass is measured"
    assert max(record["clipped"] for record in records) > 0
    assert max(record["largest_gap"] for record in records) < 1e-4, "the gap is that of the batch's first pass"


@pytest.mark.slow
def test_a_resumed_run_repeats_what_would_have_come(tmp_path):
    whole = train(tmp_path / "whole", steps=6, save_every=3)
    train(tmp_path / "parts", steps=3)
    parts = train(tmp_path / "parts", steps=6, resume=True)
    for one, other in zip(whole.model.parameters(), parts.model.parameters()):
        assert torch.equal(one, other)
    same = ("reward", "grad_norm", "entropy")
    assert [[r[key] for key in same] for r in whole.tape.steps()] == [[r[key] for key in same] for r in parts.tape.steps()]
    with pytest.raises(ValueError, match="samples"):
        train(tmp_path / "parts", steps=8, samples=4, resume=True)


def interrupting():
    """Rewards that interrupt the run in their tenth call: in the third step, whose answers overlap the second's gradients."""
    calls = itertools.count(1)

    def rewards(completion_ids, **_):
        if next(calls) == 10:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return sevens(completion_ids)

    return rewards


@pytest.mark.slow
def test_ctrl_c_in_a_rollout_loses_nothing(tmp_path):
    run = train(tmp_path / "run", rewards=interrupting(), steps=5)
    assert run.stopped == "SIGINT" and run.done in (2, 3) and not run.finished
    assert f"step {run.done}" in run.tape.about["verdict"]
    run, whole = train(tmp_path / "run", steps=5, resume=True), train(tmp_path / "whole", steps=5)
    for one, other in zip(whole.model.parameters(), run.model.parameters()):
        assert torch.equal(one, other)


OVERLAP = {"overlap": True, "row_tokens": 20, "micro_batch": 2}


@pytest.mark.slow
def test_overlap_samples_from_the_weights_before_the_update(tmp_path):
    """Beside a loop of this test, which samples the next step's answers, and then takes the step in one call."""
    run = train(tmp_path / "run", steps=4, **OVERLAP)
    recipe = RLRecipe(**KEYS | OVERLAP | {"out": str(tmp_path / "other"), "steps": 4})
    other, stop = prepare(recipe, policy(), PROMPTS, None, sevens, None, None, False), Stop()
    with Scoring(other.rewards) as scoring:
        sampled, rewards = sample(other, scoring, stop), []
        for step in range(4):
            rewards.append(figures_of(sampled.every)["reward"])
            batches = micro_batches(sampled.groups, advantages(sampled.groups, recipe.scaled), other.shape, other.device)
            assert len(batches) > 1
            sampled = sample(other, scoring, stop, ahead=1) if step < 3 else None
            other.step(batches)
            other.done += 1
    other.step.close()
    assert [record["reward"] for record in run.tape.steps()] == rewards
    for one, same in zip(run.model.parameters(), other.model.parameters()):
        assert torch.equal(one, same)
    gaps = [record["largest_gap"] for record in run.tape.steps()]
    assert gaps[0] < 1e-4 and min(gaps[1:]) > 1e-2, "all answers but the first are one update old"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"row_tokens": 20, "micro_batch": 2, "passes": 2, "dynamic": True}])
def test_a_run_with_overlap_learns_and_resumes_exactly(shape, tmp_path):
    keys = {"overlap": True, "steps": 8} | shape
    whole = train(tmp_path / "whole", save_every=1, keep=9, **keys)
    assert whole.tape.steps()[-1]["reward"] > whole.tape.steps()[0]["reward"] + 0.1
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for path in (tmp_path / "part" / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 3:  # goes on from a checkpoint between two steps, which has answers in flight
            shutil.rmtree(path)
    run = train(tmp_path / "part", resume=True, **keys)
    assert all(torch.equal(one, other) for one, other in zip(whole.model.parameters(), run.model.parameters()))


@pytest.mark.slow
def test_ctrl_c_beside_a_step_with_overlap_loses_nothing(tmp_path):
    run = train(tmp_path / "run", rewards=interrupting(), steps=5, **OVERLAP)
    assert run.stopped == "SIGINT" and run.done in (1, 2)
    run, whole = train(tmp_path / "run", steps=5, resume=True, **OVERLAP), train(tmp_path / "whole", steps=5, **OVERLAP)
    assert all(torch.equal(one, other) for one, other in zip(whole.model.parameters(), run.model.parameters()))


@pytest.mark.slow
def test_exact_has_no_gap(tmp_path):
    keys = {"steps": 2, "exact": True, "precision": "bf16", "passes": 2, "temperature": 0.7, "kl": 0.1}
    assert [record["largest_gap"] for record in train(tmp_path, model=wide_policy(), **keys).tape.steps()] == [0, 0]


def test_where_a_run_is_exact_by_default():
    cuda, cpu, model, known = torch.device("cuda", 0), torch.device("cpu"), wide_policy(), {"precision": "bf16"}
    assert RLRecipe(**known).is_exact(model, cuda) and RLRecipe(**known, exact=True).is_exact(model, cpu)
    for keys in (known | {"exact": False}, known | {"cache": "int8"}, known | {"overlap": True}, {"precision": "fp32"}):
        assert not RLRecipe(**keys).is_exact(model, cuda)
    assert not RLRecipe(**known).is_exact(model, cpu) and not RLRecipe(**known).is_exact(torch.nn.Linear(2, 2), cuda)


def test_a_cache_of_8_bits_has_a_larger_gap(tmp_path):
    (record,) = train(tmp_path / "run", steps=1, cache="int8").tape.steps()
    assert 1e-5 < record["largest_gap"] < 1e-2
    with pytest.raises(ValueError, match="cache"):
        train(tmp_path / "refused", steps=1, cache="int8", exact=True)


def test_overlap_wants_the_importance(tmp_path):
    with pytest.raises(ValueError, match="truncate"):
        train(tmp_path, overlap=True, truncate=None)


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [False, True])
def test_on_a_gpu_steps_are_captured(adapters, tmp_path):
    torch.manual_seed(0)
    config = gb.DecoderConfig(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, vocabulary=64)
    model = gb.Decoder(config).cuda()
    if adapters:
        gb.lora.add(model.bfloat16(), rank=8)
    gb.place(model)
    keys = {"kl": 0.01, "lr": 2e-2} if adapters else {"lr": 2e-3}
    run = train(tmp_path, model=model, steps=20, graph="require", device="cuda", eval_prompts=[[1, 2], [8]], **keys)
    records = run.tape.steps()
    assert "captured as 2 graphs" in run.tape.about["verdict"] or "captured as 1 graph" in run.tape.about["verdict"]
    assert records[-1]["reward"] > records[1]["reward"] + 0.1
    assert max(record["largest_gap"] for record in records[1:]) == 0, "it is exact by default"


def learnt(run):
    """What a run's steps have sampled and learnt."""
    names = ("step", "reward", "eval_reward", "tokens", "policy_loss", "entropy", "gap", "largest_gap")
    return [{name: record[name] for name in names if name in record} for record in run.tape.steps()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, keys",
    [
        pytest.param(policy, {"graph": "require"}, marks=pytest.mark.slow),
        (policy, {"cache": "int8", "passes": 2}),
        pytest.param(wide_policy, {"exact": True}, marks=pytest.mark.slow),
    ],
)
def test_cache_and_step_share_memory(make, keys, tmp_path, monkeypatch):
    """On a CPU this saves nothing, but each step begins with an empty cache, too."""
    keys = {"steps": 3, "eval_prompts": [[1, 2], [8]], "eval_every": 2} | keys
    apart = train(tmp_path / "apart", model=make(), **keys)
    monkeypatch.setattr(home, "shares_memory", lambda recipe, step: True)
    lends, lend = [], LentMemory.lend
    monkeypatch.setattr(LentMemory, "lend", lambda memory: (lends.append(memory.lent), lend(memory)))
    decoder, sizes = gb.decoder, []
    built = lambda model, *args, **named: (  # noqa: E731
        sizes.append({p.main_grad.untyped_storage().nbytes() for p in model.parameters()}), decoder(model, *args, **named)
    )[1]  # fmt: skip
    monkeypatch.setattr(home.decode, "decoder", built)
    shared = train(tmp_path / "shared", model=make(), **keys)
    assert lends.count(False) == 3, "once a step, each time after a rollout"
    assert sizes == [{0}], "the sums have no memory while the decoder is built"
    for one, other in zip(learnt(shared), learnt(apart), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    shared, apart = (run.decoder.generate([[1, 2]], max_new_tokens=2) for run in (shared, apart))
    assert shared.tokens == apart.tokens


@pytest.mark.gpu
def test_on_a_gpu_the_cache_and_the_activations_share_memory(tmp_path, monkeypatch):
    """The rate moves no weight: backward adds in another order at every run, and the next step's tokens would depend on it."""
    keys = {"steps": 3, "prompts_per_step": 4, "samples": 64, "max_new_tokens": 8, "seq": 1024, "lr": 1e-30}
    runs, peaks = [], []
    for shares in (False, True):
        if not shares:
            monkeypatch.setattr(home, "shares_memory", lambda recipe, step: False)
        monkeypatch.setattr(home, "cache_pages", lambda *_: None)  # a cache that is larger than all that is learnt
        torch.manual_seed(0)
        config = gb.DecoderConfig(hidden=512, intermediate=2048, layers=4, heads=8, kv_heads=2, vocabulary=64)
        model = gb.Decoder(config).cuda()
        gb.place(model)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        run = train(tmp_path / str(shares), model=model, graph="require", device="cuda", eval_prompts=[[1], [8]], **keys)
        peaks.append(torch.cuda.max_memory_reserved() - before)
        runs.append(learnt(run))
        cache = run.decoder.body.cache_bytes()
        monkeypatch.undo()
        del model, run
    assert runs[0] == runs[1] and all(record["largest_gap"] == 0 for record in runs[1][1:])
    assert cache >= 1 << 29 and peaks[1] < peaks[0] - (1 << 28), (peaks, cache)


@pytest.mark.parametrize("long, whole", [(124, 3), (3, 1)])
def test_samples_share_a_prompts_pages_and_no_row_waits(long, whole, tmp_path):
    recipe = RLRecipe(out=str(tmp_path), **{**KEYS, "max_new_tokens": 8, "exact": True, "device": "cpu"})
    prompts = [[number % 60 + 1] * long for number in range(6)]
    run = prepare(recipe, wide_policy(), prompts, None, sevens, None, None, False)
    rows, cache = run.decoder.max_batch, run.decoder.body.cache
    assert rows == 32 and cache.layout.pages == (32 * 2 + 2 * 4 if long == 124 else rows * whole)
    rollout = run.decoder.rollout([prompt.ids for prompt in run.prompts], n=8, max_new_tokens=8, stop=())
    assert len(rollout.sequences) == 48 and rollout.row_steps <= 32 * 10 + 16 * 10
    run.close()


def test_checkpoints_are_copied_to_the_host(tmp_path, monkeypatch):
    taken, take = [], Staging.take
    monkeypatch.setattr(Staging, "take", lambda self, tensors, *where: (taken.append(where), take(self, tensors, *where))[1])
    train(tmp_path, steps=3, save_every=2)
    assert taken == [(True, False), (True, True)], "to_host, last"


@pytest.mark.gpu
def test_on_a_gpu_overlap_samples_and_learns_what_one_stream_does(tmp_path, monkeypatch):
    """The answers of the first two steps are sampled from the same weights: the second's while gradients are computed."""
    runs = []
    for name in ("two", "one"):
        torch.manual_seed(0)
        config = gb.DecoderConfig(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, vocabulary=64)
        model = gb.Decoder(config).cuda()
        gb.place(model)
        keys = OVERLAP | {"samples": 16, "lr": 1e-3, "graph": "require", "device": "cuda"}
        runs.append(train(tmp_path / name, model=model, steps=3, **keys).tape.steps())
        monkeypatch.setattr(RLRun, "add_concurrently", lambda run, batches: [run.step.add(batch) for batch in batches])
    for two, one in zip(*runs):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)
    assert [record["reward"] for record in runs[0][:2]] == [record["reward"] for record in runs[1][:2]]


def raises(completion_ids, **_):
    raise KeyError("answer")


def hangs(completion_ids, **_):
    time.sleep(3)


def exits(completion_ids, **_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (raises, r"KeyError: 'answer' \(test_loop.py:\d+\) for"),
        (exits, "SystemExit: 3"),
        (hangs, "0.2 seconds"),
        (lambda completion_ids: [float("nan")] * len(completion_ids), "nan"),
        (lambda completion_ids: [1.0], "1 number "),
        (lambda completion_ids: [1e39] * len(completion_ids), "fp32"),
        (lambda completion_ids: "good", "good"),
    ],
    ids=["raises", "exits", "hangs", "nan", "count", "large", "text"],
)
def test_a_reward_that_fails_is_named_and_the_steps_before_are_saved(reward, words, tmp_path):
    with pytest.raises(RewardError, match=words) as error:
        train(tmp_path / "run", rewards=reward, timeout=0.2 if reward is hangs else 60.0, steps=2)
    assert (tmp_path / "run" / "checkpoints" / "step-00000000").is_dir() and "--resume" in str(error.value)
    assert "\n" not in str(error.value)
    assert train(tmp_path / "run", steps=1, resume=True).done == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rollout", "step", "step with overlap"])
def test_out_of_memory_is_one_sentence_and_nothing_is_lost(part, tmp_path, monkeypatch):
    keys = {"steps": 3} | (OVERLAP if part == "step with overlap" else {})
    calls, (owner, name) = (
        [],
        {"rollout": (RLRun, "answers"), "step": (TrainStep, "__call__")}.get(part, (RLRun, "add_concurrently")),
    )
    plain = getattr(owner, name)

    def failing(*given, **named):
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("of the test")
        return plain(*given, **named)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(DeviceError, match="micro_batch") as error:
        train(tmp_path / "run", **keys)
    assert "\n" not in str(error.value) and "--resume" in str(error.value)
    run, whole = train(tmp_path / "run", resume=True, **keys), train(tmp_path / "whole", **keys)
    assert all(torch.equal(one, other) for one, other in zip(whole.model.parameters(), run.model.parameters()))


@pytest.mark.slow
def test_rewards_of_a_file_in_processes(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("import os\n\ndef process(completion_ids, **_):\n    return [float(os.getpid())] * len(completion_ids)\n")
    run = train(tmp_path / "run", rewards={f"{file}:process": 0.5}, steps=1, processes=True)
    seen = run.tape.steps()[0]["reward/process"]
    assert seen != os.getpid() and run.tape.steps()[0]["reward"] == seen / 2


@pytest.fixture
def forked(monkeypatch):
    """Processes of rewards have imported all: 1.2 s of CPU each."""
    context = forking()
    monkeypatch.setattr("gpubound.rl.rewards.multiprocessing.get_context", lambda _: context)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_reward_that_fails_in_a_process_is_named_with_its_line(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("import json\n\ndef parsed(completion_ids, **_):\n    return [json.loads('{') for _ in completion_ids]\n")
    with pytest.raises(RewardError, match=r"parsed: raised JSONDecodeError: .* \(rewards\.py:4\) for the answers to"):
        train(tmp_path / "run", rewards={f"{file}:parsed": 1.0}, steps=1, processes=True)


@pytest.mark.usefixtures("forked")
def test_a_reward_whose_process_ends_is_named_at_once(tmp_path, monkeypatch):
    file = tmp_path / "rewards.py"
    file.write_text("import os\n\ndef ends(completion_ids, **_):\n    os._exit(3)\n")
    with pytest.raises(RewardError, match="ends: its process ended with exit code 3"):
        train(tmp_path / "run", rewards={f"{file}:ends": 1.0}, steps=1, processes=True)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ValueError, match="put it under if __name__"):
        train(tmp_path / "run", processes=True)


def test_a_reward_that_no_process_can_be_sent_is_found_before_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"^rl: processes: <lambda> cannot be sent to a process \(.*\); define it in a file"):
        train(tmp_path / "run", rewards=lambda completion_ids: [1.0] * len(completion_ids), processes=True)
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def test_what_no_step_could_learn_is_refused_before_the_first(tmp_path):
    with pytest.raises(ValueError, match=r"prompts\[1\] holds the token 20, outside"):
        train(tmp_path, prompts=[[1], [WORDS]])
    with pytest.raises(ValueError, match=r"^eval_prompts: nowhere\.jsonl does not exist"):
        train(tmp_path, eval_prompts="nowhere.jsonl")
    with pytest.raises(ValueError, match="no other answer to compare with"):
        train(tmp_path, samples=1, prompts_per_step=1)
    with pytest.raises(ValueError, match="exact_match reads texts, and there is no tokenizer"):
        train(tmp_path, rewards="exact_match", prompts=[{"prompt": [1], "answer": 2}])


def test_a_run_of_another_model_or_other_prompts_is_told_so(tmp_path, capsys):
    train(tmp_path, steps=1)
    with pytest.raises(ValueError, match=r"the policy: .*embed.* has the shape \(64, 64\), and in .* \(20, 16\)"):
        train(tmp_path, model=wide_policy(), steps=2, resume=True)
    capsys.readouterr()
    train(tmp_path, prompts=PROMPTS[:3], steps=2, resume=True)
    assert "prompts: got others than the run had" in capsys.readouterr().err


def test_steps_without_a_signal_move_nothing_and_are_counted(tmp_path):
    model = policy()
    before = [p.detach().clone() for p in model.parameters()]
    run = train(tmp_path, model=model, rewards=lambda completion_ids: [1.0] * len(completion_ids), steps=3)
    assert [record["no_signal"] for record in run.tape.steps()] == [1, 1, 1]
    assert all("policy_loss" not in record for record in run.tape.steps())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters()))


def test_dynamic_sampling_draws_prompts_until_all_have_a_signal(tmp_path):
    def first_is_even(prompts, completion_ids):
        easy = prompts[0][0] == 1
        return [1.0 if easy else float(ids[0] % 2) for ids in completion_ids]

    run = train(tmp_path, rewards=first_is_even, steps=3, dynamic=True, rounds=4)
    records = run.tape.steps()
    assert all(0 < record["no_signal"] < 1 for record in records) and run.order.position > 12
    sampled = [round(record["tokens"] / (8 * NEW)) for record in records]  # prompts, four of them with a signal
    assert all(count * (1 - record["no_signal"]) == pytest.approx(4) for count, record in zip(sampled, records))


def test_prompts_that_leave_no_room_are_counted_or_refused(tmp_path, capsys):
    run = train(tmp_path / "some", prompts=[*PROMPTS, [1] * 30], seq=12, steps=1)
    assert len(run.prompts) == 4
    with pytest.raises(ValueError, match="seq"):
        train(tmp_path / "none", prompts=[[1] * 30], seq=12, steps=1)
    with pytest.raises(ValueError, match="'answer', and prompts\\[1\\]"):
        rows = [{"prompt": [1], "answer": 1}, {"prompt": [2], "number": 1}]
        train(tmp_path / "columns", prompts=rows, rewards={"exact_match": 1.0}, steps=1)
    with pytest.raises(ValueError, match="tokenizer"):
        train(tmp_path / "texts", prompts=["a text"], steps=1)


def test_answers_are_scored_while_others_are_sampled():
    """A complete group's functions run before `collect` asks for them."""
    started = []

    def noting(completion_ids):
        started.append(len(completion_ids))
        return [0.0] * len(completion_ids)

    prompt = RLPrompt(None, [1])
    with Scoring(read_rewards(noting)) as scoring:
        group = AnswerGroup(prompt, [Episode(prompt, 0, sample, ids=[1], finish="stop") for sample in range(2)])
        scoring.submit(group)
        deadline = time.monotonic() + 5
        while not started and time.monotonic() < deadline:
            time.sleep(0.001)
        assert started == [2] and not group.rewards
        scoring.collect()
    assert group.rewards == [0.0, 0.0]


@pytest.mark.slow
def test_the_loss_is_that_of_the_answers_whatever_the_rows(tmp_path):
    """Rows of other shapes hold the same answers, and give the same updates up to rounding."""
    runs = [
        train(tmp_path / str(number), steps=2, **shape)
        for number, shape in enumerate(
            ({}, {"row_tokens": 20, "micro_batch": 3}, {"row_tokens": 10, "micro_batch": 1}, {"pack": False})
        )
    ]
    for run in runs[1:]:
        got, want = (each.tape.steps()[0] for each in (run, runs[0]))
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
        assert got["reward"] == want["reward"]


@pytest.mark.slow
def test_a_reward_that_fails_in_an_evaluation_loses_no_step(tmp_path):
    def known(prompts, completion_ids):
        return [1.0 if prompts[0] != [2] else float("nan")] * len(completion_ids)

    def held_out_once(prompts, completion_ids, seen=[]):  # noqa: B006  # the second evaluation fails
        seen.extend(prompts[:1] if prompts[0] == [2] else [])
        return known(prompts, completion_ids) if len(seen) > 1 else sevens(completion_ids)

    keys = {"eval_prompts": [[2]], "eval_every": 2, "steps": 3}
    with pytest.raises(RewardError, match="nan") as error:
        train(tmp_path / "run", rewards=held_out_once, **keys)
    assert "--resume" in str(error.value)
    run = train(tmp_path / "run", rewards=sevens, resume=True, **keys)
    whole = train(tmp_path / "whole", rewards=sevens, **keys)
    assert [record["step"] for record in run.tape.steps()] == [0, 1, 2, 3]
    assert all(torch.equal(one, other) for one, other in zip(run.model.parameters(), whole.model.parameters()))


def test_a_resumed_run_keeps_the_answers_of_each_step_once(tmp_path):
    whole = train(tmp_path, steps=2, save_every=1)
    samples = tmp_path / "samples.jsonl"
    before = samples.read_text()
    samples.write_text(before + before.splitlines()[-1].replace('"step": 2', '"step": 3') + '\n{"step": 3, "pro')
    assert whole.done == 2 and train(tmp_path, steps=2, resume=True).done == 2
    assert samples.read_text() == before


def test_several_processes_are_refused(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="2 processes"):
        train(tmp_path)


def test_a_key_that_there_is_not_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"'smaples'.*'samples'"):
        train(tmp_path, smaples=4)
    with pytest.raises(ValueError, match="lora: got a policy that is a module"):
        train(tmp_path, lora={"rank": 2})


def test_prompts_that_are_no_text_are_named_by_their_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": [1]}\n\xff\xfe{}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:2"):
        train(tmp_path / "run", prompts=str(path))
