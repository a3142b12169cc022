"""Models of images or sounds and text: the text model inside is placed, trained and decoded as one that stands alone."""

import pytest
import torch
import transformers as hf

import gpubound as gb
from gpubound.models.hf_loading import load_foreign

from ..decode.cases import assert_greedy
from ..place.models import assert_close, batch, place, rows, tiny, training_run, twin
from .wrappers import ALIKE, IMAGE, KINDS, NAMED, OWN_LOOP, PLAIN, SIGLIP, STATES, TEXT, build, with_image

PROMPTS = [[1, 2, 3, 8], list(range(20, 42))]


def each(kinds):
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ALIKE)) for kind in kinds])


@each(KINDS)
def test_text_is_decoded_by_the_fused_kernels(kind):
    fast = gb.decoder(build(kind), 2, 48)
    assert fast.path == "" and fast.certificate.logits_error is not None
    assert_greedy(fast, PROMPTS, 9)


@each(KINDS)
def test_text_is_trained_by_the_fused_loop_and_loss(kind):
    model = build(kind)
    other = twin(model)
    scaled = kind == "hyperclovax_vision_v2"  # its logits, which leaves it transformers' loss
    placement = place(model, strict=not scaled)
    found = rows(placement)
    assert placement.verified and (placement.unsupported is None or scaled)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    assert placement.fallbacks == 0, [(row.module, row.reasons) for row in placement.rows if row.fallbacks]
    if kind in OWN_LOOP:
        return
    inside = "text_model" if kind in ("idefics2", "idefics3", "smolvlm") else "language_model"
    assert found[f"model.{inside}"].kernel != "torch" and found["(the model)"].kernel != "torch"


QUESTIONS = ([1, 2], [9, 10, 11]), ([3], [12, *range(20, 34)])


@each(PLAIN)
def test_a_prompt_with_an_image_or_a_sound_is_decoded_from_the_models_own_keys(kind):
    model = build(kind)
    fast = gb.decoder(model, 2, 48, verify=False)
    blind = {NAMED.get(kind, "pixel_values"): None}
    for texts in (QUESTIONS[:1], QUESTIONS):
        inputs = with_image(kind, *texts)
        want = model.generate(**inputs, do_sample=False, max_new_tokens=9, pad_token_id=0)
        result = fast.generate(inputs, max_new_tokens=9, stop=(), logprobs=True)
        assert result.tokens == want[:, inputs["input_ids"].shape[1] :].tolist()
        with torch.no_grad():
            own, unseen = (model(**one).logits[:, -1].log_softmax(-1) for one in (inputs, inputs | blind))
        first = torch.tensor([row.logprobs[0] for row in result.sequences])
        tokens = torch.tensor([row[:1] for row in result.tokens])
        torch.testing.assert_close(first, own.gather(1, tokens)[:, 0], rtol=1e-3, atol=1e-3)
        assert (own - unseen).abs().max() > 0.1, "it changes nothing"


def test_an_image_in_pages_and_in_8_bits():
    model = build("mistral3")
    inputs = with_image("mistral3", *QUESTIONS)
    want = gb.decoder(model, 2, 48, verify=False).generate(inputs, max_new_tokens=9, stop=()).tokens
    assert gb.decoder(model, 2, 48, pages=2, verify=False).generate(inputs, max_new_tokens=9, stop=()).tokens == want
    rounded = gb.decoder(model, 2, 48, cache="int8", verify=False).generate(inputs, max_new_tokens=9, stop=()).tokens
    assert [row[0] for row in rounded] == [row[0] for row in want]


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (
            "llava",
            {"input_ids": torch.tensor([[1, 2, *[IMAGE] * 4]]), "attention_mask": None},
            "ends with an image or a sound, wanted text after it",
        ),
        ("llava", {"n": 2}, "n=1"),
        ("text", {}, "got pixel_values"),
        ("qwen3_vl", {}, "positions of a grid"),
        *((kind, {}, "a state or latents") for kind in STATES[:2]),
    ],
)
def test_images_that_a_decoder_cannot_read(kind, change, named):
    model = tiny("llama") if kind == "text" else build(kind)
    inputs = with_image("llava", QUESTIONS[0]) | change
    settings = {"n": inputs.pop("n")} if "n" in change else {}
    with pytest.raises(ValueError, match=named):
        gb.decoder(model, 2, 48, verify=False).generate(inputs, max_new_tokens=2, **settings)


def test_training_on_images_computes_what_it_did():
    model = build("gemma3")
    inputs = with_image("gemma3", *QUESTIONS)
    inputs["labels"] = inputs["input_ids"].masked_fill((inputs["input_ids"] == IMAGE) | (inputs["attention_mask"] == 0), -100)
    other = twin(model)
    placement = place(model, strict=True)
    assert_close(training_run(model, inputs), training_run(other, inputs))
    assert placement.fallbacks == 0


def test_an_adapter_of_the_part_for_images_is_not_in_a_steps_way():
    model = build("llava")
    tower = gb.lora.add(model, rank=2, targets=("fc1",), name="tower")
    assert tower and gb.decoder(model, 1, 48).path == ""


def test_a_text_model_of_another_family_is_named():
    model = build("llava", {"model_type": "persimmon"})
    assert "LlavaForConditionalGeneration around persimmon" in gb.decoder(model, 1, 48).path


def test_a_text_model_with_scaled_logits_inside_one_that_does_not_scale_them():
    model = build("llava_next", {"model_type": "granite", "logits_scaling": 4.0, "residual_multiplier": 0.4})
    assert_greedy(gb.decoder(model, 2, 48), PROMPTS, 9)


def test_a_model_of_actions_is_no_language_model():
    text = TEXT | {"model_type": "gemma"}
    seen = {"model_type": "paligemma", "text_config": text, "vision_config": SIGLIP, "projection_dim": 32}
    model = hf.PI0ForConditionalGeneration(hf.PI0Config(vlm_config=seen, dit_config=text)).eval()
    with pytest.raises(ValueError, match=r"^decoder: model: got PI0For\w+, whose config has no vocab_size, wanted .*; call "):
        gb.decoder(model, 1, 16)
    assert "its input cannot be guessed" in place(model).summary


@pytest.mark.parametrize("kind", ["mistral3", "idefics2"])
def test_a_step_on_texts_leaves_the_part_for_images_as_it_is(kind):
    """An optimizer's decay would shrink weights that get no gradient."""
    model = build(kind).train()
    place(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2, weight_decay=0.1), precision="fp32")
    ids = torch.arange(20, 44).view(2, 12)
    for _ in range(2):
        step({"input_ids": ids, "labels": ids})
    step.close()
    assert all(p.requires_grad for p in model.parameters())
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    inside = "model.language_model", "model.text_model", "lm_head"
    assert same == {name for name in before if not name.startswith(inside)}


def test_a_loss_function_may_train_the_part_for_images():
    model = build("llava").train()
    inputs = with_image("llava", QUESTIONS[0])

    def loss(model, batch):
        logits = model(**batch).logits
        return logits[:, -1].square().sum(), torch.ones(())

    step = gb.TrainStep(model, loss, gb.AdamW(lr=1e-2), precision="fp32")
    before = model.model.multi_modal_projector.linear_1.weight.detach().clone()
    step(inputs)
    step.close()
    assert not torch.equal(before, model.model.multi_modal_projector.linear_1.weight)


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl", "voxtral"])
def test_a_folder_is_read(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    again = load_foreign(tmp_path, "cpu").eval()
    ids = torch.tensor([[1, 2, 3, 9]])
    assert type(again) is type(model) and torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
