"""TRL's trainers: with a placed model they train as with the model itself, and our DPO gives their losses and weights."""

import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import gpubound as gb
from gpubound.train.objectives.divergence import DistillationLoss
from gpubound.train.objectives.preference import Preference

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")  # theirs
Dataset = pytest.importorskip("datasets").Dataset
trl = pytest.importorskip("trl")

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefgh "]
SETTINGS = {
    "per_device_train_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0,
    "max_grad_norm": 0, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "optim": "adamw_torch",
    "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of two layers and its tokenizer: the trainers load their reference by its name."""
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 1, "vocab_size": len(WORDS), "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64, **special)).save_pretrained(path)
    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(path)
    return path


def load(folder) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def texts(*keys: str):
    draw = random.Random(0)
    return Dataset.from_list(
        [{key: "".join(draw.choices("abcdefgh ", k=draw.randint(3, 9))) for key in keys} for _ in range(40)]
    )


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["SFT", "DPO"])
def test_a_placed_model_trains_as_the_model_itself(method, folder, tmp_path):
    data = texts("prompt", "completion") if method == "SFT" else texts("prompt", "chosen", "rejected")
    runs, weights = [], []
    for placed in (False, True):
        model = load(folder)
        if placed:
            assert gb.place(model, "cpu").verified
        args = getattr(trl, f"{method}Config")(output_dir=str(tmp_path), max_steps=5, **SETTINGS)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        runs.append(losses(getattr(trl, f"{method}Trainer")(model, args=args, train_dataset=data, processing_class=tokenizer)))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert len(runs[0]) == 5 and runs[1] == pytest.approx(runs[0], rel=1e-4)
    for got, want in zip(*reversed(weights)):
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_gives_their_losses_and_weights(loss, folder, tmp_path):
    theirs, seen = load(folder), []
    args = trl.DPOConfig(output_dir=str(tmp_path), max_steps=20, beta=0.2, loss_type=loss, **SETTINGS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    data = texts("prompt", "chosen", "rejected")
    trainer = trl.DPOTrainer(theirs, args=args, train_dataset=data, processing_class=tokenizer)
    compute = trainer.compute_loss

    def recorded(model, inputs, *more, **options):
        seen.append({name: inputs[name].clone() for name in ("input_ids", "attention_mask", "completion_mask")})
        return compute(model, inputs, *more, **options)

    trainer.compute_loss = recorded
    wanted = losses(trainer)
    ours, base = load(folder), load(folder)
    reference = Preference()
    step = gb.TrainStep(
        ours,
        Preference(beta=0.2, loss=loss),
        gb.AdamW(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999)),
        precision="fp32",
        graph="off",
    )
    for batch, want in zip(seen, wanted, strict=True):
        rows = len(batch["input_ids"])
        order = torch.arange(rows).view(2, rows // 2).t().flatten()  # theirs: all chosen answers, then all rejected ones
        ids, attention, answer = (batch[name][order] for name in ("input_ids", "attention_mask", "completion_mask"))
        labels = torch.where(answer[:, 1:].bool(), ids[:, 1:], -100)
        given = {"input_ids": ids[:, :-1], "labels": labels, "attention_mask": attention[:, :-1]}
        given["reference"] = reference.reference_values(base, given)
        assert step([given]).read().loss == pytest.approx(want, rel=1e-5)
    for got, want in zip(ours.parameters(), theirs.parameters()):
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_distillation_gives_the_loss_of_gkd():
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    g = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(2, 5, 37, generator=g) for _ in range(2))
    labels = torch.randint(37, (2, 5), generator=g)
    labels[:, :2] = -100
    for beta, temperature in ((0.0, 1.0), (0.5, 1.0), (0.3, 2.0), (1.0, 0.7)):
        want = trainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=temperature, reduction="sum")
        formula = DistillationLoss(beta=beta, temperature=temperature)
        got = formula.mixed(student.flatten(0, 1), teacher.flatten(0, 1), labels.flatten()).sum()
        assert got.item() == pytest.approx(want.item() * temperature**2, rel=1e-5)  # TRL leaves τ² out
