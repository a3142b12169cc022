"""Mixtures of experts: Hugging Face's tokens in every form of a step, grouped products, no host."""

import functools

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound.decode import moe
from gpubound.decode.moe import each_expert, grouped, not_grouped
from gpubound.decode.runner import Stepper
from gpubound.kernels.experts import likeliest
from tests.messages import message

from . import cases
from .cases import PROMPT, SPARSE_KINDS, of_decoder
from .test_gpu import SERVED


class TestTokens:
    @SPARSE_KINDS
    def test_a_ragged_batch_gives_hugging_faces(self, kind, device):
        fast = cases.shared(kind, str(device))
        assert fast.path == "" and any("of experts" in part for part, _, _ in fast.body.report())
        together = cases.assert_greedy(fast, cases.prompts(), 12)
        assert len({*together[0], *together[1], *together[2]}) > 8

    @pytest.mark.parametrize("options", [{"norm_topk_prob": False, "mlp_only_layers": []}, {"decoder_sparse_step": 2}])
    def test_options_of_qwen3(self, options, device):
        fast = gb.decoder(cases.build("Qwen3Moe", device=device, **options), 1, cases.ROOM, verify=False)
        cases.followed(fast)

    def test_a_model_of_the_family_without_any_experts(self, device):
        fast = gb.decoder(cases.build("Qwen3Moe", device=device, mlp_only_layers=[0, 1, 2]), 1, cases.ROOM, verify=False)
        assert fast.path == "" and not any("route" in what for _, what, _ in fast.body.report())
        cases.followed(fast)

    @SPARSE_KINDS
    def test_beside_any_others_and_in_wide_batches(self, kind, device):
        """Up to 8 rows by the same kernels, 11 grouped by expert: in fp32 the tokens are the same."""
        fast, given = cases.shared(kind, str(device), max_batch=11), cases.prompts(*range(1, 12))
        alone = {row: fast.generate(given[row], max_new_tokens=5).tokens[0] for row in (0, 4, 7, 10)}
        for rows, order in ((5, 1), (8, 1), (11, 1), (8, -1)):
            found = fast.generate(given[:rows][::order], max_new_tokens=5).tokens[::order]
            assert all(found[row] == tokens for row, tokens in alone.items() if row < rows)

    @pytest.mark.parametrize("width", [21, 22])
    def test_where_grouped_products_cannot_be(self, width, device):
        """Rows of 84 and 88 bytes. The model's own forward has to be told to do without."""
        model = cases.build("Mixtral", device=device, intermediate_size=width)
        model.config._experts_implementation = "eager"
        fast = gb.decoder(model, 9, cases.ROOM, verify=False)
        why = "F.grouped_mm wants rows of a multiple of 16 bytes"
        assert fast.body.report()[-2:] == [
            ("experts of prompts", "every expert for all tokens, by torch", why),
            ("experts of more rows", "as of one row", why),
        ]
        cases.assert_greedy(fast, cases.prompts(*range(1, 10)), 9)

    def test_a_prompt_in_pieces(self, monkeypatch, device):
        want = cases.shared("Mixtral", str(device)).generate(cases.prompts(45, 30), max_new_tokens=9).tokens
        monkeypatch.setattr(moe, "PIECE", 7)
        fast = gb.decoder(cases.build("Mixtral", device=device), 2, cases.ROOM, verify=False)
        assert fast.generate(cases.prompts(45, 30), max_new_tokens=9).tokens == want

    @pytest.mark.slow
    @pytest.mark.parametrize("draft", ["text", "model"])
    def test_speculative_steps(self, draft, device):
        """Five tokens of each row at once: 5 rows to the kernels, or 15, which are grouped."""
        plain = cases.shared("Qwen3Moe", str(device))
        twin = gb.Draft(cases.build("Qwen3Moe", device=device)) if draft == "model" else 4
        fast = gb.decoder(plain.model, 3, cases.ROOM, speculate=twin, verify=False)
        for given, how in ((cases.prompts(7), {}), (cases.prompts(), {"temperature": 1.0, "seed": 3})):
            found = fast.generate(given, max_new_tokens=14, **how)
            assert found.tokens == plain.generate(given, max_new_tokens=14, **how).tokens
            assert found.tokens_a_step > 4 or draft == "text"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "dtype"),
        [({"cache": "int8"}, torch.float32), ({"cache": "int8"}, torch.bfloat16), ({"pages": 9}, torch.bfloat16)],
    )
    def test_other_caches(self, options, dtype, device):
        """Certified too: rounded keys move scores, and the choice is judged by what rounds alike."""
        fast = gb.decoder(cases.build("Qwen3Moe", dtype, device), 9, cases.ROOM, **options)
        given = cases.prompts(5, 9, 3)
        assert fast.generate(given, max_new_tokens=9).tokens == [
            fast.generate(prompt, max_new_tokens=9).tokens[0] for prompt in given
        ]

    def test_scores(self, device):
        fast, ids = cases.shared("Qwen3Moe", str(device)), cases.prompts(30)[0]
        want = cases.logits(fast.model, ids)[:-1].log_softmax(-1).cpu().gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(fast.score(ids)[0]), want, rtol=0, atol=2e-5)

    @pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
    def test_a_model_that_was_asked_for_router_logits(self, kind):
        """transformers leaves hooks on its routers, which do nothing in other calls."""
        model = cases.build(kind)
        model(torch.tensor([PROMPT]), output_router_logits=True)
        assert gb.decoder(model, 1, 16, verify=False).path == ""

    def test_a_placed_model(self):
        model = cases.build("Mixtral")
        want = cases.hugging_face(model, PROMPT, 6)
        gb.place(model, device="cpu")
        assert of_decoder(gb.decoder(model, 1, cases.ROOM, verify=False)) == want

    def test_interpreted_kernels_give_the_same(self, interpret):
        model = cases.build("Qwen3Moe", num_hidden_layers=1)
        report = cases.interpreted_report(interpret, model, cases.prompts(4, 2), 2)
        assert ("1 x norm, router, choice", "triton: route", "3 of 8 experts a row") in report


