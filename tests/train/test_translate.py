"""Configs of axolotl, TRL, LLaMA-Factory and torchtune, those of the folder configs/, as recipes."""

from pathlib import Path

import pytest
import yaml

from gpubound.cli import main
from gpubound.cli.train_options import OPTIONS, from_file
from gpubound.train.translate import translate

FOLDER = Path(__file__).parent / "configs"
AXOLOTL, TRL, LLAMAFACTORY, TORCHTUNE = (
    (FOLDER / f"{name}.yaml").read_text() for name in ("axolotl", "trl", "llamafactory", "torchtune")
)
RECIPES = yaml.safe_load((FOLDER / "recipes.yaml").read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_of_another_tool(name):
    found = translate(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), OPTIONS)
    assert found.values == RECIPES[name]["values"]
    assert [line.partition(":")[0] for line in found.missing] == RECIPES[name]["missing"]


@pytest.mark.parametrize(
    "text",
    [AXOLOTL.replace("adapter: qlora", "").replace("load_in_4bit: true", ""), TRL.replace("use_peft: true", "use_peft: false")],
)
def test_adapters_that_are_off_are_left_out(text):
    found = translate(yaml.safe_load(text), OPTIONS)
    assert "lora" not in found.values and any("lora_r" in line for line in found.left_out)


@pytest.mark.parametrize(
    "changes, ours, missing",
    [
        ({"finetuning_type": "full", "stage": "dpo", "pref_loss": "ipo"}, {
            "objective": "dpo", "objective_options": {"loss": "ipo"}, "lora": None, "pack": "pairs"}, 2),
        ({"lora_target": "q_proj, v_proj", "quantization_bit": 4}, {"lora": {
            "rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"], "base": "nf4"}}, 2),
        ({"stage": "ppo", "template": "qwen"}, {"chat_template": None}, 4),
    ],
)  # fmt: skip
def test_stages_of_llamafactory(changes, ours, missing):
    found = translate(yaml.safe_load(LLAMAFACTORY) | changes, OPTIONS)
    assert {key: found.values.get(key) for key in ours} == ours and len(found.missing) == missing


def test_what_is_done_here_anyway_is_no_loss():
    data = {"path": "a.jsonl", "type": "chat_template", "roles_to_train": ["assistant"], "roles": {"user": ["user"]}}
    found = translate({"base_model": "m", "datasets": [data | {"train_on_eos": "turn"}]}, OPTIONS)
    assert not found.missing and sum("datasets" in line for line in found.left_out) == 3
    found = translate({"base_model": "m", "datasets": [data | {"train_on_eos": "all"}]}, OPTIONS)
    assert found.missing == ["datasets: train_on_eos: 'all'"]


def test_evaluations_of_trl_have_data():
    of = {"model_name_or_path": "m", "eval_strategy": "steps", "eval_steps": 10}
    assert translate(of | {"dataset_name": "owner/name"}, OPTIONS).values["eval_data"] == "owner/name:test"
    found = translate(of | {"dataset_name": "chats.jsonl"}, OPTIONS)
    assert "eval_every" not in found.values and [line.partition(":")[0] for line in found.missing] == ["eval_strategy"]
    least = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "bnb_4bit_quant_type": "nf4"}
    for options in ({"min_lr_rate": 0.2}, {"min_lr": 2e-5}):
        found = translate({"model_name_or_path": "m"} | least | {"lr_scheduler_kwargs": options}, OPTIONS)
        assert found.values["final"] == pytest.approx(0.2) and not found.missing


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_printed_is_a_config(name, tmp_path, capsys):
    ours, missing = RECIPES[name].values()
    assert main(["train", "--from", str(FOLDER / f"{name}.yaml"), "--print"]) == 0
    printed = capsys.readouterr().out
    assert all(f"# not translated: {key}" in printed for key in missing)
    (tmp_path / "ours.yaml").write_text(printed)
    made = from_file(str(tmp_path / "ours.yaml")).recipe()
    assert made.model == ours["model"] and capsys.readouterr().err == ""


def test_what_is_no_config_of_another_tool(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("colour: red\n")
    for words in (["--from", str(tmp_path / "c.yaml")], ["--print"], ["x.yaml", "--from", str(tmp_path / "c.yaml")]):
        assert main(["train", *words]) == 2
        assert capsys.readouterr().err.startswith("gpubound train: ")


def test_a_refused_config_of_another_tool_names_from(capsys):
    assert main(["train", str(FOLDER / "axolotl.yaml")]) == 2
    assert f"gpubound train --from {FOLDER / 'axolotl.yaml'}" in capsys.readouterr().err


@pytest.mark.parametrize("tool, key, value", [
    (AXOLOTL, "special_tokens", 5), (AXOLOTL, "betas", "x"), (TRL, "dataset_name", 5), (LLAMAFACTORY, "template", []),
    (TORCHTUNE, "checkpointer", 5), (TORCHTUNE, "dataset", [1]),
])  # fmt: skip
def test_values_of_another_form(tool, key, value):
    with pytest.raises(ValueError, match=f"^from: {key}: got "):
        translate(yaml.safe_load(tool) | {key: value}, OPTIONS)
    assert translate({"base_model": "m", "datasets": [5]}, OPTIONS).missing[0].startswith("datasets: 5, which is no path")
