"""Incremental text: equal to the whole decode for every kind of tokenizer, and cut at stops."""

from __future__ import annotations

import random
import string
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from support import tiny_families
from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.serve.text import TextStream

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def fast(model: Any, decoder: Any, clean: bool = False) -> Any:
    made = Tokenizer(model)
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if decoder is not None:
        made.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=clean,
    )


def numbered(*tokens: str) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys((*SPECIAL, *tokens)))}


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS, PUNCTUATION = ("n", "'", "t", "s", "m"), (".", "?", ",", "!")
WORDS = (*LETTERS, *PUNCTUATION, "n't", "'s", "'ve", "a", "do", "been", "\ufffd")


def sentencepiece(clean: bool = False) -> Any:
    """As Llama's: spaces are part of tokens, and unknown characters are byte tokens."""
    tokens = numbered(*BYTES, "▁", "▁▁", "▁▁▁", "▁he", "llo", "▁a", "\n", *string.ascii_lowercase)
    model = models.BPE(vocab=tokens, merges=[], byte_fallback=True, unk_token="<unk>")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return fast(model, decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]), clean)


def unigram() -> Any:
    tokens = [(token, 0.0) for token in (*SPECIAL, "▁", *WORDS, *(f"▁{word}" for word in WORDS))]
    return fast(models.Unigram(tokens, unk_id=3), decoders.Metaspace(), clean=True)


def wordpiece() -> Any:
    tokens = numbered(*WORDS, *(f"##{word}" for word in WORDS))
    return fast(models.WordPiece(tokens, unk_token="<unk>"), decoders.WordPiece(), clean=True)


def words() -> Any:
    """Without a decoder: tokens are joined by spaces."""
    return fast(models.WordLevel(numbered(*WORDS), unk_token="<unk>"), None, clean=True)


def byte_level() -> Any:
    """One token per byte, and one that is not special and not of the alphabet of bytes."""
    made = tiny_families.tokenizer("<image>")
    made.add_tokens(["a😀 b"])
    return made


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece_clean": lambda: sentencepiece(clean=True),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "words": words,
}


@pytest.fixture(scope="module", params=["tiny", *KINDS])
def tokenizer(request: pytest.FixtureRequest, vlm: VLM) -> Any:
    if request.param == "tiny":
        return vlm.processor.tokenizer
    return KINDS[request.param]()


def put_all(stream: TextStream, ids: list[int]) -> tuple[list[str], int]:
    """Pieces after each token and after the end, and the number of tokens until it stopped."""
    pieces = []
    for count, token in enumerate(ids, 1):
        stream.put(torch.tensor([token]))
        pieces.append(stream.take())
        if stream(None, None):
            return pieces, count
    stream.end()
    return [*pieces, stream.take()], len(ids)


