"""`gpubound bench finetune`: every contender reads the same rows, and a dry run has a line for each."""

import numpy as np
import pytest

from benchmarks import bench_finetune
from benchmarks.finetune_worker import CONTENDERS, rows, tokenizer
from gpubound.cli import guarded


def test_each_contender_is_known():
    cases = {**bench_finetune.CASES, **bench_finetune.TINY}.values()
    assert {who for case in cases for who in case.micro} == set(CONTENDERS)
    assert all(set(case.gates) <= set(case.micro) for case in cases)


def test_rows_have_the_lengths_of_chats():
    job = bench_finetune.TINY["tiny-sft"].job("ours", "cpu")
    texts, encoder = rows(job, pairs=False), tokenizer(job)
    sizes = np.array([len(encoder(row["text"]).input_ids) for row in texts[:200]])
    assert sizes.max() <= job.seq and 4 < sizes.mean() < 9  # 400 of 4,096
    pair = rows(job, pairs=True)[0]
    assert pair.keys() == {"prompt", "chosen", "rejected"} and pair["chosen"] != pair["rejected"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_dry_run(capsys):
    pytest.importorskip("trl")
    assert guarded("bench", bench_finetune.main, ["--dry", "--peers", "trl-plain,trl-dpo-plain"]) == 0
    out = capsys.readouterr().out
    assert "trl-plain" in out and "trl-dpo-plain" in out
