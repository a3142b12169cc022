"""Mixtures of experts: Hugging Face's tokens in every form of a step, what the certificate finds, live weights, no host."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
import transformers

import gpubound as gb
from gpubound import trace
from gpubound.decode import certify, experts, live
from gpubound.decode.experts import ExpertsBody, each_expert, grouped, not_grouped
from gpubound.decode.graphs import Way, run_steps
from gpubound.decode.live_experts import Experts as SparseMLP
from gpubound.kernels.experts import likeliest
from gpubound.watch import no_stall, watch
from gpubound.watch.simgpu import simgpu

from . import cases

KINDS = pytest.mark.parametrize("kind", cases.SPARSE)
PROMPT = cases.prompts(7)[0]


def of_model(fast, new: int = 24) -> list[int]:
    return cases.greedy_by_forwards(fast.model, PROMPT, new)


def of_decoder(fast, new: int = 24) -> list[int]:
    return fast.generate(PROMPT, max_new_tokens=new).tokens[0]


class TestTokens:
    @KINDS
    def test_a_ragged_batch_gives_hugging_faces(self, kind, device):
        fast = cases.shared(kind, str(device))
        assert fast.path == "" and isinstance(fast.body, ExpertsBody)
        together = fast.generate(cases.prompts(), max_new_tokens=64).tokens
        assert together == [cases.hugging_face(fast.model, prompt, 64) for prompt in cases.prompts()]
        assert len({*together[0], *together[1], *together[2]}) > 8

    @pytest.mark.parametrize("options", [{"norm_topk_prob": False, "mlp_only_layers": []}, {"decoder_sparse_step": 2}])
    def test_options_of_qwen3(self, options, device):
        fast = gb.decoder(cases.build("Qwen3Moe", device=device, **options), 1, cases.ROOM)
        assert of_decoder(fast, 48) == cases.hugging_face(fast.model, PROMPT, 48)

    def test_a_model_of_the_family_without_any_experts(self, device):
        fast = gb.decoder(cases.build("Qwen3Moe", device=device, mlp_only_layers=[0, 1, 2]), 1, cases.ROOM)
        assert fast.path == "" and not isinstance(fast.body, ExpertsBody)
        assert of_decoder(fast) == cases.hugging_face(fast.model, PROMPT, 24)

    @KINDS
    def test_beside_any_others_and_in_wide_batches(self, kind, device):
        """Up to 8 rows by the same kernels, 11 grouped by expert: in fp32 the tokens are the same."""
        fast, given = cases.shared(kind, str(device), max_batch=11), cases.prompts(*range(1, 12))
        alone = [fast.generate(prompt, max_new_tokens=24).tokens[0] for prompt in given]
        for rows in (2, 5, 8, 11):
            assert fast.generate(given[:rows], max_new_tokens=24).tokens == alone[:rows]
        assert fast.generate(given[:8][::-1], max_new_tokens=24).tokens == alone[:8][::-1]

    @pytest.mark.parametrize("width", [21, 22])
    def test_where_grouped_products_cannot_be(self, width, device):
        """Rows of 84 and 88 bytes. The model's own forward has to be told to do without."""
        model = cases.build("Mixtral", device=device, intermediate_size=width)
        model.config._experts_implementation = "eager"
        fast = gb.decoder(model, 9, cases.ROOM)
        why = "F.grouped_mm wants rows of a multiple of 16 bytes"
        assert fast.body.report()[-2:] == [
            ("experts of prompts", "every expert for all tokens, by torch", why),
            ("experts of more than 8 rows", "as of one row", why),
        ]
        given = cases.prompts(*range(1, 10))
        want = [cases.hugging_face(fast.model, prompt, 24) for prompt in given[::4]]
        assert fast.generate(given, max_new_tokens=24).tokens[::4] == want

    def test_a_prompt_in_pieces(self, monkeypatch, device):
        want = cases.shared("Mixtral", str(device)).generate(cases.prompts(45, 30), max_new_tokens=16).tokens
        monkeypatch.setattr(experts, "PIECE", 7)
        fast = gb.decoder(cases.build("Mixtral", device=device), 2, cases.ROOM)
        assert fast.generate(cases.prompts(45, 30), max_new_tokens=16).tokens == want

    @pytest.mark.parametrize("draft", ["text", "model"])
    def test_speculative_steps(self, draft, device):
        """Five tokens of each row at once: 5 rows to the kernels, or 15, which are grouped."""
        plain = cases.shared("Qwen3Moe", str(device))
        twin = gb.Draft(cases.build("Qwen3Moe", device=device)) if draft == "model" else 4
        fast = gb.decoder(plain.model, 3, cases.ROOM, speculate=twin)
        for given in (cases.prompts(7), cases.prompts()):
            for how in ({}, {"temperature": 1.0, "seed": 3}):
                found = fast.generate(given, max_new_tokens=40, **how)
                assert found.tokens == plain.generate(given, max_new_tokens=40, **how).tokens
                assert found.tokens_a_step > 4 or draft == "text"

    @pytest.mark.parametrize("options", [{"cache": "int8"}, {"pages": 9}])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_other_caches(self, options, dtype, device):
        """Certified too: rounded keys move scores, and the choice is judged by what rounds alike."""
        fast = gb.decoder(cases.build("Qwen3Moe", dtype, device), 9, cases.ROOM, **options)
        given = cases.prompts(5, 9, 3)
        assert fast.generate(given, max_new_tokens=16).tokens == [
            fast.generate(prompt, max_new_tokens=16).tokens[0] for prompt in given
        ]

    def test_scores(self, device):
        fast, ids = cases.shared("Qwen3Moe", str(device)), cases.prompts(30)[0]
        want = cases.logits(fast.model, ids)[:-1].log_softmax(-1).cpu().gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(fast.score(ids)[0]), want, rtol=0, atol=2e-5)

    def test_a_placed_model(self):
        model = cases.build("Mixtral")
        want = cases.hugging_face(model, PROMPT, 24)
        gb.place(model, device="cpu")
        assert of_decoder(gb.decoder(model, 1, cases.ROOM)) == want

    def test_interpreted_kernels_give_the_same(self, monkeypatch):
        if torch.cuda.is_available():
            pytest.skip("the interpreter replaces compiled kernels for a whole process")
        model, given = cases.build("Qwen3Moe", num_hidden_layers=2), cases.prompts(4, 2)
        want = gb.decoder(model, 2, 16, k=1).generate(given, max_new_tokens=2).tokens
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        fast = gb.decoder(model, 2, 16, k=1, verify=False)
        assert ("1 x norm, router, choice", "triton: route", "3 of 8 experts a row") in fast.body.report()
        assert fast.generate(given, max_new_tokens=2).tokens == want


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
        got = form(h, ids, shares, SparseMLP(scores.t(), gate_up, down))
        assert got.dtype == torch.float32
        assert ((got.double().cpu() - want).norm() / want.norm()).item() < tolerance

    def test_which_one(self):
        whole, odd = torch.zeros(2, 16, 8), torch.zeros(2, 16, 7)
        assert not_grouped(SparseMLP(whole[0], whole, whole)) is None
        assert not_grouped(SparseMLP(whole[0], whole, odd)) == "F.grouped_mm wants rows of a multiple of 16 bytes"

    @pytest.mark.parametrize("form", [grouped, each_expert])
    def test_a_nan_stays_with_the_tokens_of_its_expert(self, form, device):
        h, gate_up, down = torch.ones(4, 8), torch.ones(3, 16, 8), torch.ones(3, 8, 8)
        gate_up[1] = float("nan")
        ids, shares = torch.tensor([[0, 2], [1, 0], [2, 0], [2, 1]]), torch.full((4, 2), 0.5)
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        layer = SparseMLP(torch.zeros(3, 8), gate_up.to(device, half), down.to(device, half))
        y = form(h.to(device, half), ids.to(device), shares.to(device), layer)
        assert y.isnan().all(1).tolist() == y.isnan().any(1).tolist() == [False, True, False, True]


