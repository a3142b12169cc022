"""The recipe of a reinforcement learning run: every option in one place. It is read before torch is imported."""

from dataclasses import dataclass, field, fields
from typing import Any

from ..train.fields import Lora, check_type
from ..train.recipe import Recipe

ADVANTAGES = ("auto", "scaled", "centred")
TRAINING = (
    "out", "model", "lora", "tokenizer", "chat_template", "optimizer", "lr", "schedule", "warmup", "final", "weight_decay",
    "betas", "clip", "precision", "graph", "recompute", "device", "seed", "keep",
)  # fmt: skip
"""Keys that mean what they mean in a Recipe."""
LEAST = {
    "steps": 1, "prompts_per_step": 1, "samples": 1, "max_new_tokens": 1, "passes": 1, "rounds": 1, "rollout_rows": 1,
    "turns": 1,    "eval_every": 0, "save_every": 0, "micro_batch": 1, "row_tokens": 1, "seq": 2,
}  # fmt: skip
LR, LR_ADAPTERS = 1e-6, 2e-5


@dataclass(frozen=True)
class RLRecipe:
    """All options of a run, besides the policy, its prompts and its rewards where these are Python objects."""

    out: str = "runs/rl"
    """Folder of the run: records, samples, checkpoints, report."""
    model: str | None = None
    """The policy: a Hugging Face folder."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Train low-rank adapters over the frozen model, as in gpubound train. Only in a config file."""
    prompts: str | None = None
    """A .jsonl file: {"prompt": a text, or messages of a chat, ...}. The other keys of a row go to the rewards."""
    eval_prompts: str | None = None
    """Held-out prompts, in the same form."""
    rewards: dict[str, Any] = field(default_factory=dict)
    """Reward functions with their weights: exact_match, regex, unit_tests, or file.py:function. Only in a config file."""
    environment: str | None = None
    """What replies to the policy, in conversations of several turns: python_tool, retry_tests, or file.py:function."""
    turns: int = 1
    """With an environment: the most turns of the policy in a conversation."""
    processes: bool = False
    """Compute rewards in processes instead of threads: functions that compute in Python do not hold the sampling up."""
    timeout: float = 60.0
    """Seconds that a reward function may take for the answers to one prompt, and an environment for a reply."""
    tokenizer: str | None = None
    """A tokenizer.json or a folder with one; without it the model folder's own."""
    chat_template: str | None = None
    """How chats are written, instead of the tokenizer's template: a file, or chatml, llama3, gemma, mistral, zephyr, alpaca."""
    stop: tuple[str, ...] = ()
    """Tokens that end an answer, besides the model's own end of text and end of turn."""
    steps: int = 100
    """Steps: each samples, learns, and is recorded."""
    prompts_per_step: int = 16
    """Prompts of a step."""
    samples: int = 8
    """Answers to each prompt; their rewards are compared with each other."""
    max_new_tokens: int = 128
    """The most tokens of an answer, in conversations of a turn."""
    temperature: float = 1.0
    """Of the sampling, and of the distribution that is learnt."""
    seq: int | None = None
    """Tokens of a prompt with its answer, or with all of a conversation; longer prompts are left out. By default as many as the
    longest prompt needs; with an environment there is no default."""
    rollout_rows: int = 256
    """Answers that are sampled at once; the keys and values of so many stay in memory."""
    cache: str | None = None
    """Keep keys and values of the sampling in 8 bits, int8 or fp8: half the memory, and log-probabilities farther apart."""
    exact: bool | None = None
    """Sampler and trainer compute the same log-probabilities, bit for bit, by kernels that are slower. By default in 16 bits on
    a GPU, where the model has these kernels, and neither cache nor overlap is given."""
    dynamic: bool = False
    """Sample further prompts in place of those whose answers all have one reward, from which nothing is learnt."""
    rounds: int = 3
    """With --dynamic: how often at most."""
    passes: int = 1
    """Updates on the answers of a step; those after the first are off-policy, by a ratio that is clipped."""
    overlap: bool = False
    """Sample the answers of the next step while this one's gradients are computed, on two streams: they are one update old."""
    variant: str = "grpo"
    """The loss: reinforce, grpo, dr_grpo, dapo or gspo."""
    advantages: str = "auto"
    """A reward less the mean of its prompt's: centred, or also scaled by their standard deviation; auto: the variant's."""
    ratio_clip: float | None = None
    """How far below 1 the ratio may fall; by default the variant's."""
    ratio_clip_high: float | None = None
    """How far above 1 the ratio may rise; by default the variant's."""
    kl: float = 0.0
    """Coefficient of the divergence from the model that the run began with."""
    entropy: float = 0.0
    """Coefficient of the entropy, which the loss rewards."""
    truncate: float | None = 2.0
    """The largest importance of a token that the sampler found less likely than the trainer does; none: no such weight."""
    pack: bool = True
    """Learn several answers a row, which do not see each other. False: one a row, for models that cannot keep them apart."""
    row_tokens: int | None = None
    """Tokens of a row that is learnt, which holds several answers; by default as many of seq as fit into 2,048, or one."""
    micro_batch: int | None = None
    """Rows that the model computes at once; by default as many as hold 8,192 tokens."""
    optimizer: str = "adamw"
    """adamw, adamw8bit or muon."""
    lr: float | None = None
    """The highest learning rate. By default 1e-6, for adapters 2e-5."""
    schedule: str = "constant"
    """constant, linear, cosine or wsd."""
    warmup: float = 0.0
    """Updates in which the rate rises from 0; a number below 1 is a fraction of all updates."""
    final: float = 0.1
    """The learning rate at the end, as a fraction of lr, where the schedule falls."""
    weight_decay: float = 0.0
    """Weight decay of the matrices."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the moments."""
    clip: float | None = 1.0
    """The largest global gradient norm; 0 or none does not clip."""
    precision: str = "auto"
    """auto: bf16 on a GPU that has units for it, else fp32; or fp32, tf32, bf16, bf16-pure."""
    graph: str = "auto"
    """Run the update as CUDA graphs: auto (where it can be), require, or off."""
    recompute: str = "cheap"
    """What backward computes again to save memory: cheap (norms and activations), none, blocks, or a number of blocks."""
    eval_every: int = 0
    """Steps between two evaluations of the held-out prompts; 0: before the first step and at the end."""
    eval_temperature: float = 0.0
    """Of these answers, one a prompt; 0 is greedy."""
    save_every: int = 0
    """Steps between two checkpoints; 0: only at the end."""
    keep: int = 3
    """How many of the newest checkpoints are kept; the one with the highest held-out reward is kept as well."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""
    seed: int = 0
    """Seed of the order of the prompts, and of the sampling."""

    def __post_init__(self) -> None:
        for each in fields(RLRecipe):
            check_type(each, getattr(self, each.name))
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"rl: {name}: got {value}, wanted {least} or more.")
        if self.advantages not in ADVANTAGES:
            raise ValueError(f"rl: advantages: got {self.advantages!r}, wanted one of {', '.join(ADVANTAGES)}.")
        if not self.temperature > 0:
            raise ValueError(f"rl: temperature: got {self.temperature}, wanted more than 0, such as 1: answers must differ.")
        if not self.timeout > 0:
            raise ValueError(f"rl: timeout: got {self.timeout}, wanted a number of seconds above 0.")
        if self.samples == 1 == self.prompts_per_step:
            raise ValueError(
                "rl: samples: got 1 with prompts_per_step 1: there is no other answer to compare with; give more of either."
            )
        if self.overlap and self.truncate is None:
            raise ValueError(
                "rl: truncate: got none with overlap, whose answers are one update old: the importance that truncate bounds "
                "corrects for that; give a number, such as 2, or leave overlap out."
            )
        self.objective(), self.training()  # each refuses what it cannot make

    def objective(self) -> Any:
        """Return the loss."""
        from ..train.objectives.policy import Policy

        return Policy(
            self.variant, None, self.ratio_clip, self.ratio_clip_high, self.max_new_tokens * self.turns, self.kl,
            self.entropy, self.truncate, self.temperature,
        )  # fmt: skip

    def training(self, accumulate: int = 1) -> Recipe:
        """Return the recipe of the optimizer step, of up to `accumulate` micro-batches."""
        keys = {name: getattr(self, name) for name in TRAINING if name not in ("model", "lr")}
        keys["lr"] = (LR_ADAPTERS if self.lora else LR) if self.lr is None else self.lr
        model = self.model or "10m"  # a policy that is a module needs no name
        return Recipe(**keys, model=model, steps=self.steps * self.passes, accumulate=accumulate)

    def is_exact(self, model: Any, device: Any) -> bool:
        """Return `exact`, or its default for a model on a device: in fp32 rounding is 1e-6."""
        from ..models.registry import why_not_invariant

        if self.exact is not None:
            return self.exact
        rounds = device.type == "cuda" and self.training().precision_on(device).startswith("bf16")
        return rounds and self.cache is None and not self.overlap and why_not_invariant(model) is None

    @property
    def adapters(self) -> Lora | None:
        return Lora.of(self.lora) if self.lora else None

    @property
    def scaled(self) -> bool:
        """True where advantages are divided by the standard deviation of a prompt's rewards."""
        if self.advantages == "auto":
            return self.variant not in ("reinforce", "dr_grpo")
        return self.advantages == "scaled"