class TestGroupedProducts:
    """Both forms of many tokens' experts, against each token by itself in fp64."""

    @pytest.mark.parametrize("form", [grouped, each_expert])
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
    def test_agree_with_one_by_one(self, form, dtype, tolerance, device):
        if device.type == "cuda" and form is grouped and dtype != torch.bfloat16:
            pytest.skip("grouped products on the device are bfloat16's")
        torch.manual_seed(0)
        h, gate_up, down = torch.randn(13, 32), torch.randn(6, 48, 32) * 0.2, torch.randn(6, 32, 24) * 0.2
        h, gate_up, down = (t.to(device, dtype) for t in (h, gate_up, down))
        scores = torch.randn(13, 6, device=device)
        scores[:, 4] = -50.0  # an expert that nobody takes
        ids, shares = likeliest(scores, 2, True)
        want = torch.zeros(13, 32, dtype=torch.float64)
        for token in range(13):
            for slot in range(2):
                gate, up = (gate_up[ids[token, slot]].double() @ h[token].double()).chunk(2)
                product = down[ids[token, slot]].double() @ (F.silu(gate) * up)
                want[token] += (shares[token, slot].double() * product).cpu()
        got = form(h, ids, shares, gate_up, down)
        assert got.dtype == torch.float32
        assert ((got.double().cpu() - want).norm() / want.norm()).item() < tolerance

    def test_which_one(self):
        whole, odd = torch.zeros(2, 16, 8), torch.zeros(2, 16, 7)
        assert not_grouped(whole, whole) is None
        assert not_grouped(whole, odd) == message("decode/experts:which_one")

    @pytest.mark.parametrize("form", [grouped, each_expert])
    def test_a_nan_stays_with_the_tokens_of_its_expert(self, form, device):
        h, gate_up, down = torch.ones(4, 8), torch.ones(3, 16, 8), torch.ones(3, 8, 8)
        gate_up[1] = float("nan")
        ids, shares = torch.tensor([[0, 2], [1, 0], [2, 0], [2, 1]]), torch.full((4, 2), 0.5)
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        y = form(h.to(device, half), ids.to(device), shares.to(device), gate_up.to(device, half), down.to(device, half))
        assert y.isnan().all(1).tolist() == y.isnan().any(1).tolist() == [False, True, False, True]


