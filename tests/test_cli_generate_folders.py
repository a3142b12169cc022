"""The folders that `gpubound generate` is given: other families, code of their own, chat templates, masked diffusion."""

import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.chat_template_utils import render_jinja_template

from gpubound.cli import main
from gpubound.data import Tokenizer, chat
from gpubound.data.chat import render
from gpubound.decode import MaskedSampler
from gpubound.errors import DataError
from gpubound.generate import options as sources
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from tests.messages import message

from . import by_heart
from .models.llama.test_masked import DREAM, LLADA, write
from .train.runs import build_corpus, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures


@pytest.fixture
def gpt2(ckpt, tmp_path):
    """A folder that transformers alone reads."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=0, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    Tokenizer.load(ckpt).save(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def change(folder, file="config.json", **fields) -> None:
    about = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(about | fields))


def refused(run, folder, *argv) -> str:
    code, out, err = run(folder, *(argv or ("--prompt", "the cat")))
    assert (code, out) == (2, "") and "Traceback" not in err
    return err.splitlines()[-1].removeprefix("gpubound generate: ")


# --- by transformers ---


def test_weights_that_are_missing_are_not_made_up(gpt2, run):
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    tensors = {name: t for name, t in model.state_dict().items() if ".h.0." not in name and name != "lm_head.weight"}
    model.save_pretrained(gpt2, state_dict=tensors)
    assert refused(run, gpt2).startswith(
        f"{gpt2}: its tensors are not those of its config: missing keys ['transformer.h.0.attn.c_attn.bias'"
    )


def test_of_our_own_families_too(ckpt, run, tmp_path):
    """An activation that the decoder lacks sends the folder to transformers."""
    folder = save_hf(load_hf(ckpt), tmp_path / "odd", Tokenizer.load(ckpt))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if ".layers.0." not in name}, folder / "model.safetensors", {"format": "pt"}
    )
    change(folder, hidden_act="gelu")
    assert "missing keys ['model.layers.0." in refused(run, folder)


@pytest.mark.parametrize("fields", [{"n_layer": 10**9}, {"n_embd": -1}, {"n_head": 0}, {"vocab_size": "x"}, {"n_embd": 48},
                                    {"dtype": "float5"}, {"n_head": None}, {"activation_function": "none"}])  # fmt: skip
def test_a_config_that_is_wrong(gpt2, run, fields):
    change(gpt2, **fields)
    assert str(gpt2) in refused(run, gpt2)


@pytest.mark.parametrize("content", [b"", b"garbage" * 99, "half"])
def test_weights_that_are_damaged(gpt2, run, content):
    file = gpt2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:999] if content == "half" else content)
    assert str(gpt2) in refused(run, gpt2)


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(ckpt, run, tmp_path, monkeypatch):
    """transformers would ask on stdout whether to run it, and read the answer from stdin."""
    folder = tmp_path / "own"
    save_hf(load_hf(ckpt), folder, Tokenizer.load(ckpt))
    change(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"})
    (folder / "own.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    assert refused(run, folder) == message("cli_generate_folders:code_in_a_folder_is_not", folder)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # which transformers adds that folder to
    code, out, err = run(folder, "--prompt", "the cat", "--trust-remote-code")
    assert (tmp_path / "ran").exists() and (code, out) == (0, message("cli_generate_folders:code_in_a_folder_is_not.2")), err


def test_without_fused_kernels_a_model_of_ours_runs_by_transformers_forward(ckpt, run):
    code, out, err = run(ckpt, "--prompt", "the cat", "--no-fused")
    assert (code, out) == (0, message("cli_generate_folders:without_fused_kernels_a")) and message(
        "cli_generate_folders:without_fused_kernels_a.2"
    ).within(err)


# --- by name ---


def test_a_name_on_the_hub_without_a_connection(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert refused(run, "nobody/no-model") == message("cli_generate_folders:a_name_on_the_hub_withou")


def test_a_name_on_the_hub_is_what_its_cache_holds(ckpt, run, tmp_path, monkeypatch):
    """A folder of that name goes first, and a path into a folder that is there is no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(ckpt))
    code, out, err = run("owner/cat-model", "--prompt", "the cat")
    assert (code, out) == (0, message("cli_generate_folders:a_name_on_the_hub_is_wha")) and err.startswith(f"{ckpt}: ")
    (tmp_path / "owner").mkdir()
    assert refused(run, "owner/cat-model").startswith("owner/cat-model: there is no such folder; wanted")
    assert not sources.is_hub_name("../model") and not sources.is_hub_name("a/b/c") and not sources.is_hub_name("model")


