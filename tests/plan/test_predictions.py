"""A plan's figures beside committed measurements, beside a step that runs, and beside each other."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench_ranks import CASES as OF_RANKS
from benchmarks.bench_train import CASES as MEASURED
from benchmarks.shapes import SHAPES
from gpubound.models.llama.decoder import Decoder, DecoderConfig
from gpubound.plan.cards import CARDS, GIGA, Card, Network
from gpubound.plan.cases import CASES, RANKS_CASES, ROWS_CASES, cases, setting_of_case
from gpubound.plan.check import FILES, check
from gpubound.plan.memory import memory
from gpubound.plan.pace import pace
from gpubound.plan.propose import FREE, proposals, summing
from gpubound.plan.reading import outlined, setting_of
from gpubound.plan.setting import Setting
from gpubound.plan.wire import collectives
from gpubound.train import AdamW, AdamW8bit, Muon, TrainStep
from gpubound.train.recipe import Recipe

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
H200 = CARDS["h200"]
TWO_NODES = Network(node=4)


def test_predictions_hold_on_the_committed_measurements():
    rows = check(RESULTS)
    assert [str(row) for row in rows if not row.holds] == []
    of_adapters = ("1b", "135m", "8b", "8b-fp8")
    assert {(row.gpu, row.bench, row.case, row.unit) for row in rows} >= {
        *(("h200", "train", case, unit) for case in CASES for unit in ("tok/s", "GiB")),
        *(("h200", "lora", case, unit) for case in of_adapters for unit in ("tok/s", "GiB")),
        *(("h200", "ranks", case, "tok/s") for case in ("350m on 2", "8b on 2")),
        ("h100", "train", "350m", "tok/s"),
        ("h100", "train", "350m", "GiB"),
    }


def test_a_prediction_that_is_off_is_found(monkeypatch):
    monkeypatch.setitem(CARDS, "h200", replace(H200, flops={kind: 2 * rate for kind, rate in H200.flops.items()}))
    assert {row.unit for row in check(RESULTS) if not row.holds} == {"tok/s"}


@pytest.mark.parametrize("name", CASES)
def test_a_checked_case_is_the_one_that_the_benchmark_measures(name):
    case, setting, shape = MEASURED[name], setting_of_case(*CASES[name]), SHAPES[MEASURED[name].shape]
    assert (case.seq, case.micro, case.accumulate, case.recompute) == (
        setting.seq, setting.rows, setting.accumulate, setting.recompute,
    )  # fmt: skip
    assert (setting.precision == "fp8") == case.ours.endswith("fp8")
    c = setting.config
    assert (c.hidden, c.intermediate, c.layers, c.heads, c.kv_heads, c.vocabulary, c.tied) == (
        shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.vocab, shape.tied,
    )  # fmt: skip


@pytest.mark.parametrize("asked", RANKS_CASES, ids=lambda asked: f"{asked[0]} on {asked[5]}")
def test_a_checked_case_of_several_gpus_is_the_one_that_the_benchmark_measures(asked):
    preset, seq, rows, accumulate, recompute, world, sharded = asked
    case = OF_RANKS[preset]
    assert (case.shape, case.seq, case.micro * case.accumulate) == (preset, seq, rows * accumulate)
    assert case.recompute == recompute and f"{preset} on {world}" in {known.name for known in cases()}
    assert sharded == (case.ours == "ours-fsdp") and rows in getattr(case, "rows", {}).get(case.ours, (case.micro,))


@pytest.mark.parametrize("asked", ROWS_CASES, ids=lambda asked: f"{asked[0]}-lora on {asked[4]}")
def test_a_checked_case_of_adapters_over_shards_is_the_one_that_the_benchmark_measures(asked):
    preset, seq, rows, _, world = asked
    case = OF_RANKS[f"{preset}-lora"]
    assert (case.shape, case.seq, case.ours) == (preset, seq, "ours-fsdp-lora") and rows in case.rows[case.ours]
    assert f"{preset}-lora on {world}" in {known.name for known in cases()}


def test_the_rates_of_cards_are_those_that_were_measured():
    """The best copy and bf16 rates of the committed lines, within 2 %."""
    import json

    for gpu, name in FILES.items():
        rates: dict[str, float] = {}
        for line in (RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if row["bench"] == "kernels" and row["peer_name"] in ("copy rate", "bf16 rate"):
                rates[row["peer_name"]] = max(rates.get(row["peer_name"], 0.0), row["peer"])
        card = CARDS[gpu]
        assert card.copy == pytest.approx(rates["copy rate"] * GIGA, rel=0.02)
        assert card.flops["bf16"] == pytest.approx(rates["bf16 rate"] * 1e12, rel=0.02)


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW8bit(), Muon()], ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp32"])
def test_weights_and_moments_are_those_of_a_step(optimizer, precision):
    if isinstance(optimizer, Muon) and precision == "bf16-pure":
        pytest.skip("refused by the recipe")
    model = Decoder(DecoderConfig(64, 128, 2, 4, 2, 256))
    step = TrainStep(model, "next_token", optimizer, precision=precision, graph="off")
    predicted = memory(Setting(outlined(model, optimizer), optimizer, precision, 16, 1, 1))
    step.close()
    assert {name: predicted.get(name, 0) for name in step.memory} == step.memory


BASE = setting_of(Recipe(model="350m", seq=1024, micro_batch=4, accumulate=64), 8)


def gib(**changes) -> int:
    return sum(memory(replace(BASE, **changes)).values())


def seconds(network: Network = TWO_NODES, card: Card = H200, **changes) -> float:
    return sum(pace(replace(BASE, **changes), card, network).values())


def test_more_rows_take_more_memory_and_recomputing_and_sharding_take_less():
    assert gib(rows=2) < gib(rows=4) < gib(rows=8)
    assert gib(recompute="blocks") < gib(recompute="12") < gib(recompute="cheap") < gib(recompute="none")
    assert gib(sharded=True, world=64) < gib(sharded=True) < gib(world=8)
    assert gib() < gib(average=True) and gib(optimizer=AdamW8bit()) < gib()


def test_slower_links_and_memory_and_recomputing_take_longer():
    assert seconds(recompute="none") < seconds(recompute="cheap") < seconds(recompute="12") < seconds(recompute="blocks")
    slow = Network(network=1 * GIGA, node=4)
    for sharing in ({}, {"sharded": True}):
        assert seconds(TWO_NODES, **sharing) < seconds(slow, **sharing)
    assert seconds(card=replace(H200, copy=H200.copy / 2)) > seconds()
    assert seconds(captured=False, rows=1, accumulate=32) > seconds(rows=1, accumulate=32)


def test_a_summed_gradient_is_sent_in_any_number_of_parts():
    """2 (w - 1) / w of four bytes a parameter, whatever accumulates."""
    for world in (2, 8, 1024):
        (call,) = collectives(replace(BASE, world=world))
        assert call.sent(world) == 2 * (world - 1) / world * 4 * BASE.outline.parameters
    assert collectives(replace(BASE, world=1)) == []


def test_proposals_keep_the_step_and_the_best_one_fits_in_any_world():
    recipe = Recipe(model="8b", vocabulary=128256, seq=4096, micro_batch=4, accumulate=512)
    for world in (1, 8, 1024):
        as_it_is, found = proposals(recipe, world, H200, Network(), H200.memory)
        assert all(p.setting.tokens_per_step == recipe.tokens_per_step for p in [as_it_is, *found])
        assert as_it_is.setting.rows in (4, 2)
        best = found[0]
        if world == 1:
            assert not best.fits and all(p.bytes > H200.memory * (1 - FREE) for p in found)
        else:
            assert best.sharing == "fsdp" and best.fits and not as_it_is.fits
            assert all(p.tokens_per_s <= best.tokens_per_s / 0.98 for p in found if p.fits)


def test_a_model_that_fits_stays_whole_and_memory_decides_how_much_is_recomputed():
    recipe = Recipe(model="1b", vocabulary=128256, seq=2048, micro_batch=8, accumulate=64)
    _, found = proposals(recipe, 8, H200, Network(), H200.memory)
    assert found[0].sharing == "ddp" and found[0].setting.recompute in ("none", "cheap")
    _, tight = proposals(recipe, 8, H200, Network(), 27 << 30)
    some = [p for p in tight if p.setting.recompute.isdecimal() and p.fits]
    assert some and all(p.bytes <= (27 << 30) * (1 - FREE) for p in some)
    fewer = replace(some[0].setting, recompute=str(some[0].setting.recomputed - 1))
    assert sum(memory(fewer).values()) > (27 << 30) * (1 - FREE)


def test_shards_sum_once_a_step_where_whole_gradients_fit():
    recipe = Recipe(model="1b", vocabulary=128256, seq=2048, micro_batch=4, accumulate=64)
    _, roomy = proposals(recipe, 8, H200, Network(), H200.memory)
    dealt = [p for p in roomy if p.setting.sharded]
    several = [p for p in dealt if p.setting.accumulate > 1]
    assert several and all(p.setting.once for p in several) and not any(p.setting.once for p in roomy if p not in several)
    for p in several:
        each = replace(p.setting, once=False)
        more = sum(memory(p.setting).values()) - sum(memory(each).values())
        assert more == 4 * p.setting.outline.parameters
        before = {call.what: call.times for call in collectives(each)}
        after = {call.what: call.times for call in collectives(p.setting)}
        n, layers = p.setting.accumulate, p.setting.config.layers
        assert (before["gradient of a block"], after["gradient of a block"]) == (n * layers, layers)
        assert before | {"gradient of a block": layers, "other gradients": 1} == after and p.step_s < sum(
            pace(each, H200, Network()).values()
        )
        least = sum(memory(p.setting).values())
        assert [summing(each, limit).once for limit in (least - 1, least)] == [False, True]


def test_muon_is_not_sharded():
    recipe = Recipe(model="350m", seq=1024, micro_batch=4, accumulate=16, optimizer="muon")
    _, found = proposals(recipe, 8, H200, Network(), H200.memory)
    assert found and {p.sharing for p in found} == {"ddp"}