class TestCertificate:
    @KINDS
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_it_holds_in_16_bits(self, kind, dtype, device):
        for rows in (1, 12):
            made = gb.decoder(cases.build(kind, dtype, device), rows, 32).certificate
            assert made.logits_error < 1.5 * made.model_error < 0.05

    def test_logits_are_compared_at_the_same_choice(self, device, monkeypatch):
        """12 layers choose 8 of 32: in bf16 some token gets another expert than in fp32, which says nothing of the kernels."""
        options = {"num_hidden_layers": 12, "num_experts": 32, "num_experts_per_tok": 8, "mlp_only_layers": []}
        model = cases.build("Qwen3Moe", device=device, **options)
        torch.manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
        made = gb.decoder(model.to(torch.bfloat16), 1, 32).certificate
        monkeypatch.setattr(certify.Choices, "__bool__", lambda choices: False)
        apart = gb.decoder(model, 1, 32, verify=False)
        ids = torch.randint(cases.VOCABULARY, (8,), generator=torch.Generator().manual_seed(0)).to(device)
        truth = certify.plain.logits(apart.body.exact(), ids)
        free = ((cases.logits(model, ids.tolist()) - truth).norm() / truth.norm()).item()
        assert free > 1.5 * made.model_error

    @pytest.mark.parametrize(
        ("door", "change"),
        [
            ("route", lambda found: found[1].mul_(1.001)),
            ("routed_gate_up", lambda out: out.mul_(1.001)),
            ("add_routed", lambda x: x.mul_(1.001)),
            ("grouped", lambda y: y.mul_(1.001)),
        ],
    )
    def test_a_kernel_that_is_off_by_a_thousandth(self, door, change, monkeypatch):
        own = getattr(experts, door)

        def off(*given, **named):
            found = own(*given, **named)
            change(found)
            return found

        monkeypatch.setattr(experts, door, off)
        with pytest.raises(gb.GenerateError, match="they do not compute this model; pass fused=False, and report it"):
            gb.decoder(cases.build("Mixtral"), 9, 32)

    def test_a_choice_that_is_not_the_best(self, monkeypatch):
        """The kernel takes the third best for the second."""
        own = experts.route

        def second_best(x, norm, eps, router, normalise, logits, count, ids, weights, *rest):
            own(x, norm, eps, router, normalise, logits, count, ids, weights, *rest)
            order, shares = likeliest(logits, 3, False)
            ids[:, 1], weights[:] = order[:, 2], (shares[:, [0, 2]] / shares[:, [0, 2]].sum(-1, keepdim=True))
            return ids, weights

        monkeypatch.setattr(experts, "route", second_best)
        with pytest.raises(gb.GenerateError) as error:
            gb.decoder(cases.build("Mixtral"), 1, 32)
        assert re.fullmatch(
            r"decoder: the kernels choose experts whose scores lie \d\.\de-0\d deviations below the best in fp32, the model "
            r"itself only 0\.0e\+00: they do not compute this model; pass fused=False, and report it\.",
            str(error.value),
        )

    def test_a_model_that_chooses_otherwise(self):
        model = cases.build("Mixtral")
        gb.decoder(model, 1, 32)
        for block in model.model.layers:
            block.mlp.gate.forward = functools.partial(worst, block.mlp.gate)
        with pytest.raises(gb.GenerateError) as error:
            gb.decoder(model, 1, 32)
        assert re.fullmatch(
            r"decoder: the model's own routers choose experts whose scores lie \d\.\de\+0\d deviations below the best in fp32 "
            r"\(limit 1e-04\): it has an option the kernels do not know; pass fused=False\.",
            str(error.value),
        )

    def test_a_binding_that_leaves_something_out(self, monkeypatch):
        own = live.live_experts.routing
        monkeypatch.setattr(live.live_experts, "routing", lambda model: own(model)._replace(normalise=False))
        with pytest.raises(gb.GenerateError, match=r"it has an option the kernels do not know; pass fused=False\.$"):
            gb.decoder(cases.build("Mixtral"), 1, 32)


