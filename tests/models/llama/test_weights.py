"""Folders in and out: what an export leaves, and what a damaged folder is told."""

import dataclasses
import json
import os
import stat

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gpubound as gb
from gpubound.data import Tokenizer, train_tokenizer
from gpubound.errors import DataError
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from gpubound.models.llama import checkpoint as training
from gpubound.models.storing import special_ids
from tests.messages import message

CONFIG = DecoderConfig(32, 48, 2, 4, 2, 320)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat sat on the mat"] * 4, 300)


def model_of(seed: int, **options) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(dataclasses.replace(CONFIG, **options)).eval()


# --- out ---


def test_an_export_takes_the_place_of_a_model_in_several_files(tmp_path):
    """Whose index would otherwise name the old weights, which both loaders then read."""
    old, new = model_of(1), model_of(2)
    config = transformers.LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(old.state_dict())
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(load_hf(tmp_path).lm_head.weight, old.lm_head.weight)
    save_hf(new, tmp_path, overwrite=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for got in (load_hf(tmp_path).state_dict(), loaded.state_dict()):
        assert all(torch.equal(got[name], tensor) for name, tensor in new.state_dict().items())


def test_an_export_can_be_read_by_whom_the_umask_allows(tmp_path, tokenizer):
    before = os.umask(0o027)
    try:
        save_hf(model_of(0), tmp_path, tokenizer)
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"), 0o640
    )


def test_transformers_finds_where_a_text_ends(tmp_path, tokenizer):
    """It stops at the end of a text and of a turn; else it takes 2 for the end, a token that means something else."""
    save_hf(model_of(0), tmp_path, tokenizer)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ends = [tokenizer.inner.token_to_id(name) for name in ("<|endoftext|>", "<|end|>")]
    assert loaded.generation_config.eos_token_id == loaded.config.eos_token_id == ends
    assert loaded.generation_config.bos_token_id is loaded.config.bos_token_id is None
    with torch.no_grad():  # a model that says <|end|> whatever it reads
        loaded.lm_head.weight.zero_()
        loaded.lm_head.weight[ends[1]] = 1.0
    loaded.model.norm.register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
    ids = torch.tensor([tokenizer.encode("the cat")])
    got = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert got[0].tolist() == [*ids[0].tolist(), ends[1]]


def test_our_own_decoder_stops_there_too(tmp_path, tokenizer):
    assert gb.decoder(load_hf(save_hf(model_of(0), tmp_path)), 1, 32, verify="quick").ends == []
    assert gb.decoder(load_hf(save_hf(model_of(0), tmp_path, tokenizer, overwrite=True)), 1, 32, verify="quick").ends == [0, 4]


def test_what_a_fine_tuned_model_called_its_tokens_stays(tmp_path, tokenizer):
    """pad, bos, unk and more than one end, through load, training's tokenizer and export."""
    source = tmp_path / "source"
    save_hf(model_of(0), source, tokenizer)
    about = json.loads((source / "tokenizer_config.json").read_text())
    about |= {"bos_token": "<|user|>", "unk_token": {"content": "<|system|>", "lstrip": False}, "pad_token": "<|end|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "temperature": 0.6, "do_sample": True}))
    model, own = load_hf(source), Tokenizer.load(source)
    own.save(tmp_path / "corpus")
    save_hf(model, tmp_path / "tuned", Tokenizer.load(tmp_path / "corpus"))
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert [getattr(theirs, name) for name in names[:4]] == ["<|user|>", "<|endoftext|>", "<|system|>", "<|end|>"]
    assert theirs.chat_template == tokenizer.chat_template
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "tuned")
    assert (generation.eos_token_id, generation.bos_token_id, generation.pad_token_id) == ([0, 4, 7], 2, 4)
    assert generation.temperature == 0.6


def test_an_older_tokenizers_files_do_not_speak_for_the_new_one(tmp_path, tokenizer):
    (tmp_path / "chat_template.jinja").write_text("old")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    save_hf(model_of(0), tmp_path, tokenizer, overwrite=True)
    assert Tokenizer.load(tmp_path).chat_template == tokenizer.chat_template
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.chat_template, theirs.eos_token) == (tokenizer.chat_template, "<|endoftext|>")


def test_an_end_beyond_the_vocabulary_is_left_out(tokenizer):
    model = model_of(0)
    model.generation = {"eos_token_id": [9999, 7]}
    assert special_ids(model, tokenizer)["eos_token_id"] == [0, 4, 7]


def test_an_export_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    save_hf(model_of(1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def torn(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gpubound.models.storing.save_file", torn)
    with pytest.raises(DataError, check=message("models/llama/weights:an_export_that_fails_lea")):
        save_hf(model_of(2), tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- in ---


@pytest.fixture
def folder(tmp_path):
    return save_hf(model_of(0), tmp_path / "model")


def said(folder) -> str:
    with pytest.raises(DataError) as error:
        load_hf(folder)
    return str(error.value)


def change(folder, **fields) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | fields))


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                  "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"])  # fmt: skip
@pytest.mark.parametrize("value", [-1, 0, "64", 2.5, True, [], 10**30])
def test_a_size_that_is_none(folder, name, value):
    change(folder, **{name: value})
    if name == "head_dim" and value == 0:
        return  # which some configs say for hidden / heads
    largest = 2**31 if name == "max_position_embeddings" else 2**24
    assert said(folder) == message(
        "models/llama/weights:a_size_that_is_none", folder / "config.json", name, repr(value), largest
    )


