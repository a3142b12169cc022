"""Rows of one batch with adapters of their own in whole models: beside PEFT, and one adapter at a time."""

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb

from ..place.models import assert_near, tiny, tokens
from .mixed import IDS, NAMES, K, Projections, adapted, assert_same, draw, formula, ours

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture
def theirs(tmp_path):
    """The same adapters in PEFT's model, through its files."""
    peft = pytest.importorskip("peft")
    source = adapted(tiny())
    for name in NAMES:
        gb.lora.save(source, tmp_path / name, name)
    model = peft.PeftModel.from_pretrained(tiny(), tmp_path / "one", adapter_name="one", is_trainable=True)
    for name in NAMES[1:]:
        model.load_adapter(tmp_path / name, name, is_trainable=True)
    return model.eval()


def words(ids):
    return [NAMES[i] if i >= 0 else "__base__" for i in ids.tolist()]


def pefts(model, name):
    """PEFT's parameters of one adapter in the order of ours."""
    return {
        key.removeprefix("base_model.model."): p
        for key, p in model.named_parameters()
        if f".lora_A.{name}." in key or f".lora_B.{name}." in key
    }


@pytest.mark.slow
@pytest.mark.parametrize("order", ["placed first", "placed last", "plain"])
def test_it_is_pefts_mixed_batch(order, theirs):
    model, ids = ours(order).eval(), tokens(rows=6)
    with gb.lora.rows(model, NAMES), torch.no_grad():
        for given in (IDS, IDS.flip(0), torch.full_like(IDS, -1)):
            want = theirs(ids, adapter_names=words(given)).logits
            assert_near(model(ids, adapter_ids=given).logits, want)


def test_gradients_are_those_of_one_adapter_at_a_time(theirs):
    """PEFT with one adapter on the rows that have it. fp32: sums of at most 72 tokens in another order."""
    model, ids = ours(), tokens(rows=6)
    g = draw(6, 12, 89, seed=9)
    with gb.lora.rows(model, NAMES):
        (model(ids, adapter_ids=IDS).logits * g).sum().backward()
    found = dict(model.named_parameters())
    for place_, name in enumerate(NAMES):
        theirs.base_model.set_adapter(name)
        rows = place_ == IDS
        (theirs(ids[rows]).logits * g[rows]).sum().backward()
        for key, p in pefts(theirs, name).items():
            torch.testing.assert_close(found[key].grad, p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max().item(), msg=key)


def labelled(shift=0):
    ids = tokens(rows=6, seed=shift)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, "adapter_ids": IDS.roll(shift)}


@pytest.mark.slow
def test_one_step_trains_all_of_them(theirs):
    """Three steps whose rows have other adapters each time: PEFT's, one adapter at a time, with one torch.optim.AdamW."""
    trained = {name: pefts(theirs, name) for name in NAMES}
    every = [p.requires_grad_() for own in trained.values() for p in own.values()]
    optimizer, want = torch.optim.AdamW(every, lr=1e-2, weight_decay=0.0), []
    for shift in range(3):
        batch, total = labelled(shift), 0.0
        optimizer.zero_grad()
        items = (batch["labels"][:, 1:] != -100).sum()
        for place_ in range(-1, 3):
            rows = batch["adapter_ids"] == place_
            if place_ >= 0:
                theirs.base_model.set_adapter(NAMES[place_])
            names = {"adapter_names": words(batch["adapter_ids"][rows])} if place_ < 0 else {}
            logits = theirs(batch["input_ids"][rows], **names).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"][rows, 1:].flatten(), reduction="sum") / items
            if place_ >= 0:
                loss.backward()
            total += loss.item()
        for p in every:
            p.requires_grad_()
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        want.append(total)
    model = ours().train()
    with gb.lora.rows(model, NAMES):
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2, weight_decay=0.0), precision="fp32", graph="require")
        got = [step(labelled(shift)).read().loss for shift in range(3)]
        step.close()
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
def test_a_step_reads_the_ids_that_are_set():
    """With a loss of one's own, beside the same numbers as a column of the batch."""

    def loss(model, batch):
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

    found = []
    for column in (True, False):
        model = ours().train()
        with gb.lora.rows(model, NAMES) as rows:
            step = gb.TrainStep(model, loss, "adamw", precision="fp32", graph="require")
            losses = []
            for shift in range(3):
                batch = labelled(shift)
                if not column:
                    rows.ids = batch.pop("adapter_ids")
                losses.append(step(batch).read().loss)
            step.close()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=1e-6) and len(set(found[0])) == 3


