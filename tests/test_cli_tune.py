"""`gpubound tune`: what it searches for a model, how a plan wins, what is kept, and how the library takes it up."""

import json
import os

import pytest
import torch

from gpubound import cli, device, measure, models
from gpubound.cli import env, tune
from gpubound.device import Chip
from gpubound.kernels import plans
from gpubound.kernels.plans import Job, searched
from gpubound.kernels.plans.kinds import RowPlan, TilePlan
from gpubound.models.llama.decoder import PRESETS
from tests.messages import message

CPU = torch.device("cpu")
H200 = Chip(90, 232_448, 132, "NVIDIA H200")
ADA = Chip(89, 101_376, 128, "NVIDIA GeForce RTX 4090")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache of the user's, and nothing settled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "_settled", {})
    monkeypatch.setattr(tune, "TOKENS", 3)
    monkeypatch.setattr(tune, "SEQUENCE", 3)
    monkeypatch.setattr(tune, "LOSS_ROWS", 2)
    return tmp_path


def test_every_width_of_a_model_is_searched():
    """tiny: hidden 64, MLP 128, 4 heads over 2, 256 words."""
    jobs = [job for work in tune.works(PRESETS["tiny"], torch.float32, CPU) for job in tune.jobs_of(work)]
    assert [job[:3] for job in jobs] == [
        ("rms_norm", "forward", (64, 0)),
        ("rms_norm", "backward", (64, 1)),
        ("add_rms_norm", "forward", (64, 0)),
        ("add_rms_norm", "backward", (64, 1)),
        ("rope", "", (8, 4)),
        ("rope", "", (8, 4)),
        ("gated", "forward", (128,)),
        ("gated", "backward", (128,)),
        ("losses", "forward", (256,)),
        ("losses", "backward", (256,)),
        ("product", "qkv", (128, 64, 64, 32, 32)),
        ("product", "add", (64, 64, 64)),
        ("product", "gate_up", (128, 64, 128)),
        ("product", "add", (64, 128, 64)),
    ]


def test_products_of_a_few_rows_together_are_searched_where_a_decoder_has_them():
    jobs = [job for work in tune.works(PRESETS["tiny"], torch.bfloat16, CPU) for job in tune.jobs_of(work)]
    assert [job[:3] for job in jobs[14:]] == [
        ("tiled_product", "normed", (128, 64, 8)),
        ("tiled_product", "", (64, 64, 8)),
        ("tiled_product", "normed", (256, 64, 8)),
        ("tiled_product", "", (64, 128, 8)),
    ]


@pytest.mark.parametrize("gpu", [H200, ADA], ids=lambda gpu: gpu.name)
def test_candidates_fit_their_gpu(gpu):
    for op, way, shape, size in (
        ("rms_norm", "forward", (4096, 0), 2),
        ("add_rms_norm", "backward", (4096, 1), 4),
        ("group_norm", "forward", (32, 64), 2),
        ("rope", "", (64, 32), 2),
        ("gated", "backward", (14336,), 2),
        ("losses", "forward", (128256,), 2),
        ("quantize", "plain", (4096, 4096), 2),
        ("product", "qkv", (6144, 4096, 4096, 1024, 1024), 2),
        ("packed_product", "int4 add", (4096, 14336, 1792), 4),
        ("decode_attention", "", (4, 64, 8, 2), 2),
        ("tiled_product", "normed", (1536, 1024, 8), 2),
        ("tiled_product", "", (1024, 4096, 16), 2),
    ):
        job = Job(op, way, shape, size, gpu)
        found = plans.candidates(job)
        assert 3 <= len(found) == len(set(found)), job
        assert all(plans.fits(job, plan) for plan in found)


def search(monkeypatch, seconds, wrong=()):
    """A search for a norm of width 64 where each plan takes the given time, and some give a wrong result."""
    job = Job("rms_norm", "forward", (64, 0), 4, device.INTERPRETED)
    x = torch.randn(2, 64)

    def work(_):
        plan = plans.plan_for(job)
        if plan.rows == 8:
            raise RuntimeError("out of resource")
        return x + (plan in wrong)

    def timed(work, **_):
        work.run(None)
        return measure.Timing.of([seconds[plans_of(work)]] * 5, "given")

    def plans_of(work):
        with_plan = []
        monkeypatch.setattr(plans, "trying", lambda job, plan: with_plan.append(plan) or trying(job, plan))
        work.run(None)
        monkeypatch.setattr(plans, "trying", trying)
        return with_plan[0]

    trying = plans.trying
    monkeypatch.setattr(tune, "candidates", lambda job: [*seconds, RowPlan(8, 0, 1)])
    monkeypatch.setattr(measure, "time", timed)
    monkeypatch.setattr(
        measure,
        "compare",
        lambda works, **_: measure.compare_samples({name: [seconds[plans_of(w)]] * 20 for name, w in works.items()}),
    )
    today = plans.plan_for(job)
    return today, tune.search(job, measure.Prepared(lambda: None, work), CPU, 60)


def test_the_fastest_right_plan_wins(monkeypatch, capsys):
    slow, fast, broken = RowPlan(2, 0, 1), RowPlan(4, 0, 1), RowPlan(1, 0, 2)
    today, found = search(monkeypatch, {slow: 10e-6, fast: 5e-6, broken: 1e-6}, wrong=(broken,))
    assert today == slow and found.plan == fast and found.won and found.tried == 3
    assert found.line() == message("cli_tune:the_fastest_right_plan_w")
    assert message("cli_tune:the_fastest_right_plan_w.2").within(capsys.readouterr().err)
    assert not plans.TRIED