class TestHost:
    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "rows"), [("Mixtral", 2), ("Qwen3Moe", 9)])
    def test_steps_never_wait_for_the_device(self, kind, rows, sim):
        """Prompts and 9 rows are grouped by expert there, with offsets that the host does not see."""
        fast = gb.decoder(cases.build(kind, device=sim), rows, 32, verify=False)
        assert fast.path == ""
        given = cases.prompts(*range(3, 3 + rows))
        fast.generate(given, max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
        ids, lengths = torch.zeros(rows, 5, device=sim, dtype=torch.int64), torch.full((rows,), 5, device=sim)

        def launch(rows, steps, variant):
            fast.body.prefill(ids, lengths)
            fast.graphs.run(rows, steps, variant)

        cases.assert_never_waits(launch, rows)
        got = fast.generate(given, max_new_tokens=5).tokens
        assert got == gb.decoder(cases.build(kind), rows, 32, verify=False).generate(given, max_new_tokens=5).tokens

    def test_the_table(self):
        assert cases.shared("Qwen3Moe", max_batch=11).body.report() == [
            ("3 x norm, q k v", "reference: norm_product", ""),
            ("3 x rotation, cache, attention", "reference: decode_attention", ""),
            ("3 x output", "reference: add_product", ""),
            ("2 x norm, router, choice", "reference: route", "3 of 8 experts a row"),
            ("2 x norm, gate, up of experts", "reference: routed_gate_up", "read where they lie"),
            ("2 x down of experts", "reference: add_routed", ""),
            ("1 x norm, gate, up", "reference: norm_gate_up", ""),
            ("1 x down", "reference: add_product", ""),
            ("norm, head", "reference: norm_product", ""),
            ("more than 8 rows", "products by torch (cuBLAS)", "they fill tensor cores"),
            ("experts of prompts, more rows", "grouped by expert: F.grouped_mm", ""),
        ]


WIDTHS = {
    "Mixtral": {"intermediate_size": 2816, "num_local_experts": 8},
    "Qwen3Moe": {"moe_intermediate_size": 384, "intermediate_size": 1408, "num_experts": 64, "num_experts_per_tok": 8},
    "Olmoe": {"intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8},
}


@functools.cache
def served(kind: str, dtype: torch.dtype) -> gb.FastDecoder:
    return gb.decoder(cases.scaled(cases.build(kind, dtype, "cuda:0", **SERVED | WIDTHS[kind])), 16, 512)


@pytest.mark.gpu
class TestOnTheDevice:
    @pytest.mark.parametrize("kind", WIDTHS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rows", [1, 3, 8, 16])
    def test_graphs_give_what_single_launches_give(self, kind, dtype, rows, monkeypatch):
        fast, given = served(kind, dtype), cases.prompts(*range(5, 5 + rows))
        found = fast.generate(given, max_new_tokens=75, logprobs=True).sequences
        again = fast.generate(given, max_new_tokens=75, logprobs=True).sequences  # its prompts by a graph
        monkeypatch.setattr(fast.graphs, "launch", Stepper(fast.body, fast.slots).run)
        want = fast.generate(given, max_new_tokens=75, logprobs=True).sequences
        assert found == again == want
        assert len({token for sequence in want for token in sequence.tokens}) > 20

    @pytest.mark.parametrize("kind", WIDTHS)
    def test_rows_get_the_same_bits_beside_any_others(self, kind):
        """Texts of one token, for a prompt's own products are torch's, and round by its shape."""
        fast, given = served(kind, torch.bfloat16), [[token] for token in range(3, 11)]
        together = fast.generate(given, max_new_tokens=60, logprobs=True).sequences
        for rows in (1, 2, 5):
            assert fast.generate(given[:rows], max_new_tokens=60, logprobs=True).sequences == together[:rows]

    @pytest.mark.parametrize("kind", WIDTHS)
    @pytest.mark.parametrize("rows", [1, 16])
    def test_a_request_waits_for_nothing(self, kind, rows):
        cases.assert_no_syncs(served(kind, torch.bfloat16), cases.prompts(*range(3, 3 + rows)))

    def test_a_graph_reads_the_live_experts(self):
        fast = gb.decoder(cases.build("Qwen3Moe", device="cuda:0"), 1, cases.ROOM)
        before, captured = of_decoder(fast, 48), len(fast.graphs)
        with torch.no_grad():
            for layer in (0, 2):
                fast.model.model.layers[layer].mlp.experts.down_proj.mul_(-1.5)
        assert of_decoder(fast, 48) == cases.hugging_face(fast.model, PROMPT, 48) != before
        assert len(fast.graphs) == captured
