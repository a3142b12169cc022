"""A placed model in transformers' Trainer on two ranks: the losses, norms and weights of the same model as it is."""

import os

import pytest
import torch
from numpy.linalg import norm

from tests.distributed.processes import on_ranks

STEPS, WORDS = 3, 97


FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def all_runs(folder):
    """Plain and placed, under DistributedDataParallel and FSDP2, in the same processes: the imports take seconds."""
    import accelerate.state
    from transformers import Trainer  # noqa: F401

    from gpubound import device as facts

    facts.interpreted = lambda: False
    plain, replicas = trained(folder), trained(folder, place=True)
    shard_on_cpus(accelerate.state)
    return plain, replicas, trained(folder, place=True, fsdp=FSDP2)


def all_runs_on_gpus(folder):
    torch.cuda.set_device(own := f"cuda:{os.environ['LOCAL_RANK']}")
    return trained(folder, device=own), trained(folder, True, device=own), trained(folder, True, FSDP2, own)


def shard_on_cpus(state):
    """accelerate shards on GPUs alone: let it take these ranks for ranks of GPUs."""
    made = state.PartialState.__init__

    def init(self, *args, **options):
        made(self, *args, **options)
        self.distributed_type = state.DistributedType.MULTI_GPU

    state.PartialState.__init__ = init


def trained(folder, place=False, fsdp=None, device="cpu"):
    """The kind of wrapper, what each step reported, and the weights at the end."""
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import gpubound as gb
    from gpubound.place.candidates import Fused

    AcceleratorState._reset_state(True)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=True, **sizes))
    rows = torch.randint(WORDS, (4 * 2 * STEPS, 12), generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(len(rows)) % 9 + 3  # the ranks' shares of a step have different numbers of tokens
    labels = torch.where(torch.arange(12) < lengths[:, None], rows, -100)
    if place:
        gb.place(model, device=device)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    arguments = TrainingArguments(
        folder, use_cpu=device == "cpu", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], save_strategy="no", disable_tqdm=True,
        **({} if fsdp is None else {"fsdp": True, "fsdp_config": fsdp}),
    )  # fmt: skip
    data = [{"input_ids": row, "labels": own} for row, own in zip(rows, labels)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    steps = [(float(log["loss"]), float(log["grad_norm"])) for log in trainer.state.log_history if "loss" in log]
    weights = {name: getattr(w, "full_tensor", lambda w=w: w)().detach().cpu().numpy() for name, w in model.named_parameters()}
    fused = sum(isinstance(module, Fused) for module in model.modules()) if place else 0
    return type(trainer.model_wrapped).__name__, fused, steps, weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return of_ranks(all_runs, str(tmp_path_factory.mktemp("trainer")))


def of_ranks(work, folder):
    """What the first of two ranks has, which is what the other has."""
    first, second = on_ranks(2, work, folder)
    for (_, _, steps, weights), (_, _, others, other_weights) in zip(first, second):
        assert steps == others and all((w == other_weights[name]).all() for name, w in weights.items())
    return first


WRAPPERS = [(1, "DistributedDataParallel"), (2, "FSDPLlamaForCausalLM")]


@pytest.mark.parametrize(("at", "wrapper"), WRAPPERS, ids=["ddp", "fsdp2"])
def test_trainer_on_two_ranks_with_a_placed_model(runs, at, wrapper):
    check(runs[0], runs[at], wrapper)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_trainer_on_two_gpus_with_a_placed_model(tmp_path):
    pytest.importorskip("accelerate")
    plain, *placed = of_ranks(all_runs_on_gpus, str(tmp_path))
    for run, (_, wrapper) in zip(placed, WRAPPERS):
        check(plain, run, wrapper, 1e-4)


def check(plain, placed, wrapper, rtol=1e-5):
    (_, _, wanted, weights), (kind, fused, steps, found) = plain, placed
    assert kind == wrapper and fused >= 9 and len(wanted) == STEPS
    torch.testing.assert_close(steps, wanted, rtol=rtol, atol=rtol / 10)
    for name, weight in weights.items():  # Adam's first steps are ± the rate: a gradient of noise alone may go either way
        assert norm(found[name] - weight) <= 1e-3 * norm(weight), name