def test_a_name_without_the_hubs_library(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpubound.generate.options.find_spec", lambda name: None)
    assert refused(run, "owner/model").endswith("which is not installed: pip install 'gpubound[hf]'.")


# --- tokenizers and chat templates ---


@pytest.fixture
def chatting(ckpt, tmp_path):
    def make(**fields):
        save_hf(load_hf(ckpt), tmp_path, Tokenizer.load(ckpt), overwrite=True)
        change(tmp_path, "tokenizer_config.json", **fields)
        return tmp_path

    return make


@pytest.mark.parametrize(
    "fields,sentence",
    [
        ({"eos_token": 5}, "eos_token: got 5, wanted a token's text or null."),
        ({"eos_token": {"text": []}, "pad_token": []}, "pad_token: got [], wanted a token's text or null."),
        ({"eos_token": "nowhere"}, "the end-of-text token 'nowhere' is not in its vocabulary; name one that is."),
    ],
)
def test_a_tokenizer_that_is_wrong(chatting, run, fields, sentence):
    assert refused(run, chatting(**fields)).endswith(sentence)


@pytest.mark.parametrize(
    "template,sentence",
    [
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError: division by zero"),
        ("{{ messages + 1 }}", "chat template: TypeError: can only concatenate list"),
        ("{% for m in messages %}", "chat template: Unexpected end of template."),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ 'x' * 10 ** 12 }}", "memory"),
        ("{{ 'x' * 2 * 10 ** 7 }}", "20,000,000 characters"),
    ],
)
def test_a_template_that_fails(template, sentence):
    with pytest.raises((DataError, ValueError)) as error:
        render(template, [{"role": "user", "content": "a"}], True)
    assert sentence in str(error.value)


def test_a_template_that_does_not_end(monkeypatch):
    """Its process is ended by the kernel; the next template has a new one."""
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.1)
    monkeypatch.setattr(chat, "_process", None)
    chats = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match=r"0\.1 seconds"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", chats)
    assert render("{{ messages[0].content }}", chats) == "a"


def test_a_template_that_refuses(chatting, run):
    folder = chatting(chat_template="{{ raise_exception('no system here') }}")
    assert "chat template: no system here" in refused(run, folder, "--chat")


def test_templates_are_rendered_as_transformers_renders_them():
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<{{ m.content }}>"
        "{% endgeneration %}{% else %}{{ m | tojson }}{{ m.content }}\n{% endif %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{% if add_generation_prompt %}>{% endif %}{{ pad_token }}"
    )
    messages = [{"role": "user", "content": "<é> & 'x'"}, {"role": "assistant", "content": "b"}]
    names = {"chat_template": template, "bos_token": "^", "pad_token": "_"}
    theirs = [render_jinja_template([messages], add_generation_prompt=prompt, **names)[0][0] for prompt in (True, False)]
    assert [render(template, messages, prompt, bos_token="^", pad_token="_") for prompt in (True, False)] == theirs
    assert theirs[0] == message("cli_generate_folders:the_built_in_templates_a")


