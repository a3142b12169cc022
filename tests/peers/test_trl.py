"""TRL's trainers: with a placed model they train as with the model itself, and our DPO gives their losses and weights."""

import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import gpubound as gb
from gpubound.data import train_tokenizer
from gpubound.data.tokenizer import Tokenizer as OurTokenizer
from gpubound.rl.trl import rollout_func
from gpubound.train.objectives.chunked_head import DistillationLoss
from gpubound.train.objectives.policy import Policy
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


CHAT = [
    {"role": role, "content": text}
    for number in "123"
    for role, text in (("user", f"what is {number}?"), ("assistant", f"it is {number}"))
]
OF_PARTS = ("idefics", "llava", "smolvlm")  # images and texts
SHIPPED = [f for f in sorted(Path(trl.__file__).parent.glob("chat_templates/*.jinja")) if not f.name.startswith(OF_PARTS)]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_rows_of_the_families_templates_hold_their_prompts(file, tmp_path):
    """The package has the models' own templates, and some with marks around the answers, which transformers reads."""
    inner = train_tokenizer(["what is it? it is 1"], 270).inner
    inner.add_special_tokens(["</s>", "<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer = OurTokenizer(inner, "</s>", file.read_text(), bos_token="<s>")
    chats = [CHAT[:2], CHAT[:4], CHAT]
    corpus = gb.Corpus.build(chats, tokenizer, tmp_path / "corpus", progress=False)
    (batch,) = corpus.batches(corpus.tokens, 1, "cpu", pack="examples", fields=("input_ids", "labels", "segment_ids"))
    ids, labels, segments = (values[0] for values in batch.values())
    for number in range(3):
        inside = segments == number
        example, learnt = tokenizer.decode(ids[inside]), labels[inside]
        (chat,) = (chat for chat in chats if example.count("it is") == len(chat) // 2)
        chats.remove(chat)
        assert tokenizer.render(chat).startswith(example) and example.count("what is") == len(chat) // 2
        learnt = tokenizer.decode(learnt[learnt >= 0])
        assert [f"it is {n}" in learnt for n in "123"] == [n < len(chat) // 2 for n in range(3)] and "what" not in learnt
    if "{% generation" in file.read_text() or "{%- generation" in file.read_text():
        tokenizer.save(tmp_path / "tokenizer")
        theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        want = theirs.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
        ((ids, mask),) = tokenizer.encode_chats([CHAT])
        assert ids == want["input_ids"] and mask.tolist() == want["assistant_masks"]


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


TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"packing": True}, {"assistant_only_loss": True}, {"packing": True, "assistant_only_loss": True}], ids="-".join
)
def test_a_placed_model_trains_on_packed_rows_and_on_answers_alone(settings, folder, tmp_path):
    """Packed examples are one row whose positions restart, and the placed model keeps them apart as transformers does."""
    data, runs = texts("prompt", "completion"), []
    if "assistant_only_loss" in settings:
        data = data.map(lambda row: {"messages": [
            {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]},
            remove_columns=["prompt", "completion"])  # fmt: skip
    for placed in (False, True):
        model, tokenizer, seen = load(folder), PreTrainedTokenizerFast.from_pretrained(folder), []
        tokenizer.chat_template = TEMPLATE
        if placed:
            assert gb.place(model, "cpu").verified
        args = trl.SFTConfig(output_dir=str(tmp_path), max_steps=4, max_length=24, **SETTINGS, **settings)
        trainer = trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
        compute = trainer.compute_loss

        def recorded(model, inputs, *more, seen=seen, compute=compute, **options):
            seen.append(inputs)
            return compute(model, inputs, *more, **options)

        trainer.compute_loss = recorded
        runs.append(losses(trainer))
        for batch in seen:
            if "packing" in settings:
                assert (batch["position_ids"] == 0).sum() > 4 and "attention_mask" not in batch
            if "assistant_only_loss" in settings:
                tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
                assert 0 < (batch["labels"] != -100).sum() < tokens - 12
    assert len(runs[0]) == 4 and runs[1] == pytest.approx(runs[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_training_gives_their_losses_and_weights(packing, folder, tmp_path):
    """20 steps on the trainer's batches: padded, or one row of examples whose positions restart."""
    theirs, seen = load(folder), []
    args = trl.SFTConfig(output_dir=str(tmp_path), max_steps=20, packing=packing, max_length=32, **SETTINGS)
    tokenizer, data = PreTrainedTokenizerFast.from_pretrained(folder), texts("prompt", "completion")
    trainer = trl.SFTTrainer(theirs, args=args, train_dataset=data, processing_class=tokenizer)
    compute = trainer.compute_loss

    def recorded(model, inputs, *more, **options):
        seen.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute(model, inputs, *more, **options)

    trainer.compute_loss = recorded
    wanted = losses(trainer)
    ours = load(folder)
    gb.place(ours, "cpu")
    adamw = gb.AdamW(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999))
    step = gb.TrainStep(ours, "next_token", adamw, precision="fp32", graph="off")
    for batch, want in zip(seen, wanted, strict=True):
        given = {"input_ids": batch["input_ids"][:, :-1], "labels": batch["labels"][:, 1:].contiguous()}
        if packing:
            positions = batch["position_ids"][:, :-1]
            begins = (positions[0] == 0).nonzero().flatten()
            bounds = torch.cat([begins, begins.new_tensor([positions.shape[1]])]).int()
            given |= {"position_ids": positions, "segment_ids": (positions == 0).cumsum(1) - 1, "cu_seqlens": bounds}
        assert step([given]).read().loss == pytest.approx(want, rel=1e-5)
    for got, want in zip(ours.parameters(), theirs.parameters()):
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "kto"])
def test_preferences_give_their_losses_and_weights(loss, folder, tmp_path):
    """20 steps on the trainer's batches. KTOTrainer's are single pairs: it takes its mean over other prompts' answers else."""
    theirs, seen, data = load(folder), [], texts("prompt", "chosen", "rejected")
    settings = {"output_dir": str(tmp_path), "max_steps": 20, "beta": 0.2, "loss_type": loss, **SETTINGS}
    if loss == "kto":
        settings |= {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
        data = Dataset.from_list(
            [{"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"} for row in data
             for key in ("chosen", "rejected")]
        )  # fmt: skip
    config, make = (trl.KTOConfig, trl.KTOTrainer) if loss == "kto" else (trl.DPOConfig, trl.DPOTrainer)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    trainer = make(theirs, args=config(**settings), train_dataset=data, processing_class=tokenizer)
    compute = trainer.compute_loss

    def recorded(model, inputs, *more, **options):
        seen.append({name: inputs[name].clone() for name in ("input_ids", "attention_mask", "completion_mask")})
        return compute(model, inputs, *more, **options)

    trainer.compute_loss = recorded
    wanted = losses(trainer)
    ours, base = load(folder), load(folder)
    reference, adamw = Preference(), gb.AdamW(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999))
    step = gb.TrainStep(ours, Preference(beta=0.2, loss=loss), adamw, precision="fp32", graph="off")
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
        got = formula.losses(student.flatten(0, 1), teacher.flatten(0, 1), labels.flatten())[0].sum()
        assert got.item() == pytest.approx(want.item() * temperature**2, rel=1e-5)  # TRL leaves τ² out


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_policy_gives_the_loss_and_gradients_of_grpo(variant, folder):
    """Both with the log-probabilities of one model: theirs are computed here, as their fused head wants a GPU."""
    model, g = load(folder), torch.Generator().manual_seed(0)
    prompt, answer = torch.randint(3, 12, (4, 5), generator=g), torch.randint(3, 12, (4, 7), generator=g)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [1]])).int()
    ids = torch.cat([prompt, answer], 1)

    def scores(*_, **__):
        logs = model(ids).logits[:, 4:-1].log_softmax(-1)
        return logs.gather(-1, answer.unsqueeze(-1)).squeeze(-1), -(logs.exp() * logs).sum(-1), None

    near = scores()[0].detach()
    old, sampler, reference = (near + 0.3 * torch.randn(near.shape, generator=g) for _ in range(3))
    advantages, preset = torch.tensor([1.0, -0.5, -2.0, 0.7]), Policy(variant, max_tokens=16)
    theirs = SimpleNamespace(
        _get_per_token_logps_and_entropies=scores, loss_type="grpo" if variant == "gspo" else variant, beta=0.1,
        importance_sampling_level="sequence" if variant == "gspo" else "token", epsilon_low=preset.clip,
        epsilon_high=preset.clip_high, use_vllm=True, vllm_importance_sampling_correction=True, max_completion_length=16,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=variant == "dapo", entropy_coef=0.02,
        use_adaptive_entropy=False, aux_loss_enabled=False, current_gradient_accumulation_steps=1, model=model.train(),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
    )  # fmt: skip
    inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": answer, "completion_mask": mask}
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference}
    inputs |= {"importance_sampling_ratio": (old - sampler).exp().clamp(max=2.0), "num_items_in_batch": mask.sum()}
    want = trl.GRPOTrainer._compute_loss(theirs, model, inputs)
    want.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def whole(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(4, 4), values], 1)

    labels = torch.cat([torch.full((4, 4), -100), torch.where(mask.bool(), answer, -100)], 1)
    given = {"input_ids": ids[:, :-1], "labels": labels, "advantages": advantages, "old_logprobs": whole(old)}
    given |= {"sampler_logprobs": whole(sampler), "reference_logprobs": whole(reference)}
    ours = Policy(variant, kl=0.1, entropy=0.02 if variant == "dapo" else 0.0, max_tokens=16)
    total, items = ours(model, given)
    assert (total / items).item() == pytest.approx(want.item(), rel=1e-5)
    (total / items).backward()
    for got, p in zip(gradients, model.parameters()):
        assert (got - p.grad).norm() <= 1e-4 * p.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_grpo_samples_from_the_weights_that_it_trains(adapters, folder, tmp_path):
    """Each completion's log-probabilities are those of the trainer's weights at that step, and samples of a prompt differ."""
    model, calls = load(folder), []
    settings = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)} if adapters else {}
    sample = rollout_func(max_batch=3)

    def checked(prompts, trainer):
        result = sample(prompts, trainer)
        ids, completions = result["prompt_ids"], result["completion_ids"]
        assert ids == [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        for prompt, completion, logprobs in zip(ids, completions, result["logprobs"], strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
            want = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
            assert torch.allclose(torch.tensor(logprobs), want, atol=1e-4)
        assert len({tuple(one) for one in completions}) > 2
        calls.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        return result

    args = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=3, num_generations=4, max_completion_length=6, temperature=0.8,
        **SETTINGS | {"learning_rate": 1e-2},
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    trainer = trl.GRPOTrainer(
        model, lambda completions, **_: [float(one.count("a")) for one in completions], args=args,
        train_dataset=texts("prompt"), processing_class=tokenizer, rollout_func=checked, **settings,
    )  # fmt: skip
    trainer.train()
    assert len(calls) == 3 and any(not torch.equal(old, new) for old, new in zip(calls[0], calls[-1]))