def worst(gate, hidden):
    """A router that takes the least likely experts."""
    scores = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
    least = scores.softmax(-1).topk(gate.top_k, largest=False)
    return scores, least.values / least.values.sum(-1, keepdim=True), least.indices


class TestWeights:
    @pytest.fixture(autouse=True)
    def every_notice(self, monkeypatch):
        monkeypatch.setattr(trace, "_said", set())

    @pytest.fixture
    def fast(self) -> gb.FastDecoder:
        return gb.decoder(cases.build("Qwen3Moe"), 2, cases.ROOM)

    def test_a_training_step_is_seen_by_the_next_call(self, fast, capsys):
        before = of_decoder(fast)
        optimizer = torch.optim.AdamW(fast.model.parameters(), lr=0.05)
        ids = torch.tensor([cases.prompts(20)[0]])
        fast.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert of_decoder(fast) == of_model(fast) != before
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.down_proj", "gate.weight"])
    def test_data_replaced_is_bound_anew(self, fast, name, capsys):
        weight = fast.model.get_parameter(f"model.layers.2.mlp.{name}")
        weight.data = weight.data.flip(0).clone()
        assert of_decoder(fast) == of_model(fast)
        assert capsys.readouterr().err == (
            f"gpubound: decoder: model.layers.2.mlp.{name} is no longer where it was; bound to the weights as they are now, "
            "graphs captured again\n"
        )

    def test_a_nan_is_traced_to_its_layer(self, fast):
        with torch.no_grad():
            fast.model.model.layers[2].mlp.experts.down_proj[:, 3, 4] = float("nan")
        with pytest.raises(gb.GenerateError) as error:
            fast.generate([PROMPT, PROMPT[:3]], max_new_tokens=8)
        assert str(error.value) == (
            "sequence 0: the logits at position 6 are not finite; first seen in model.layers.2.mlp. Check the weights (a "
            "diverged training run?) and the dtype."
        )

    def test_what_is_read_is_counted(self, fast):
        """Dense weights once; of 8 experts, 3 a row, as many as are different on average."""
        body, model = fast.body, fast.model
        names = {n: p.numel() for n, p in model.named_parameters() if "experts" not in n and "embed" not in n}
        expert, place = 3 * 24 * 32, 3 * 2 * 2 * 8  # of weights; of keys and values
        for lengths, chosen in (([5], 3), ([5, 7], 8 * (1 - (5 / 8) ** 2)), ([1] * 99, 8)):
            want = 4 * (sum(names.values()) + 2 * chosen * expert + place * sum(lengths))
            assert body.bytes_a_step(lengths) == round(want)
        wide = gb.decoder(model, 1, 32, speculate=1).body
        assert wide.bytes_a_step([5]) - body.bytes_a_step([5]) == 4 * 2 * (8 * (1 - (5 / 8) ** 2) - 3) * expert  # of two tokens