def test_set_ids_keep_their_place():
    """For a graph that reads them there; what was given may change."""
    model, x, given = adapted(Projections()), draw(6, 5, K), IDS.clone()
    with gb.lora.rows(model, NAMES) as rows:
        rows.ids = given
        at = rows.ids.data_ptr()
        given.fill_(-1)
        assert_near(model(x), formula(model, x, IDS))
        rows.ids = IDS[:2]
        assert_near(model(x[:2]), formula(model, x[:2], IDS[:2]))
        rows.ids = IDS.flip(0)
        assert rows.ids.data_ptr() == at
        assert_near(model(x), formula(model, x, IDS.flip(0)))


def test_a_decoder_of_this_library_takes_them_in_a_batch():
    """The loss of rows with different adapters is that of each row with its adapter alone on."""
    torch.manual_seed(0)
    model = gb.Decoder(gb.DecoderConfig(hidden=16, intermediate=24, layers=1, heads=2, kv_heads=1, vocabulary=20))
    for name in NAMES[:2]:
        gb.lora.add(model, rank=2, name=name)
    for p in gb.lora.parameters(model):
        torch.nn.init.normal_(p, std=0.5)
    ids, which, want = torch.randint(20, (3, 6)), torch.tensor([1, -1, 0]), []
    for row, number in zip(ids, which.tolist()):
        for place_, name in enumerate(NAMES[:2]):
            (gb.lora.enable if place_ == number else gb.lora.disable)(model, name)
        logits = model(row[None])[0, :-1]
        want.append(F.cross_entropy(logits, row[1:]).item())
    gb.lora.enable(model)
    with gb.lora.rows(model, NAMES[:2]):
        step = gb.TrainStep(model.train(), "causal_lm", gb.AdamW(lr=1e-2), precision="fp32")
        got = step([{"input_ids": ids, "labels": ids, "adapter_ids": which}]).read().loss
        step.close()
    assert got == pytest.approx(sum(want) / 3, abs=1e-5) and len(set(want)) == 3
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2), precision="fp32")
    with pytest.raises(ValueError, match="adapter_ids"):
        step([{"input_ids": ids, "labels": ids, "adapter_ids": which}])


def test_rows_of_one_leave_the_others_as_they_are():
    """Bit for bit: their gradients are sums of zeros, and AdamW's moments begin at zero."""
    model = ours().train()
    before = {name: [p.clone() for p in gb.lora.parameters(model, name)] for name in NAMES}
    with gb.lora.rows(model, NAMES):
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2, weight_decay=0.0), precision="fp32", graph="off")
        for _ in range(2):
            step(labelled() | {"adapter_ids": torch.where(IDS == 1, 1, -1)})
        step.close()
    same = {name: all(map(torch.equal, before[name], gb.lora.parameters(model, name))) for name in NAMES}
    assert same == {"one": True, "two": False, "three": True}


def test_recomputing_is_the_same():
    found = []
    for how in ("none", "cheap", "blocks"):
        model = ours().train()
        with gb.lora.rows(model, NAMES):
            step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph="off", recompute=how, accumulate=2)
            step([labelled(), labelled(1)])
            found.append([p.clone() for p in gb.lora.parameters(model)])
            step.close()
    for again in found[1:]:
        assert_same(again, found[0])


def test_generation_takes_the_ids_that_are_set():
    model, ids = ours().eval(), tokens(rows=6)
    with gb.lora.rows(model, NAMES) as rows:
        rows.ids = IDS
        got = model.generate(ids, max_new_tokens=4, do_sample=False)
        torch.testing.assert_close(model(ids).logits, model(ids, adapter_ids=IDS).logits)
        assert not torch.allclose(model(ids).logits, model(ids, adapter_ids=IDS.flip(0)).logits, atol=1e-2)
    for place_ in range(-1, 3):
        gb.lora.disable(model)
        if place_ >= 0:
            gb.lora.enable(model, NAMES[place_])
        own = place_ == IDS
        assert torch.equal(got[own], model.generate(ids[own], max_new_tokens=4, do_sample=False))


def test_closed_all_are_added_to_all_rows_again():
    model, ids = ours(), tokens(rows=6)
    want = model(ids).logits
    rows = gb.lora.rows(model, NAMES)
    assert not torch.allclose(model(ids, adapter_ids=IDS).logits, want, atol=1e-2)
    rows.close()
    assert_near(model(ids).logits, want)
    with pytest.raises(TypeError, match="adapter_ids"):
        adapted(Projections())(draw(6, 5, K), adapter_ids=IDS)
