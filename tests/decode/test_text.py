"""Texts that arrive token by token: nothing is shown that a later token may change, and all is shown in the end."""

import random

import pytest

from gpubound.data import Tokenizer
from gpubound.decode.text import TextCodec, TextStream

from .cases import Bytes


class Marked:
    """As SentencePiece decodes: a token begins with a mark for a space, and the first space of a text is left out."""

    words = ("▁a", "▁rat", "s", "▁", "é", "▁an", "t", ".")

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.words[token] for token in tokens).replace("▁", " ").removeprefix(" ")


class Contextual(Bytes):
    """A decode that is no concatenation: a space before a full stop is cleaned up."""

    def decode(self, tokens: list[int]) -> str:
        return super().decode(tokens).replace(" .", ".")


def arriving(tokenizer, tokens: list[int], sizes, stops=(), ends=()) -> tuple[list[str], str, TextStream]:
    text, pieces, at = TextStream(tokenizer, stops, ends), [], 0
    while at < len(tokens) and not text.stopped:
        size = next(sizes)
        pieces.append(text.add(tokens[at : at + size]))
        at += size
    if not text.stopped:
        pieces.append(text.rest())
    return pieces, text.complete(), text


def ones():
    while True:
        yield 1


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size_are_the_whole(seed):
    dice = random.Random(seed)
    text = "".join(dice.choice(["añb", "漢字", "🙂", " x", "\n", "e\u0301"]) for _ in range(200))
    for tokenizer, tokens in ((Bytes(), list(text.encode())), (Marked(), [dice.randrange(8) for _ in range(700)])):
        pieces, whole, _ = arriving(tokenizer, tokens, iter(lambda: dice.randrange(1, 40), 0))
        assert "".join(pieces) == whole == tokenizer.decode(tokens)


def test_a_character_is_shown_when_its_last_byte_is_there():
    pieces, _, _ = arriving(Bytes(), list("né🙂".encode()), ones())
    assert pieces == ["n", "", "é", "", "", "", "🙂", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    pieces, whole, _ = arriving(Bytes(), [65, 0xF0, 0x9F], ones())
    assert pieces == ["A", "", "", "\ufffd"] and whole == "A\ufffd"


def test_a_long_text_is_decoded_in_stretches():
    """As many characters again as there are tokens, a few times; not their square."""

    class Counting(Bytes):
        read = 0

        def decode(self, tokens):
            self.read += len(tokens)
            return super().decode(tokens)

    tokenizer = Counting()
    pieces, whole, _ = arriving(tokenizer, list(b"abcdefgh" * 500), ones())
    assert "".join(pieces) == whole == "abcdefgh" * 500
    assert tokenizer.read < 100 * 4000


def test_a_decode_that_depends_on_what_follows_is_still_the_whole():
    tokens = list(b"one . two . three . " * 40)
    _, whole, _ = arriving(Contextual(), tokens, ones())
    assert whole == Contextual().decode(tokens)


def test_the_beginning_of_a_stop_string_is_held_back():
    pieces, whole, row = arriving(Bytes(), list(b"an <e <en> <end> more"), ones(), stops=["<end>"])
    assert whole == "an <e <en> " == "".join(pieces)
    assert row.stopped
    assert pieces[:12] == ["a", "n", " ", "", "", "<e ", "", "", "", "<en>", " ", ""]  # held while '<e' might go on


def test_the_first_of_several_stop_strings_counts():
    for stops in (["two", "one"], ["one", "two"]):
        _, whole, _ = arriving(Bytes(), list(b"zero one two"), iter([12]), stops=stops)
        assert whole == "zero "


def test_a_stop_string_across_pieces_and_inside_characters():
    pieces, whole, _ = arriving(Bytes(), list("añ漢b".encode()), ones(), stops=["漢b"])
    assert whole == "añ" == "".join(pieces)


def test_a_stop_string_at_the_very_beginning():
    pieces, whole, row = arriving(Bytes(), list(b"end"), ones(), stops=["end"])
    assert (whole, "".join(pieces), row.tokens_before_stop()) == ("", "", 0)


@pytest.mark.parametrize(("text", "stop", "kept"), [("añ漢b", "漢", 3), ("añ漢b", "b", 6), ("abc", "bc", 1)])
def test_the_tokens_that_write_the_text_before_a_stop_string(text, stop, kept):
    _, whole, row = arriving(Bytes(), list(text.encode()), iter([99]), stops=[stop])
    assert row.tokens_before_stop() == kept and Bytes().decode(list(text.encode())[:kept]) == whole


def test_a_stop_string_that_never_comes():
    pieces, whole, row = arriving(Bytes(), list(b"abc<en"), ones(), stops=["<end>"])
    assert whole == "abc<en" == "".join(pieces) and pieces[-1] == "<en" and not row.stopped


def test_a_stop_token_is_no_text():
    pieces, whole, _ = arriving(Bytes(), [65, 66, 3], ones(), ends=[3])
    assert whole == "AB" == "".join(pieces)


def test_rows_do_not_mix():
    first, second = (TextStream(Bytes(), ["x"]) for _ in range(2))
    assert [first.add([65, 0xC3]), second.add([66, 120, 67]), first.add([0xA9])] == ["A", "B", "é"]
    assert [first.stopped, second.stopped] == [False, True]


def test_without_a_tokenizer_there_are_no_texts():
    text = TextStream(None)
    assert text.add([65]) is None and text.complete() is None and text.rest() == ""


def word_tokenizers():
    """The same words as tokenizers of three packages: two special tokens, one of them beyond the base vocabulary."""
    import transformers
    from tokenizers import Tokenizer as Inner, models, pre_tokenizers, processors

    inner = Inner(models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "<|endoftext|>", "<|mask|>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 10)])
    special = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    return {"tokenizers": inner, "transformers": theirs, "gpubound": Tokenizer(inner, **special)}


@pytest.mark.parametrize("kind", ["tokenizers", "transformers", "gpubound"])
def test_one_codec_for_tokenizers_of_all_kinds(kind):
    codec = TextCodec(word_tokenizers()[kind])
    assert (codec.eos, codec.mask, codec.size(0)) == (11, 12, 13)
    assert codec.encode("w3 w4") == [10, 3, 4]
    assert TextCodec(codec.tokenizer, skip_special=True).decode([10, 3, 11]) == "w3"
    assert TextCodec(codec.tokenizer, skip_special=False).decode([10, 3, 11]).split() == ["<s>", "w3", "<|endoftext|>"]


@pytest.mark.parametrize("kind", ["tokenizers", "transformers", "gpubound"])
def test_a_text_with_its_special_tokens_gets_them_once(kind):
    """apply_chat_template(tokenize=False) writes them, and encode added them again."""
    codec = TextCodec(word_tokenizers()[kind])
    assert codec.encode("<s> w3 w4") == [10, 3, 4]
    assert codec.encode("") == [10]


def test_any_object_with_encode_and_decode_is_a_tokenizer():
    codec = TextCodec(Bytes())
    assert codec.encode("AB") == [65, 66] and codec.decode([65]) == "A"
    assert (codec.eos, codec.mask, codec.pad, codec.size(89)) == (None, None, None, 89)
    with pytest.raises(ValueError, match="here: tokenizer: got a dict"):
        TextCodec({}, "here")
