"""Print a commented config for gpubound train or rl: sft, lora, dpo, distill, classify, embed, pretrain or rl.

gpubound init lora > config.yaml
gpubound train config.yaml
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional

from . import arguments

CHATS = """\
data: chats.jsonl             # {"messages": [...]}, {"prompt": ..., "completion": ...}, Alpaca, ShareGPT; also .json, .parquet,
                              # a folder, a dataset of the hub as owner/name, or several:
                              # [{path: chats.jsonl, weight: 2}, more.jsonl]
# eval_data: eval.jsonl       # held-out losses are of these; without it a fraction of data is held out:
validation: 0.05
"""
ROWS = """\
# seq: 2048                   # tokens in a row; without it 512, more for longer examples, fewer for a small set
# micro_batch: 4              # rows that the model computes at once; without it as many as hold 4,096 tokens
accumulate: 1                 # micro-batches in a step, of all GPUs together
pack: auto                    # whole examples, several a row, which do not see each other; none: one a row, padded
overlong: truncate            # what happens to examples longer than a row; or truncate_left, drop
"""
LEARNT = """\
train_on: assistant           # or last (the last answer), all
# chat_template: chatml       # for a model without one: a file, chatml, llama3, gemma, mistral, zephyr, alpaca
"""
RATES = """\
schedule: cosine              # or linear, wsd, constant
warmup: 0.03                  # a fraction of the steps, or their number
"""
BY_EPOCH = """\
evals_per_epoch: 2            # held-out losses an epoch (or eval_every: 100, in steps); the best weights are kept and exported
# patience: 3                 # stop after this many held-out losses without a better one
saves_per_epoch: 2            # checkpoints an epoch (or save_every: 100); --resume goes on from the newest
"""
BY_STEPS = """\
eval_every: 100               # steps between two held-out losses; the best weights are kept and exported
# patience: 3                 # stop after this many held-out losses without a better one
save_every: 100               # steps between two checkpoints; --resume goes on from the newest
"""
KEPT = """\
# recompute: blocks           # less memory, a third more work
seed: 0
# log: wandb                  # or tensorboard, trackio
"""
MODEL = """\
model: path/to/model          # a Hugging Face folder: config.json, *.safetensors, tokenizer.json
"""
ADAPTERS = """\
lora:
  rank: 16
  alpha: 32
  dropout: 0.0
  targets: all-linear         # or a list of layers: [q_proj, v_proj]
  # base: nf4                 # the frozen weights in 4 bits; int8 or fp8 in 8
"""
ALL_WEIGHTS = f"""\
{ROWS}
epochs: 3                     # or steps: 1000
lr: 2e-5
{RATES}clip: 1.0                     # the largest gradient norm

{BY_EPOCH}{KEPT}"""

CONFIGS = {
    "sft": f"""\
# Fine-tune all weights of a model:  gpubound train config.yaml --export hf
out: runs/sft                 # checkpoints, the corpus, the report
{MODEL}
{CHATS}{LEARNT}
{ROWS}
epochs: 3                     # or steps: 1000
lr: 2e-5
{RATES}weight_decay: 0.0
clip: 1.0                     # the largest gradient norm
precision: auto               # bf16 on a GPU that has units for it, else fp32

{BY_EPOCH}{KEPT}""",
    "lora": f"""\
# Train low-rank adapters over a frozen model:  gpubound train config.yaml --export hf
# hf in out then holds the adapters in PEFT's layout; with --merge, the whole model.
out: runs/lora                # checkpoints, the corpus, the report
{MODEL}
{ADAPTERS}
{CHATS}{LEARNT}
{ROWS}
epochs: 3                     # or steps: 1000
lr: 2e-4
{RATES}
{BY_EPOCH}{KEPT}""",
    "dpo": f"""\
# Preference optimisation (DPO) of adapters; the frozen model is the reference:  gpubound train config.yaml --export hf
out: runs/dpo                 # checkpoints, the corpus, the report
{MODEL}
{ADAPTERS}
data: preferences.jsonl       # {{"prompt": ..., "chosen": ..., "rejected": ...}}: texts or messages
# eval_data: eval.jsonl
validation: 0.05
objective: dpo
objective_options:
  beta: 0.1                   # how strongly the reference holds
  loss: sigmoid               # DPO; or ipo, hinge, kto

# seq: 1024                   # tokens of a prompt and its answer; without it 512, more for longer ones
# micro_batch: 8              # rows that the model computes at once, two a pair; without it as many as hold 4,096 tokens
accumulate: 2                 # micro-batches in a step, of all GPUs together
# pack: pairs                 # one answer a row, padded; without it several whole pairs a row, of twice seq tokens
overlong: truncate_left       # what happens to longer ones; or truncate, drop
# buckets: 4                  # of pack pairs: rows of so many lengths, which leave the least padding

epochs: 1                     # or steps: 1000
lr: 5e-6
{RATES}
{BY_EPOCH}{KEPT}""",
    "distill": f"""\
# Distil a larger model into a smaller one of the same tokenizer:  gpubound train config.yaml --export hf
out: runs/distill             # checkpoints, the corpus, the report
{MODEL}
{CHATS}{LEARNT}
objective: distillation
objective_options:
  teacher: path/to/teacher    # a Hugging Face folder, which is not trained
  alpha: 0.5                  # the share of the teacher's distribution in the loss; the rest is the data's cross-entropy
  temperature: 2.0            # above 1, the teacher's less likely tokens count more
  beta: 0.0                   # KL(teacher || student); 1 is the reverse, 0.5 Jensen-Shannon

{ALL_WEIGHTS}""",
    "classify": f"""\
