"""Adapters that PEFT computes itself: DoRA, convolutions, embeddings, experts, modules_to_save."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import gpubound as gb
from gpubound.models import load_hf, save_hf

from ..place.models import assert_near, batch, tiny, tokens
from .cases import adapted, folded, placed

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
KINDS = {
    "DoRA": {"dora": True},
    "embedding": {"targets": ["embed_tokens", "q_proj"]},
    "head": {"targets": ["lm_head", "q_proj"]},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_peft_loads_what_was_trained(options, tmp_path):
    model = adapted(tiny() if "dora" in options else placed(), **options)
    step = gb.TrainStep(model.train(), "causal_lm", gb.AdamW(lr=1e-2), precision="fp32", graph="off")
    losses = [step(batch()).read().loss for _ in range(3)]
    step.close()
    gb.lora.save(model.eval(), tmp_path)
    theirs, again = peft.PeftModel.from_pretrained(tiny(), tmp_path).eval(), tiny().eval()
    gb.lora.load(again, tmp_path)
    want = model(tokens()).logits
    assert losses[-1] < losses[0]
    for other in (theirs, again):
        assert_near(other(tokens()).logits, want)
    gb.lora.merge(again, for_good=True)
    assert list(again.state_dict()) == list(tiny().state_dict())
    assert_near(again(tokens()).logits, want)


FILES = {  # the options of PEFT's config beside target_modules, and how many tensors are trained besides A and B
    "modules_to_save": ({"modules_to_save": ["embed_tokens", "lm_head"]}, 2),
    "trainable_token_indices": ({"trainable_token_indices": {"embed_tokens": [1, 5, 7]}}, 1),
    "lora_bias": ({"lora_bias": True}, 2),
}
of_files = pytest.mark.parametrize("options, more", FILES.values(), ids=FILES)


def file_of_peft(folder, options, model=None):
    """Save an adapter of PEFT's, all of whose numbers differ from the model's, and return PEFT's model."""
    config = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    theirs = peft.get_peft_model(model or tiny(), peft.LoraConfig(r=4, **config)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.3 * torch.randn_like(p) if p.requires_grad else 0)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.filterwarnings("ignore:.*(lora_bias|LoRA tensor)")
@of_files
def test_what_pefts_files_train_besides_products(tmp_path, options, more):
    """As of a chat model with new tokens: the embedding and the head, or some of their rows, were trained."""
    theirs, model = file_of_peft(tmp_path, options), tiny().eval()
    before = model(tokens()).logits
    gb.lora.load(model, tmp_path)
    want = theirs(tokens()).logits
    assert_near(model(tokens()).logits, want)
    assert len(gb.lora.parameters(model)) == 2 * 2 + more
    gb.lora.save(model, tmp_path / "again")
    assert_near(peft.PeftModel.from_pretrained(tiny(), tmp_path / "again").eval()(tokens()).logits, want)
    with gb.lora.disable(model):
        assert torch.equal(model(tokens()).logits, before)
    step = gb.TrainStep(model.train(), "causal_lm", gb.AdamW(lr=1e-3), precision="fp32", graph="off")
    losses = [step(batch()).read().loss for _ in range(3)]
    step.close()
    assert losses[-1] < losses[0]
    gb.lora.remove(model)
    assert torch.equal(model.eval()(tokens()).logits, before) and list(model.state_dict()) == list(tiny().state_dict())


@pytest.mark.parametrize("kind", ["modules_to_save", "trainable_token_indices"])
def test_a_second_adapter_is_not_put_into_what_the_first_trains_whole(tmp_path, kind):
    theirs, model = file_of_peft(tmp_path, FILES[kind][0]), tiny().eval()
    gb.lora.load(model, tmp_path)
    want = theirs(tokens()).logits
    assert all(".layers." in name for name in gb.lora.add(model, rank=2, name="second"))
    assert_near(model(tokens()).logits, want)
    gb.lora.remove(model, "second")
    assert_near(model(tokens()).logits, want)


@pytest.mark.parametrize("kind", ["modules_to_save", "trainable_token_indices"])
def test_merged_for_good_they_are_the_models_own(tmp_path, kind):
    theirs, model = file_of_peft(tmp_path, FILES[kind][0]), tiny().eval()
    gb.lora.load(model, tmp_path)
    want = theirs(tokens()).logits
    gb.lora.merge(model)
    assert_near(model(tokens()).logits, want)
    gb.lora.unmerge(model)
    gb.lora.merge(model, for_good=True)
    assert list(model.state_dict()) == list(tiny().state_dict())
    assert_near(model(tokens()).logits, want)


