"""Mixtures of experts: what the certificate finds, live weights, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

import gpubound as gb
from gpubound import kernels, trace
from gpubound.decode import certificate, moe, weight_view
from gpubound.kernels.experts import likeliest
from gpubound.models.mixtral import SparseReader
from tests.messages import message, refusal

from . import cases
from .cases import PROMPT, SPARSE_KINDS, of_decoder


class TestCertificate:
    @SPARSE_KINDS
    @pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 1), (torch.float16, 12)])
    def test_it_holds_in_16_bits(self, kind, dtype, rows, device):
        made = gb.decoder(cases.build(kind, dtype, device), rows, 32).certificate
        assert made.logits_error < 1.5 * made.model_error < 0.05

    @pytest.mark.slow
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
        monkeypatch.setattr(certificate.RoutingTrace, "__bool__", lambda choices: False)
        apart = gb.decoder(model, 1, 32, verify=False)
        ids = torch.randint(cases.VOCABULARY, (8,), generator=torch.Generator().manual_seed(0)).to(device)
        truth = certificate.reference_logits(apart.body.exact(), ids)
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
        module = moe if hasattr(moe, door) else kernels
        own = getattr(module, door)

        def off(*given, **named):
            found = own(*given, **named)
            change(found)
            return found

        monkeypatch.setattr(module, door, off)
        with pytest.raises(gb.GenerateError, check=message("decode/experts_judged:a_kernel_that_is_off_by")):
            gb.decoder(cases.build("Mixtral"), 9, 32)

    def test_a_choice_that_is_not_the_best(self, monkeypatch):
        """The kernel takes the third best for the second."""
        own = moe.route

        def second_best(x, norm, router, normalise, logits, count, ids, weights, *rest):
            own(x, norm, router, normalise, logits, count, ids, weights, *rest)
            order, shares = likeliest(logits, 3, False)
            ids[:, 1], weights[:] = order[:, 2], (shares[:, [0, 2]] / shares[:, [0, 2]].sum(-1, keepdim=True))
            return ids, weights

        monkeypatch.setattr(moe, "route", second_best)
        with pytest.raises(gb.GenerateError) as error:
            gb.decoder(cases.build("Mixtral"), 1, 32)
        assert re.fullmatch(
            r"decoder: the kernels choose experts whose scores lie \d\.\de-0\d deviations below the best in fp32, the model "
            r"itself only 0\.0e\+00: they do not compute this model; pass fused=False, and report it\.",
            str(error.value),
        )

    def test_a_model_that_chooses_otherwise(self, monkeypatch):
        model = cases.build("Mixtral")
        gb.decoder(model, 1, 32)
        monkeypatch.setattr(type(model.model.layers[0].mlp.gate), "forward", worst)
        with pytest.raises(gb.GenerateError) as error:
            gb.decoder(model, 1, 32)
        assert re.fullmatch(
            r"decoder: the model's own routers choose experts whose scores lie \d\.\de\+0\d deviations below the best in fp32 "
            r"\(limit 1e-04\): it has an option the kernels do not know; pass fused=False\.",
            str(error.value),
        )

    def test_a_binding_that_leaves_something_out(self, monkeypatch):
        own = SparseReader.mlp
        monkeypatch.setattr(SparseReader, "mlp", lambda reader, block: replace(own(reader, block), normalise=False))
        with pytest.raises(gb.GenerateError, check=message("decode/experts_judged:a_binding_that_leaves_so")):
            gb.decoder(cases.build("Mixtral"), 1, 32)


def worst(gate, hidden):
    """A router that takes the least likely experts."""
    scores = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
    least = scores.softmax(-1).topk(gate.top_k, largest=False)
    return scores, least.values / least.values.sum(-1, keepdim=True), least.indices


class TestWeights:
    @pytest.fixture(autouse=True)
    def every_notice(self, monkeypatch):
        monkeypatch.setattr(trace, "_printed", set())

    @pytest.fixture
    def fast(self) -> gb.FastDecoder:
        return gb.decoder(cases.build("Qwen3Moe"), 2, cases.ROOM, verify=False)

    def test_a_training_step_is_seen_by_the_next_call(self, fast, capsys):
        before = of_decoder(fast)
        optimizer = torch.optim.AdamW(fast.model.parameters(), lr=0.05)
        ids = torch.tensor([cases.prompts(20)[0]])
        fast.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert cases.followed(fast) != before
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.down_proj", "gate.weight"])
    def test_data_replaced_is_bound_anew(self, fast, name, capsys):
        weight = fast.model.get_parameter(f"model.layers.2.mlp.{name}")
        weight.data = weight.data.flip(0).clone()
        cases.followed(fast)
        assert capsys.readouterr().err == message("decode/experts_judged:data_replaced_is_bound_a", name)

    def test_a_nan_is_traced_to_its_layer(self, fast):
        with torch.no_grad():
            fast.model.model.layers[2].mlp.experts.down_proj[:, 3, 4] = float("nan")
        assert refusal(gb.GenerateError, lambda: fast.generate([PROMPT, PROMPT[:3]], max_new_tokens=8)) == message(
            "decode/experts_judged:a_nan_is_traced_to_its_l"
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
    def test_what_the_kernels_cannot_read(self):
        model = cases.build("Mixtral")
        handle = model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
        assert weight_view.bind(model) == "model.layers.1.mlp.experts: it carries hooks"
        handle.remove()
        model.model.layers[0].mlp.gate.bias = torch.nn.Parameter(torch.zeros(6))
        assert weight_view.bind(model) == message("decode/experts_judged:what_the_kernels_cannot")
        model = cases.build("Mixtral", hidden_act="gelu")
        assert weight_view.bind(model) == message("decode/experts_judged:what_the_kernels_cannot.2")
        other = cases.build("Mixtral", num_experts_per_tok=3)
        model = cases.build("Mixtral")
        model.model.layers[1].mlp = other.model.layers[1].mlp
        assert weight_view.bind(model) == message("decode/experts_judged:what_the_kernels_cannot.3")

    def test_another_family(self):
        """Its experts have a shared one beside them."""
        config = transformers.GraniteMoeSharedConfig(**cases.SIZES, num_local_experts=4, num_experts_per_tok=2)
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert weight_view.bind(model).startswith("GraniteMoeSharedForCausalLM is none of the families with fused kernels")