# Train a classifier of texts, exported for AutoModelForSequenceClassification:  gpubound train config.yaml --export hf
out: runs/classify            # checkpoints, the corpus, the report
{MODEL}
data: reviews.jsonl           # {{"text": ..., "label": "positive"}}: a class by its name, or by its number from 0
# eval_data: eval.jsonl
validation: 0.05
objective: classification
objective_options:
  classes: [negative, positive]   # their names, or how many there are

{ALL_WEIGHTS}""",
    "embed": f"""\
# Train embeddings that are close for texts that match:  gpubound train config.yaml --export hf
out: runs/embed               # checkpoints, the corpus, the report
{MODEL}
data: matches.jsonl           # {{"query": ..., "positive": ...}}, and perhaps "negative", a text or a list of them
# eval_data: eval.jsonl
validation: 0.05
objective: contrastive
objective_options:
  temperature: 0.05
  pooling: last               # what represents a text: the state of its last token, or the mean of all
  # negatives: 1              # texts in the "negative" of each row
  # chunk: 32                 # rows that are embedded at once: a larger micro_batch takes no more memory

# seq: 256                    # tokens of a text; without it those of the longest, at most 512
micro_batch: 64               # rows, two a match: the positives of its other matches are a query's negatives
accumulate: 1                 # micro-batches in a step, of all GPUs together
overlong: truncate_left       # what happens to longer ones; or truncate, drop
# buckets: 4                  # rows of so many lengths, which leave the least padding

epochs: 1                     # or steps: 1000
lr: 2e-5
{RATES}clip: 1.0                     # the largest gradient norm

{BY_EPOCH}{KEPT}""",
    "pretrain": f"""\
# Train a model from random weights, or a Hugging Face folder further, on texts:  gpubound train config.yaml --export hf
out: runs/pretrain            # checkpoints, the corpus, the report
model: 10m                    # a preset of gpubound train --list, or a Hugging Face folder
data: texts/                  # plain text, source code, jsonl, parquet, a folder of them, or a dataset of the hub as owner/name
# tokenizer: path/to/tokenizer.json   # without one a byte-level BPE is trained on the data:
vocabulary: 8192
validation: 0.02              # of the documents

seq: 512                      # tokens in a row
pack: stream                  # texts end to end; documents: each alone, which does not see the others of its row
micro_batch: 8                # rows that the model computes at once
accumulate: 1                 # micro-batches in a step, of all GPUs together

steps: 2000                   # or epochs: 1
optimizer: adamw              # or muon, adamw8bit
lr: 3e-3
schedule: wsd                 # or cosine, linear, constant
warmup: 0.02                  # a fraction of the steps, or their number
weight_decay: 0.1
clip: 1.0                     # the largest gradient norm
precision: auto               # bf16 on a GPU that has units for it, else fp32

{BY_STEPS}{KEPT}""",
}

CONFIGS["rl"] = """\
# Reinforcement learning from rewards of the answers that a model samples:  gpubound rl config.yaml --export hf
out: runs/rl                  # records, samples to read, checkpoints, the report
model: path/to/model          # a Hugging Face folder: config.json, *.safetensors, tokenizer.json
# lora: {rank: 16, alpha: 32} # adapters over the frozen model, which is then the reference of kl
prompts: prompts.jsonl        # {"prompt": a text, or messages of a chat, "answer": ...}; other keys go to the rewards
# eval_prompts: eval.jsonl    # held-out prompts, one answer each
rewards:                      # functions and their weights
  exact_match: 1.0            # against "answer"; {extract: '#### *(.+)'} compares what the last match holds
  # regex: {weight: 0.1, pattern: '<think>.*</think>.*'}
  # unit_tests: {seconds: 5}  # code against "tests", in a process with limits
  # rewards.py:brevity: 0.1   # a function of yours: (completions, **columns) -> a number for each

steps: 200
prompts_per_step: 16
samples: 8                    # answers to a prompt, which are compared with each other
max_new_tokens: 128
temperature: 1.0
# dynamic: true               # other prompts in place of those whose answers all have one reward
variant: grpo                 # or reinforce, dr_grpo, dapo, gspo
kl: 0.0                       # of the divergence from the model that the run began with
entropy: 0.0
# passes: 2                   # updates on the answers of a step
# overlap: true               # sample the next answers while gradients are computed: they are one update old
# environment: python_tool    # what replies to the policy; also retry_tests, or file.py:function of yours
# turns: 4                    # with an environment: the most turns of the policy, and seq, the most tokens in all

lr: 1e-6                      # for adapters 2e-5
schedule: constant            # or linear, cosine, wsd
clip: 1.0                     # the largest gradient norm
# micro_batch: 8              # rows of row_tokens that the model computes at once

eval_every: 20                # steps; the best weights are kept and exported
save_every: 20
seed: 0
# log: wandb                  # or tensorboard, trackio
"""


@dataclass
class InitOptions:
    """Print a commented config for gpubound train, or gpubound rl.

    sft       all weights of a pretrained model, on chats or prompts with answers
    lora      low-rank adapters over a frozen model, on the same
    dpo       adapters, on pairs of a chosen and a rejected answer
    distill   all weights of a model, towards a teacher's distribution
    classify  all weights and a new head, on texts with classes
    embed     all weights, on texts that match, such as questions and answers
    pretrain  a model from random weights, on texts
    rl        a model, or adapters, from rewards of the answers that it samples

    Example: gpubound init lora > config.yaml
    """

    kind: Annotated[Literal["sft", "lora", "dpo", "distill", "classify", "embed", "pretrain", "rl"], Positional]
    """The kind of run."""


def main(argv: Sequence[str]) -> int:
    print(CONFIGS[arguments(InitOptions, argv, "init").kind], end="")
    return 0