@pytest.mark.filterwarnings("ignore:.*(lora_bias|LoRA tensor)")
def test_a_bias_is_not_merged_nor_chosen_by_rows(tmp_path):
    file_of_peft(tmp_path, FILES["lora_bias"][0])
    model = tiny().eval()
    gb.lora.load(model, tmp_path)
    before = model(tokens()).logits
    with pytest.raises(ValueError, match=r"q_proj adds a bias"):
        gb.lora.merge(model)
    with pytest.raises(ValueError, match=r"q_proj adds a bias"):
        gb.lora.rows(model, ["default"])
    assert torch.equal(model(tokens()).logits, before)


def test_a_copy_of_a_tied_module_is_not_merged_for_good(tmp_path):
    """The head would change with the embedding."""
    theirs, model = tiny(), tiny()
    for one in (theirs, model):
        one.lm_head.weight = one.model.embed_tokens.weight
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path)
    gb.lora.load(model, tmp_path)
    with pytest.raises(ValueError, match=r"model\.embed_tokens.*lm_head\.weight"):
        gb.lora.merge(model, for_good=True)
    gb.lora.merge(model)


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers)")
def test_an_adapter_of_a_tied_head_is_not_merged(tmp_path):
    """The embedding would change with the head."""
    theirs, model = tiny("llama tied"), tiny("llama tied").eval()
    peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules=["lm_head"])).save_pretrained(tmp_path)
    gb.lora.load(model, tmp_path)
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(ValueError, match=r"lora\.merge: the weight of lm_head is model\.embed_tokens\.weight, too"):
        gb.lora.merge(model)
    assert torch.equal(model.model.embed_tokens.weight, before)


@pytest.mark.parametrize("module", ["norm", "k_proj", "mlp"])
def test_a_decoder_follows_what_was_trained_whole(tmp_path, module):
    theirs, model = file_of_peft(tmp_path, {"target_modules": ["q_proj"], "modules_to_save": [module]}), tiny().eval()
    gb.lora.load(model, tmp_path)
    fast = gb.decoder(model, max_length=16, verify=False)
    assert f"{module}: PEFT trains a copy or rows of it" in fast.path
    row = tokens(rows=1)
    want = theirs(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(fast.score(row[0])[0]), want.detach(), rtol=0, atol=1e-4)


def test_rows_of_tokens_are_those_of_a_tied_head(tmp_path):
    """PEFT finds ties in models of transformers alone; a file that it wrote for one is loaded into our decoder."""
    torch.manual_seed(0)
    save_hf(gb.Decoder(gb.DecoderConfig(32, 48, 2, 4, 2, 89, tied=True)), tmp_path / "base")
    base, model = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), load_hf(tmp_path / "base").eval()
    theirs = file_of_peft(tmp_path / "adapter", FILES["trainable_token_indices"][0], base)
    before, want = model(tokens()), theirs(tokens()).logits
    gb.lora.load(model, tmp_path / "adapter")
    assert_near(model(tokens()), want)
    with gb.lora.disable(model):
        assert torch.equal(model(tokens()), before)
    gb.lora.merge(model, for_good=True)
    assert_near(model(tokens()), want)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_rows_of_tokens_are_refused(tmp_path):
    """A file with as many rows, of other tokens, would fit."""
    for name, rows in (("first", [1, 5, 7]), ("other", [2, 5, 7])):
        file_of_peft(tmp_path / name, {"trainable_token_indices": {"embed_tokens": rows}})
    model = tiny()
    gb.lora.load(model, tmp_path / "first")
    with pytest.raises(gb.errors.DataError, match="trainable_token_indices"):
        gb.lora.load(model, tmp_path / "other")


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 3, padding=1))
    torch.manual_seed(0)
    assert gb.lora.add(model, rank=4, targets="all-linear-and-conv", init=False) == ["0", "2"], "the last is too small"
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(model(x), folded(model)(x), rtol=1e-4, atol=1e-5)
    model(x).square().sum().backward()
    assert all(p.grad.any() for p in gb.lora.parameters(model))


def test_experts(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=89)

    def sparse():
        torch.manual_seed(0)
        return MixtralForCausalLM(config).eval()

    model = sparse()
    before = model(tokens()).logits
    names = gb.lora.add(model, rank=4, targets=["q_proj", "gate_up_proj", "down_proj"], init=False)
    assert len(names) == 3
    want = model(tokens()).logits
    assert not torch.allclose(want, before, atol=1e-3)
    gb.lora.save(model, tmp_path)
    again = sparse()
    gb.lora.load(again, tmp_path)
    assert_near(again(tokens()).logits, want)
    gb.lora.remove(model)
    assert torch.equal(model(tokens()).logits, before)