def streamed(tokenizer: Any, ids: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    """The pieces of a text that no stop string ends."""
    stream = TextStream(tokenizer, stops)
    pieces, _ = put_all(stream, ids)
    assert not stream.stopped and "".join(pieces) == stream.text
    return pieces


def whole(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.cases(1)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole_decode(tokenizer: Any, data: st.DataObject) -> None:
    size = len(tokenizer)
    one = st.integers(0, size + 3)  # also ids outside the vocabulary
    run = st.tuples(one, st.integers(1, 12)).map(lambda pair: [pair[0]] * pair[1])
    parts = data.draw(st.lists(st.one_of(one.map(lambda token: [token]), run), max_size=40))
    ids = [token for part in parts for token in part]
    assert "".join(streamed(tokenizer, ids)) == whole(tokenizer, ids).strip()


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_any_text_is_streamed(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    if kind == "sentencepiece":
        pieces: list[str] = []
        for sign in text:
            known = sign in string.ascii_lowercase
            pieces += [sign] if known else [f"<0x{byte:02X}>" for byte in sign.encode()]
        ids = tokenizer.convert_tokens_to_ids(pieces)
    else:
        ids = tokenizer(text, add_special_tokens=False).input_ids
    found = "".join(streamed(tokenizer, ids))
    assert found == whole(tokenizer, ids).strip()
    assert found == text.strip() or kind == "sentencepiece"


def test_long_words_are_cleaned_as_a_whole() -> None:
    """A control of the context: one word longer than it, before a space that is removed."""
    tokenizer = wordpiece()
    ids = tokenizer.convert_tokens_to_ids(
        ["a", *["##do"] * 40, "'", "s", *["##n"] * 30, ",", "n", "'", "t"]
    )
    found = "".join(streamed(tokenizer, ids))
    assert found == whole(tokenizer, ids)
    assert found != tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_cleaning_of_bpe_follows_transformers() -> None:
    """Which leaves the spaces of such a tokenizer unless it is forced."""
    tokenizer = sentencepiece(clean=True)
    ids = tokenizer.convert_tokens_to_ids(["▁a", "▁", "<0x2E>", "▁", "<0x27>", "s", "▁a"])
    texts = set()
    for forced in (False, True):
        name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        setattr(tokenizer, name, forced)
        texts.add("".join(streamed(tokenizer, ids)))
        assert whole(tokenizer, ids) in texts
    assert texts == {"a . 's a", "a.'s a"}


# --- what is held back ---------------------------------------------------------------------------


BYTE_LEVEL = byte_level()


def spelled(text: str) -> list[int]:
    """One id per byte."""
    return BYTE_LEVEL(text, add_special_tokens=False).input_ids


def test_an_incomplete_character_is_held_back() -> None:
    ids = spelled("a😀b")
    assert streamed(BYTE_LEVEL, ids) == ["a", "", "", "", "😀", "b", ""]
    assert streamed(BYTE_LEVEL, ids[:3]) == ["a", "", "", "\ufffd"]
    # Of invalid bytes only the last one may still be a part of a character.
    assert streamed(BYTE_LEVEL, [spelled("é")[0]] * 500) == ["", *["\ufffd"] * 500]


def test_byte_tokens_are_held_until_another_token() -> None:
    """tokenizers decodes a row of them together: an invalid one changes all."""
    tokenizer = sentencepiece()
    for tokens, pieces in (
        (["<0xC3>", "<0xA9>", "a"], ["", "", "éa", ""]),
        (["<0xC3>", "<0xA9>", "<0xC3>", "a"], ["", "", "", "\ufffd\ufffd\ufffda", ""]),
        # Special tokens do not end the row.
        (["<0xC3>", "<pad>", "<0xA9>", "a"], ["", "", "", "éa", ""]),
    ):
        assert streamed(tokenizer, tokenizer.convert_tokens_to_ids(tokens)) == pieces


def test_outer_spaces_and_text_of_a_possible_stop_wait() -> None:
    found = streamed(BYTE_LEVEL, spelled(" \n a  b \n"))
    assert found == ["", "", "", "a", "", "", "  b", "", "", ""]
    for text, pieces in (
        ("abcdfbcy", ["a", "", "", "", "bcdf", "", "", "bcy", ""]),
        ("abcd", ["a", "", "", "", "bcd"]),
    ):
        assert streamed(BYTE_LEVEL, spelled(text), ("bcde", "cx")) == pieces


# --- stop strings --------------------------------------------------------------------------------


def test_text_ends_before_the_stop() -> None:
    stream = TextStream(BYTE_LEVEL, ("STOP",))
    ids = spelled("one two STOP three")
    pieces, count = put_all(stream, ids)
    assert "".join(pieces) == stream.text == "one two" and count == 12
    stream.put(ids[0])
    stream.end()
    assert stream.text == "one two" and stream.take() == ""
    stream = TextStream(BYTE_LEVEL, ("😀",))
    put_all(stream, spelled("é😀x"))
    assert stream.stopped and stream.text == "é"


def test_a_newline_of_byte_tokens_stops_at_once() -> None:
    """Llama writes it as a byte token, whose text is otherwise held."""
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["▁he", "llo", "<0x0A>", "▁a"])
    stream = TextStream(tokenizer, ("\n",))
    assert put_all(stream, ids) == (["he", "llo", ""], 3)
    long = tokenizer.convert_tokens_to_ids(["a", *["<0x41>"] * 60, "<0x0A>", "b", "b"])
    stream = TextStream(tokenizer, ("\n",))
    assert put_all(stream, long)[1] == 63  # with the token after the row
    assert stream.text == "a" + "A" * 60
    stream = TextStream(tokenizer, ("\n",))
    put_all(stream, long[:-2])
    assert stream.stopped and stream.text == "a" + "A" * 60


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab \n", max_size=25),
    stops=st.lists(st.text("ab \n", min_size=1, max_size=5), max_size=4),
)
def test_stops_against_a_plain_search(text: str, stops: list[str]) -> None:
    expected, length = text, len(text)
    for end in range(1, len(text) + 1):
        begins = [begin for stop in stops if (begin := text[:end].find(stop)) >= 0]
        if begins:
            expected, length = text[: min(begins)], end
            break
    stream = TextStream(BYTE_LEVEL, stops)
    pieces, count = put_all(stream, spelled(text))
    assert ("".join(pieces), count) == (expected.strip(), length)
    assert stream.stopped == any(stop in text for stop in stops)


@pytest.mark.cases(3)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stops_of_every_tokenizer(tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=30))
    text = whole(tokenizer, ids)
    begin = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[begin : begin + data.draw(st.integers(1, 6))] or "a"
    stream = TextStream(tokenizer, (stop,))
    pieces, count = put_all(stream, ids)
    assert "".join(pieces) == stream.text
    if stream.stopped:
        read = whole(tokenizer, ids[:count])
        assert stream.text == read[: read.index(stop)].strip()
    else:
        assert stop not in text