@pytest.mark.parametrize(
    "fields,sentence",
    [
        ({"hidden_size": None}, "has no 'hidden_size'; is it a model's?"),
        ({"rms_norm_eps": None}, "has no 'rms_norm_eps'; is it a model's?"),
        ({"rms_norm_eps": "1e-5"}, ": rms_norm_eps: got '1e-5', wanted a number above 0."),
        ({"rms_norm_eps": float("nan")}, ": rms_norm_eps: got nan, wanted a number above 0."),
        ({"rope_parameters": {"rope_theta": 10**400}}, f": rope_theta: got {10**400}, wanted a number above 0."),
        ({"rope_parameters": []}, ": rope_parameters: got [], wanted an object or null."),
        ({"tie_word_embeddings": "no"}, ": tie_word_embeddings: got 'no', wanted true or false."),
        ({"dtype": "float8"}, ": dtype: got 'float8', wanted one of float32, bfloat16, float16, float64."),
        ({"dtype": 16}, ": dtype: got 16, wanted one of float32, bfloat16, float16, float64."),
        ({"dtype": "nn"}, ": dtype: got 'nn', wanted one of float32, bfloat16, float16, float64."),
        ({"eos_token_id": "</s>"}, ": eos_token_id: got '</s>', wanted a token's number, a list of them, or null."),
        ({"num_hidden_layers": 10**7}, ": num_hidden_layers: got 10000000, but its tensors have 2 layers; check that "
                                       "config.json belongs to these weights."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_field_that_is_wrong(folder, fields, sentence):
    change(folder, **fields)
    assert said(folder) in (f"{folder / 'config.json'}{sentence}", f"{folder / 'config.json'} {sentence}")


def test_heads_that_do_not_fit(folder):
    change(folder, num_key_value_heads=3)
    assert said(folder).startswith(
        f"{folder / 'config.json'}: got hidden_size 32, num_attention_heads 4, num_key_value_heads 3"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_config_without_a_dtype_has_that_of_its_tensors(folder, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    change(folder, dtype=None, torch_dtype=None)
    assert {tensor.dtype for tensor in load_hf(folder).state_dict().values()} == {dtype}


def test_tensors_of_another_shape(folder):
    change(folder, intermediate_size=40)
    assert said(folder) == message("models/llama/weights:tensors_of_another_shape", folder / "model.safetensors")


def test_tensors_that_are_codes(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}, folder / "model.safetensors")
    assert said(folder).startswith(f"{folder / 'model.safetensors'}: lm_head.weight is I8, wanted one of F64, F32, F16, BF16;")


def test_a_weights_file_that_is_a_pointer_of_git_lfs(folder):
    file = folder / "model.safetensors"
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123\n")
    assert said(folder) == message("models/llama/weights:a_pointer_of_git_lfs", file)


def test_a_weights_file_that_may_not_be_read(folder, monkeypatch):
    """It was called incomplete. Everything may be read by root, as which tests may run."""
    file = folder / "model.safetensors"

    usual = type(file).open

    def opened(path, *arguments, **options):
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(file), "open", opened)
        got = said(folder)
    assert got == message("models/llama/weights:may_not_be_read", file)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 64, b"garbage" * 99, "half", "header"])
def test_a_weights_file_that_is_damaged(folder, content):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"half": whole[: len(whole) // 2], "header": whole[:9] + b"{" + whole[10:]}.get(content, content))
    assert said(folder).startswith(f"{file} is not a complete safetensors file: ")


@pytest.mark.parametrize(
    "content,sentence",
    [
        ("{", ": is not JSON ("),
        ("[]", ": holds a JSON list, wanted an object; "),
        ("{}", ": weight_map: wanted an object that gives a file's name for each tensor; "),
        ('{"weight_map": {"a": 5}}', ": weight_map: wanted an object that gives a file's name for each tensor; "),
        ('{"weight_map": {"a": "../other.safetensors"}}', ": names the file '../other.safetensors', wanted the name of a file"),
        (
            '{"weight_map": {"a": "/etc/passwd"}}',
            ": names the file '/etc/passwd', wanted the name of a file in the same folder",
        ),
    ],
)
def test_an_index_that_is_damaged(folder, content, sentence):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert said(folder).startswith(f"{folder / 'model.safetensors.index.json'}{sentence}")


def test_frequencies_that_old_checkpoints_hold_are_passed_over(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    assert torch.equal(load_hf(folder).lm_head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize(
    "kind, ours", [("llama", True), ("mistral", True), ("smollm3", False), ("gemma2", False), ("nobody", False)]
)
def test_training_reads_the_folders_that_our_decoder_computes(kind, ours, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert training.reads(tmp_path) is ours