def test_of_several_templates_the_default_speaks(chatting, run):
    whole = Tokenizer.load(chatting()).chat_template
    folder = chatting(chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": whole}])
    assert run(folder, "--chat", stdin="hello\n")[:2] == (0, "hi, how are you?\n")


def test_a_prompt_in_a_pipe_that_is_not_utf8(ckpt, run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert refused(run, ckpt, "--n", "1").startswith("stdin is not a text in UTF-8: ")


def test_more_than_the_memory_holds_is_refused_before_it_is_taken(ckpt, run, gpt2):
    for folder, argv in ((ckpt, ("--max-length", "100000000000")), (ckpt, ("--n", "1000000000")), (gpt2, ("--n", "100000000"))):
        assert " free on CPU" in refused(run, folder, "--prompt", "the cat", *argv)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpubound.device.interpreted", lambda: False)
        changes = {"model": "diffusion-tiny", "objective": "diffusion", "steps": 3}
        run, _ = train(recipe(build_corpus(folder / "corpus"), folder / "run", **changes))
        run.export(folder / "run" / "hf")
    return folder / "run", run


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr("gpubound.device.interpreted", lambda: False)

    def run(*argv):
        code = main(["generate", *map(str, argv), "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_it_writes_what_the_sampler_does(trained, command):
    folder, run = trained
    options = ["--prompt", "import", "--prompt", "def", "--max-new-tokens", "8", "--block", "4", "--denoising-steps", "4"]
    drawn = [*options, "--temperature", "1.5", "--seed", "3", "--n", "2", "--ignore-eos"]
    code, out, err = command(folder / "hf", *drawn, "--json")
    assert code == 0 and message("cli_generate_masked:it_writes_what_the_sampl").within(err)
    told = json.loads(out)
    sampler = MaskedSampler(run.model.eval(), run.tokenizer, ends=[])
    want = sampler.generate(["import", "def"], 8, block=4, steps=4, temperature=1.5, seed=3, n=2)
    assert [sequence["tokens"] for sequence in told["sequences"]] == want.tokens
    assert [sequence["prompt"] for sequence in told["sequences"]] == ["import", "import", "def", "def"]
    assert told["steps"] == 4 and told["bytes_a_step"] is None and told["roofline"] is None
    texts = command(folder / "hf", *options)[1]
    assert texts.startswith("--- 1: 'import'\n") and "--- 2: 'def'\n" in texts
    assert texts == command(sorted((folder / "checkpoints").iterdir())[-1], *options)[1]


@pytest.mark.slow
def test_by_itself_it_takes_blocks_of_32(trained, command):
    _, out, _ = command(trained[0], "--prompt", "import", "--denoising-steps", "8", "--json", "--ignore-eos")
    assert len(json.loads(out)["sequences"][0]["tokens"]) == 128 and json.loads(out)["steps"] == 8
    code, _, err = command(trained[0], "--prompt", "import", "--denoising-steps", "3")
    assert code == 2 and message("cli_generate_masked:by_itself_it_takes_block").within(err)


def test_steps_are_those_of_the_optimizer(trained, command):
    code, _, err = command(trained[0], "--prompt", "import", "--steps", "8")
    assert code == 2 and "--denoising-steps" in err


def test_options_of_the_other_kind_are_refused(trained, command, tmp_path):
    hf = trained[0] / "hf"
    for option in (["--top-k", "3"], ["--speculate", "2"], ["--no-fused"], ["--stop", "x"]):
        code, _, err = command(hf, "--prompt", "a", *option)
        name = option[0].removeprefix("--").removeprefix("no-")
        assert code == 2
        assert err.splitlines()[-1] == message("cli_generate_masked:options_of_the_other_kin", name, hf)
    torch.manual_seed(0)
    causal = save_hf(Decoder(DecoderConfig(16, 32, 1, 2, 1, 320)), tmp_path / "causal", Tokenizer.load(hf))
    code, _, err = command(causal, "--prompt", "a", "--block-cache")
    assert code == 2 and message("cli_generate_masked:options_of_the_other_kin.2", causal).within(err)


@pytest.mark.slow
def test_published_folders(command, tmp_path):
    """LLaDA's is trained for a step, and generated from before and after it; Dream's has no tokenizer.json."""
    write(tmp_path / "llada", LLADA, tokenizer=True)
    options = ["--prompt", "def main", "--max-new-tokens", "8", "--denoising-steps", "2", "--ignore-eos", "--json"]
    code, out, _ = command(tmp_path / "llada", *options)
    assert code == 0 and len(json.loads(out)["sequences"][0]["tokens"]) == 8
    cached = json.loads(command(tmp_path / "llada", *options[:4], *options[6:], "--threshold", "0.9", "--block-cache")[1])
    assert len(cached["sequences"][0]["tokens"]) == 8 and 1 <= cached["steps"] <= 8
    (tmp_path / "text.txt").write_text("def main(): return 1\n" * 200)
    changes = {"model": str(tmp_path / "llada"), "objective": "diffusion", "steps": 1, "data": (str(tmp_path / "text.txt"),)}
    run, _ = train(recipe("", tmp_path / "run", **changes))
    assert run.objective.mask_token == LLADA["mask_token_id"]
    exported = run.export(tmp_path / "hf")
    assert json.loads((exported / "config.json").read_text())["model_type"] == "llada"
    assert json.loads(command(exported, *options)[1])["sequences"][0]["tokens"]

    write(tmp_path / "dream", DREAM)
    code, _, err = command(tmp_path / "dream", *options)
    assert code == 2 and "--tokenizer FOLDER" in err
    code, out, _ = command(tmp_path / "dream", *options, "--tokenizer", tmp_path / "llada")
    assert code == 0 and len(json.loads(out)["sequences"][0]["tokens"]) == 8


def test_a_conversation(command, tmp_path, monkeypatch):
    """A turn sees those before it; an end of turn ends a reply, and a long one is refused."""
    write(tmp_path, LLADA | {"max_sequence_length": 64}, tokenizer=True)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = Tokenizer.load(tmp_path)
    Tokenizer(tokenizer.inner, tokenizer.eos_token, template, **tokenizer.special).save(tmp_path, overwrite=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("def\n" + "a " * 60 + "\n"))
    options = ["--max-new-tokens", "8", "--denoising-steps", "2", "--ignore-eos", "--json"]
    code, out, err = command(tmp_path, "--chat", *options)
    messages = json.loads(out)["messages"]
    assert code == 2 and "smaller --max-new-tokens" in err
    assert [message["role"] for message in messages] == ["user", "assistant"]
    rendered = "user: def\n"
    want = json.loads(command(tmp_path, "--prompt", rendered, *options)[1])["sequences"][0]
    assert messages[1]["content"] == want["text"]