def test_within_the_noise_nothing_wins(monkeypatch):
    slow, fast = RowPlan(2, 0, 1), RowPlan(4, 0, 1)
    _, found = search(monkeypatch, {slow: 5.05e-6, fast: 5e-6})
    assert not found.won and found.line().endswith("stays as it is")


ROW = {"op": "gated", "way": "forward", "shape": [], "bytes": 2, "plan": [1024, 4, ""], "us": 1.0, "today_us": 2.0}


def test_what_is_kept_is_taken_on_that_gpu_alone(home):
    path = searched.keep(H200.name, [ROW])
    assert path == home / "gpubound" / "plans-nvidia-h200.json"
    job = Job("gated", "forward", (64,), 2, H200)
    assert plans.plan_for(job) == TilePlan(1024, 4)
    assert plans.plan_for(job._replace(chip=ADA)) == TilePlan(512, 2)
    assert plans.plan_for(job._replace(bytes=4)) == TilePlan(512, 2)  # searched in 16 bits


def test_a_kept_plan_that_does_not_fit_is_passed_over():
    row = {"op": "add_rms_norm", "way": "backward", "shape": [4096], "bytes": 4, "plan": [4, 1, 8, 4, ""]}
    searched.keep(ADA.name, [ROW | row])
    job = Job("add_rms_norm", "backward", (4096, 1), 4, ADA)
    assert plans.fits(job, plans.plan_for(job)) and plans.plan_for(job).stages == 1


def test_a_later_search_replaces_an_earlier_one():
    searched.keep(H200.name, [ROW, ROW | {"way": "backward"}])
    path = searched.keep(H200.name, [ROW | {"plan": [2048, 4, ""]}])
    assert [row["plan"] for row in json.loads(path.read_text())["plans"]] == [[2048, 4, ""], [1024, 4, ""]]


NESTED = json.dumps({"plans": [ROW | {"shape": [[1]]}]})


@pytest.mark.parametrize("text", ["", "[]", '{"plans": [{"op": "gated"}]}', '{"plans": [{"op": "none", "plan": []}]}', NESTED])
def test_a_damaged_file_is_told_and_left(text, home, capsys):
    path = searched.file_of(f"GPU {len(text)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert searched.rows_in(path) == []
    assert message("cli_tune:a_damaged_file_is_told_a").within(capsys.readouterr().err)


def test_where_nothing_can_be_kept_nothing_is_searched(tmp_path, capsys, monkeypatch):
    models.save_hf(models.Decoder(PRESETS["tiny"]), tmp_path / "model")
    monkeypatch.setattr(tune, "resolve", lambda spec: torch.device("cuda", 0))
    monkeypatch.setattr(tune, "chip", lambda device: H200)
    monkeypatch.setattr(tune, "search_all", lambda *_: pytest.fail("minutes were spent"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.main(["tune", str(tmp_path / "model")]) == 2
    assert message("cli_tune:where_nothing_can_be_kep", tmp_path / "file" / "gpubound").within(capsys.readouterr().err)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it gives where there is no home
    assert plans.plan_for(Job("gated", "forward", (64,), 2, H200)) == TilePlan(512, 2), "the library's own"
    assert cli.main(["tune", str(tmp_path / "model")]) == 2
    assert message("cli_tune:where_nothing_can_be_kep.2").within(capsys.readouterr().err)


def test_without_a_gpu_the_command_says_so(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    models.save_hf(models.Decoder(PRESETS["tiny"]), tmp_path / "model")
    monkeypatch.setattr(tune, "resolve", lambda spec: CPU)
    assert cli.main(["tune", str(tmp_path / "model")]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == message("cli_tune:without_a_gpu_the_comman")


def test_what_the_command_prints_and_keeps(tmp_path, capsys, monkeypatch):
    models.save_hf(models.Decoder(PRESETS["tiny"]), tmp_path / "model")
    job = Job("gated", "forward", (128,), 4, H200)
    found = [
        tune.Found(job, TilePlan(1024, 4), 9, 12.0, 10.0, True),
        tune.Found(job._replace(way="backward"), TilePlan(512, 2), 9, 12.0, 12.0, False),
    ]
    monkeypatch.setattr(tune, "resolve", lambda spec: torch.device("cuda", 0))
    monkeypatch.setattr(tune, "chip", lambda device: H200)
    monkeypatch.setattr(tune, "search_all", lambda config, dtype, device, seconds: found)
    assert cli.main(["tune", str(tmp_path / "model")]) == 0
    path = searched.file_of(H200.name)
    assert capsys.readouterr().out.splitlines() == [
        message("cli_tune:what_the_command_prints"),
        message("cli_tune:what_the_command_prints.2"),
        message("cli_tune:what_the_command_prints.3", path),
    ]
    assert searched.rows_in(path)[0]["plan"] == [1024, 4, ""]


def test_env_lists_them(capsys, monkeypatch):
    searched.keep(H200.name, [ROW, ROW | {"way": "backward"}])
    gpu = measure.limits.Gpu(0, H200.name, "9.0", 140 << 30, 60 << 20, 132)
    told = {"asked": "auto", "device": "cpu", "name": "CPU", "why": "asked for", "gpus": [vars(gpu) | {"test": "passes"}]}
    monkeypatch.setattr(env, "verdict", lambda spec: dict(told))
    monkeypatch.setattr(env, "_ceilings_table", lambda figures: "")
    monkeypatch.setattr(env.measure, "ceilings", lambda device, refresh: type("None_", (), {"as_dict": lambda self: {}})())
    assert cli.main(["env"]) == 0
    assert "tuned plans" in (said := capsys.readouterr().out) and message("cli_tune:env_lists_them").within(
        " ".join(said.split())
    )
