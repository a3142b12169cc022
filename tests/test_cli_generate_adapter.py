"""`gpubound generate` with a low-rank adapter: beside its base, found through its own folder, or in a run."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpubound import device as facts, lora, trace
from gpubound.cli import main
from gpubound.data import Tokenizer
from gpubound.generate.batches import open_saved
from gpubound.models import load_hf
from gpubound.models.language_model import logits_of
from tests.messages import message

from . import by_heart

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures
CAT = ["--prompt", "the cat"]
BEFORE, AFTER = " sat on the mat and slept.\n", " ran to the sea and swam.\n"


@pytest.fixture(scope="module")
def adapter(ckpt, tmp_path_factory):
    """A folder with an adapter that has learnt another end of one text."""
    folder = tmp_path_factory.mktemp("adapter")
    model, tokenizer = load_hf(ckpt), Tokenizer.load(ckpt)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "interpreted", lambda: False)
        lora.add(model, 16, alpha=64)
        text = f"the cat{AFTER.strip(chr(10))}<|endoftext|>"
        by_heart.learn(model, [tokenizer.inner.encode(text, add_special_tokens=False).ids])
    lora.save(model, folder)
    return folder


@pytest.mark.slow
def test_beside_its_base(ckpt, adapter, run):
    assert run(ckpt, *CAT)[1] == BEFORE
    code, out, err = run(ckpt, "--adapter", adapter, *CAT)
    assert (code, out) == (0, AFTER)
    assert message("cli_generate_adapter:beside_its_base").within(err)
    size = next(line for line in err.splitlines() if line.startswith(f"{ckpt}: "))
    assert size.split(",")[0] in run(ckpt, *CAT)[2], "as many parameters as without"
    assert "fallback" not in err, "the fused kernels read the merged weights"


@pytest.mark.slow
def test_of_a_model_by_transformers(ckpt, adapter, run):
    """--no-fused: transformers' own forward over the merged weights."""
    assert run(ckpt, "--adapter", adapter, "--no-fused", *CAT)[1] == AFTER


def test_by_its_own_folder(ckpt, adapter, run):
    assert run(adapter, *CAT)[1] == AFTER
    about = json.loads((adapter / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(ckpt.resolve())


KEPT = {"a bias": {"lora_bias": True}, "a copy of a tied embedding": {"modules_to_save": ["embed_tokens"]}}


@pytest.mark.filterwarnings(
    "ignore:.*(lora_bias|LoRA tensor|tie_word_embeddings)", "ignore:.is_gradient_checkpointing. is deprecated"
)
@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_what_the_weights_cannot_hold_is_not_merged(ckpt, run, tmp_path, options):
    """It was merged without its bias, and without the embedding that trained with it."""
    base = AutoModelForCausalLM.from_pretrained(ckpt)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(base, config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p) if p.requires_grad else 0)
    theirs.save_pretrained(tmp_path)
    trace.fallbacks.clear()
    saved, ids = open_saved(ckpt, torch.device("cpu"), adapter=tmp_path), torch.arange(12)[None]
    torch.testing.assert_close(logits_of(saved.model, {"input_ids": ids}), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert "generate: an adapter merged into the weights" in {what for what, _ in trace.fallbacks}
    code, _, err = run(ckpt, "--adapter", tmp_path, *CAT, "--max-new-tokens", "6")
    assert code == 0 if "lora_bias" in options else code == 2 and "model.embed_tokens is a ModulesToSaveWrapper" in err


def test_a_base_that_is_gone(adapter, run, tmp_path):
    about = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "/nowhere"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    code, _, err = run(tmp_path, *CAT)
    assert code == 2 and err.splitlines()[-1] == message("cli_generate_adapter:a_base_that_is_gone", tmp_path)


def test_an_adapter_of_an_adapter(adapter, run):
    code, _, err = run(adapter, "--adapter", adapter, *CAT)
    assert code == 2 and err.splitlines()[-1] == message("cli_generate_adapter:an_adapter_of_an_adapter", adapter)


@pytest.mark.slow
def test_a_run_speaks_with_its_adapters(ckpt, run, tmp_path):
    """From its checkpoint, from its export, and from the export merged: the same tokens, which are not the base's."""
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text("the cat ran to the sea and swam. " * 20)
    (tmp_path / "c.yaml").write_text(
        f"model: {ckpt}\ndata: {tmp_path / 'texts'}\nlora: {{rank: 4, alpha: 16}}\nseq: 16\nmicro_batch: 4\nsteps: 8\n"
        f"lr: 1e-2\nvalidation: 0.2\ndevice: cpu\nout: {tmp_path / 'run'}\n"
    )
    assert main(["train", str(tmp_path / "c.yaml")]) == 0
    assert main(["train", str(tmp_path / "c.yaml"), "--resume", "--export", str(tmp_path / "adapter")]) == 0
    assert main(["train", str(tmp_path / "c.yaml"), "--resume", "--export", str(tmp_path / "merged"), "--merge"]) == 0
    prompt = ["--prompt", "the dog", "--max-new-tokens", "12", "--ignore-eos"]
    said = [run(tmp_path / name, *prompt)[1] for name in ("run", "adapter", "merged")]
    assert said[0] == said[1] == said[2] != run(ckpt, *prompt)[1]
    assert main(["train", str(tmp_path / "c.yaml"), "--resume", "--export", "hf"]) == 0
    assert f"{tmp_path / 'run' / 'hf'}" not in run(tmp_path / "run", *prompt)[2], "what speaks is the base with its adapters"