# --- cost and threads ----------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **more: Any) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **more)


def test_cost_is_linear(tokenizer: Any) -> None:
    rng = random.Random(0)
    costs = []
    for length in (500, 2000):
        counting = Counting(tokenizer)
        ids = [rng.randrange(len(tokenizer)) for _ in range(length)]
        put_all(TextStream(counting, ("never said",)), ids)
        costs.append(counting.decoded / length)
    assert max(costs) < 60 and costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize("token", ["<0x41>", "<0xFF>", "<pad>", "a", "▁"])
def test_cost_of_one_token_repeated_is_linear(token: str) -> None:
    counting = Counting(sentencepiece())
    put_all(TextStream(counting, ("never said",)), [counting.convert_tokens_to_ids(token)] * 2000)
    assert counting.decoded < 60 * 2000


def test_threads_share_a_stream(vlm: VLM) -> None:
    tokenizer = vlm.processor.tokenizer
    ids = tokenizer("a small red circle left of a large blue star. " * 40).input_ids
    stream, found, done = TextStream(tokenizer, ()), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            found.append(stream.take())
        found.append(stream.take())

    reader = threading.Thread(target=read)
    reader.start()
    for token in ids:
        stream.put(token)
    stream.end()
    done.set()
    reader.join()
    assert "".join(found) == whole(tokenizer, ids).strip()


# --- in the engine -------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "draft-ngram"])
def test_stream_of_an_answer(vlm: VLM, recipe: str) -> None:
    ask = {"images": make_image(), "recipe": recipe, "max_new_tokens": 40}
    tokenizer = vlm.processor.tokenizer
    plain = vlm.ask("Describe the image.", **ask)
    stream = TextStream(tokenizer, ())
    vlm.ask("Describe the image.", streamer=stream, stopping_criteria=[stream], **ask)
    assert stream.text == plain.text and not stream.stopped

    stop = plain.text[len(plain.text) // 2 :][:4]
    stream = TextStream(tokenizer, (stop,))
    stopped = vlm.ask("Describe the image.", streamer=stream, stopping_criteria=[stream], **ask)
    assert stream.stopped
    assert stream.text == plain.text[: plain.text.index(stop)].strip()
    assert len(stopped.token_ids) < len(plain.token_ids)
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
