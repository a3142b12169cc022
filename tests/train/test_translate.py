"""Configs of axolotl, TRL, LLaMA-Factory and torchtune, as recipes."""

import pytest
import yaml

from gpubound.cli import main
from gpubound.cli.train_options import OPTIONS, from_file
from gpubound.train.translate import translate

AXOLOTL = """
base_model: models/llama
model_type: AutoModelForCausalLM
load_in_4bit: true
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: conversations
val_set_size: 0.1
output_dir: outputs/lora
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
evals_per_epoch: 4
special_tokens: {pad_token: "<pad>"}
"""
TRL = """
model_name_or_path: models/qwen
torch_dtype: bfloat16
dataset_name: trl-lib/Capybara
dataset_test_split: test
eval_strategy: steps
eval_steps: 100
learning_rate: 2.0e-4
max_steps: 500
use_peft: true
lora_r: 32
per_device_train_batch_size: 2
output_dir: out
report_to: wandb
push_to_hub: true
"""
DPO = """
model_name_or_path: models/qwen
dataset_name: pairs.jsonl
beta: 0.2
loss_type: ipo
max_prompt_length: 512
output_dir: out
"""
LLAMAFACTORY = """
model_name_or_path: models/llama
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: chats
template: llama3
cutoff_len: 2048
max_samples: 1000
output_dir: saves/lora
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
plot_loss: true
"""
TORCHTUNE = """
output_dir: /tmp/lora
model_dir: models/llama
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 64
  lora_alpha: 128
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: "${model_dir}"}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}
seed: null
shuffle: true
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
epochs: 1
max_steps_per_epoch: 50
clip_grad_norm: null
compile: true
device: cuda
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: lora}
"""
CASES = {
    "axolotl": (
        AXOLOTL,
        {
            "model": "models/llama", "data": ["chats.jsonl"], "format": "sharegpt", "validation": 0.1, "out": "outputs/lora",
            "lora": {"rank": 16, "alpha": 32, "base": "nf4", "targets": "all-linear"}, "seq": 2048, "pack": "examples",
            "accumulate": 4, "micro_batch": 2, "epochs": 4, "optimizer": "adamw8bit", "schedule": "cosine", "final": 0.0,
            "lr": "2e-4", "train_on": "assistant", "precision": "auto", "recompute": "blocks", "warmup": 10, "clip": 1.0,
            "weight_decay": 0.0, "betas": [0.9, 0.999], "evals_per_epoch": 4,
        },
        [],
    ),
    "trl": (
        TRL,
        {
            "model": "models/qwen", "precision": "bf16", "data": "trl-lib/Capybara", "eval_data": "trl-lib/Capybara:test",
            "eval_every": 100, "lr": 2e-4, "steps": 500, "lora": {"rank": 32, "alpha": 32, "dropout": 0.05}, "micro_batch": 2,
            "out": "out", "log": "wandb", "schedule": "linear", "final": 0.0, "warmup": 0, "weight_decay": 0.0, "clip": 1.0,
            "betas": [0.9, 0.999], "seq": 1024, "pack": "none",
        },
        ["push_to_hub"],
    ),
    "dpo": (
        DPO,
        {
            "model": "models/qwen", "data": "pairs.jsonl", "objective": "dpo", "lr": 1e-6, "epochs": 3, "micro_batch": 16,
            "objective_options": {"beta": 0.2, "loss": "ipo"}, "out": "out", "schedule": "linear", "final": 0.0, "warmup": 0,
            "weight_decay": 0.0, "clip": 1.0, "betas": [0.9, 0.999], "seq": 1024, "validation": 0, "pack": "pairs",
        },
        ["max_prompt_length"],
    ),
    "llamafactory": (
        LLAMAFACTORY,
        {
            "model": "models/llama", "lora": {"rank": 8, "alpha": 16, "targets": "all-linear"}, "data": ["chats"], "seq": 2048,
            "chat_template": "llama3", "out": "saves/lora", "micro_batch": 1, "accumulate": 8, "lr": 1e-4, "epochs": 3.0,
            "schedule": "cosine", "final": 0.0, "warmup": 0.1, "precision": "bf16", "weight_decay": 0.0, "clip": 1.0,
            "betas": [0.9, 0.999], "validation": 0, "pack": "none",
        },
        ["dataset", "max_samples"],
    ),
    "torchtune": (
        TORCHTUNE,
        {
            "out": "/tmp/lora", "model": "models/llama", "seq": 4096, "data": "yahma/alpaca-cleaned", "format": "alpaca",
            "lora": {"rank": 64, "alpha": 128, "targets": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
            "pack": "examples", "micro_batch": 4, "optimizer": "adamw", "lr": "3e-4", "weight_decay": 0.01, "epochs": 1,
            "schedule": "cosine", "final": 0.0, "warmup": 100, "clip": None, "betas": [0.9, 0.999], "precision": "bf16",
            "log": "wandb", "validation": 0,
        },
        ["max_steps_per_epoch", "model_dir"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("text, ours, missing", CASES.values(), ids=CASES)
def test_a_config_of_another_tool(text, ours, missing):
    found = translate(yaml.safe_load(text), OPTIONS)
    assert found.values == ours
    assert [line.partition(":")[0] for line in found.missing] == missing


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


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_a_config(name, tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(CASES[name][0])
    assert main(["train", "--from", str(tmp_path / "theirs.yaml"), "--print"]) == 0
    printed = capsys.readouterr().out
    assert all(f"# not translated: {key}" in printed for key in CASES[name][2])
    (tmp_path / "ours.yaml").write_text(printed)
    made = from_file(str(tmp_path / "ours.yaml")).recipe()
    assert made.model == CASES[name][1]["model"] and capsys.readouterr().err == ""


def test_what_is_no_config_of_another_tool(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("colour: red\n")
    for words in (["--from", str(tmp_path / "c.yaml")], ["--print"], ["x.yaml", "--from", str(tmp_path / "c.yaml")]):
        assert main(["train", *words]) == 2
        assert capsys.readouterr().err.startswith("gpubound train: ")


def test_a_refused_config_of_another_tool_names_from(tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    assert main(["train", str(tmp_path / "theirs.yaml")]) == 2
    assert f"gpubound train --from {tmp_path / 'theirs.yaml'}" in capsys.readouterr().err


@pytest.mark.parametrize("tool, key, value", [
    (AXOLOTL, "special_tokens", 5), (AXOLOTL, "betas", "x"), (TRL, "dataset_name", 5), (LLAMAFACTORY, "template", []),
    (TORCHTUNE, "checkpointer", 5), (TORCHTUNE, "dataset", [1]),
])  # fmt: skip
def test_values_of_another_form(tool, key, value):
    with pytest.raises(ValueError, match=f"^from: {key}: got "):
        translate(yaml.safe_load(tool) | {key: value}, OPTIONS)
    assert translate({"base_model": "m", "datasets": [5]}, OPTIONS).missing[0].startswith("datasets: 5, which is no path")