class TestRefusals:
    def test_rounded_weights(self):
        with pytest.raises(ValueError) as error:
            gb.decoder(cases.build("Mixtral"), 1, 32, weights="int8")
        assert str(error.value) == ("decoder: weights: got 'int8', but a mixture of experts is read as it is; leave it out.")

    def test_what_the_kernels_cannot_read(self):
        model = cases.build("Mixtral")
        handle = model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
        assert live.bind(model) == "model.layers.1.mlp.experts: it carries hooks"
        handle.remove()
        model.model.layers[0].mlp.gate.bias = torch.nn.Parameter(torch.zeros(6))
        assert live.bind(model) == "model.layers.0.mlp.gate: MixtralTopKRouter, not the family's own"
        model = cases.build("Mixtral", hidden_act="gelu")
        assert live.bind(model) == "its activation is 'gelu', the kernels' is silu"
        other = cases.build("Mixtral", num_experts_per_tok=3)
        model = cases.build("Mixtral")
        model.model.layers[1].mlp = other.model.layers[1].mlp
        assert live.bind(model) == "its sparse layers differ in experts or width"

    def test_another_family(self):
        """Its experts have a shared one beside them."""
        config = transformers.Qwen2MoeConfig(**cases.SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert live.bind(model).startswith("Qwen2MoeForCausalLM is none of the families with fused kernels")


class TestHost:
    @KINDS
    @pytest.mark.parametrize("rows", [2, 9])
    def test_steps_never_wait_for_the_device(self, kind, rows, monkeypatch):
        """Prompts and 9 rows are grouped by expert there, with offsets that the host does not see."""
        if torch.cuda.is_available():
            pytest.skip("the pretend device contends with a real one")
        sim = simgpu()
        monkeypatch.setattr(live, "_unreadable", lambda model: None)  # its tensors are of a kind of their own
        fast = gb.decoder(cases.build(kind, device=sim), rows, 32, verify=False)
        assert isinstance(fast.body, ExpertsBody)
        given = cases.prompts(*range(3, 3 + rows))
        fast.generate(given, max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
        ids, lengths = torch.zeros(rows, 5, device=sim, dtype=torch.int64), torch.full((rows,), 5, device=sim)
        with no_stall(), torch.no_grad(), watch() as ledger:
            fast.body.prefill(ids, lengths)
            for way in (Way(), Way(greedy=False, penalty=True, logprobs=True)):
                run_steps(fast.body, fast.slots, rows, 2, way)
        ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)
        got = fast.generate(given, max_new_tokens=12).tokens
        assert got == gb.decoder(cases.build(kind), rows, 32, verify=False).generate(given, max_new_tokens=12).tokens

    def test_the_table(self):
        rows = [line.rstrip() for line in str(cases.shared("Qwen3Moe", max_batch=11)).splitlines()[2:-1]]
        assert rows == [
            "  3 x norm, q k v                       reference: norm_product",
            "  3 x rotation, cache, attention        reference: decode_attention",
            "  3 x output                            reference: add_product",
            "  2 x norm, router, choice              reference: route                      3 of 8 experts a row",
            "  2 x norm, gate, up of experts         reference: routed_gate_up             read where they lie",
            "  2 x down of experts                   reference: add_routed",
            "  1 x dense MLP                         reference: norm_gate_up, add_product",
            "  norm, head                            reference: norm_product",
            "  more than 8 rows                      products by torch (cuBLAS)            they fill tensor cores",
            "  experts of prompts, more than 8 rows  grouped by expert: F.grouped_mm",
        ]


SERVED = {  # widths of a real model, few layers
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
WIDTHS = {
    "Mixtral": {"intermediate_size": 2816, "num_local_experts": 8},
    "Qwen3Moe": {"moe_intermediate_size": 384, "intermediate_size": 1408, "num_experts": 64, "num_experts_per_tok": 8},
}


@functools.cache
def served(kind: str, dtype: torch.dtype) -> gb.FastDecoder:
    model = cases.build(kind, dtype, "cuda:0", **SERVED, **WIDTHS[kind])
    with torch.no_grad():  # 0.2, as for 32 wide, would let one word win everywhere
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
    return gb.decoder(model, 16, 512)


@pytest.mark.gpu
class TestOnTheDevice:
    @KINDS
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rows", [1, 3, 8, 16])
    def test_graphs_give_what_single_launches_give(self, kind, dtype, rows, monkeypatch):
        fast, given = served(kind, dtype), cases.prompts(*range(5, 5 + rows))
        found = fast.generate(given, max_new_tokens=75, logprobs=True).sequences
        again = fast.generate(given, max_new_tokens=75, logprobs=True).sequences  # its prompts by a graph
        monkeypatch.setattr(fast.graphs, "launch", lambda rows, steps, way: run_steps(fast.body, fast.slots, rows, steps, way))
        want = fast.generate(given, max_new_tokens=75, logprobs=True).sequences
        assert found == again == want
        assert len({token for sequence in want for token in sequence.tokens}) > 20

    @KINDS
    def test_rows_get_the_same_bits_beside_any_others(self, kind):
        """Texts of one token, for a prompt's own products are torch's, and round by its shape."""
        fast, given = served(kind, torch.bfloat16), [[token] for token in range(3, 11)]
        together = fast.generate(given, max_new_tokens=60, logprobs=True).sequences
        for rows in (1, 2, 5):
            assert fast.generate(given[:rows], max_new_tokens=60, logprobs=True).sequences == together[:rows]

    @KINDS
    @pytest.mark.parametrize("rows", [1, 16])
    def test_a_request_waits_for_nothing(self, kind, rows):
        fast, given = served(kind, torch.bfloat16), cases.prompts(*range(3, 3 + rows))
        for _ in range(2):
            fast.generate(given, max_new_tokens=64)
        torch.cuda.synchronize()
        with watch(gputrace=True) as ledger:
            fast.generate(given, max_new_tokens=64)
        assert ledger.totals["syncs"] == 0, str(ledger)

    def test_a_graph_reads_the_live_experts(self):
        fast = gb.decoder(cases.build("Qwen3Moe", device="cuda:0"), 1, cases.ROOM)
        before, captured = of_decoder(fast, 48), len(fast.graphs)
        with torch.no_grad():
            for layer in (0, 2):
                fast.model.model.layers[layer].mlp.experts.down_proj.mul_(-1.5)
        assert of_decoder(fast, 48) == cases.hugging_face(fast.model, PROMPT, 48) != before
        assert len(fast.graphs) == captured
