"""Text of an answer, token by token: as the whole answer is decoded, up to a stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from vlmfast import VLM
from vlmfast.serve.text import TextStream

TEXT = "A 🦊 jumps — naïve,\n\n  twice!  日本語 don 't do n't stop . "


def sentencepiece() -> PreTrainedTokenizerFast:
    """Words with a leading mark, and single bytes for what is missing, as Llama's tokenizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁A", "▁jumps", "▁twice", "!", "▁don", "'t", "▁'t", ",", "a", "b", "▁."]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tokenizers(shipped: VLM) -> dict[str, Any]:
    cleaned = sentencepiece()
    cleaned.clean_up_tokenization_spaces = True
    return {
        "bytes": shipped.processor.tokenizer,
        "sentencepiece": sentencepiece(),
        "cleaned": cleaned,
    }


def streamed(tokenizer: Any, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """The whole text, and what was available after each token."""
    stream, seen = TextStream(tokenizer, stops), []
    for token in ids:
        stream.put(token)
        seen.append(stream.take())
        if stream(None, None):
            break
    stream.end()
    seen.append(stream.take())
    assert "".join(seen) == stream.text
    return stream.text, seen


def whole(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "cleaned"])
@given(seed=st.integers(0, 2**32), count=st.integers(0, 60), common=st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_ids(tokenizers: Any, kind: str, seed: int, count: int, common: bool) -> None:
    tokenizer, draw = tokenizers[kind], random.Random(seed)
    known = tokenizer(TEXT, add_special_tokens=False).input_ids
    ids = [draw.choice(known) if common else draw.randrange(len(tokenizer)) for _ in range(count)]
    assert streamed(tokenizer, ids)[0] == whole(tokenizer, ids)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "cleaned"])
def test_a_text_arrives_in_pieces(tokenizers: Any, kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer(TEXT * 3, add_special_tokens=False).input_ids
    text, seen = streamed(tokenizer, ids)
    assert text == whole(tokenizer, ids)
    assert sum(map(bool, seen)) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in seen)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_text_ends_before_the_first_stop_string(tokenizers: Any, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["bytes", "sentencepiece"]))
    tokenizer = tokenizers[kind]
    text = data.draw(st.text(alphabet="abc! ,A", max_size=40))
    stops = tuple(
        data.draw(st.lists(st.text(alphabet="abc! ", min_size=1, max_size=4), max_size=3))
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    full = tokenizer.decode(ids, skip_special_tokens=True)
    found, _ = streamed(tokenizer, ids, stops)
    # Ends at the first token that completes one, where the earliest begins.
    expected = full
    for count in range(1, len(ids) + 1):
        part = tokenizer.decode(ids[:count], skip_special_tokens=True)
        begins = [part.find(stop) for stop in stops if stop in part]
        if begins:
            expected = part[: min(begins)]
            break
    assert found == expected.strip()


def test_a_stop_string_is_never_shown(tokenizers: Any) -> None:
    tokenizer = tokenizers["bytes"]
    ids = tokenizer("abc abd abe", add_special_tokens=False).input_ids
    text, seen = streamed(tokenizer, ids, ("abe",))
    assert text == "abc abd" and not any("abe" in piece for piece in seen)
    assert streamed(tokenizer, ids)[0] == "abc abd abe"  # the control


def test_nothing_follows_a_stop(tokenizers: Any) -> None:
    tokenizer = tokenizers["bytes"]
    stream = TextStream(tokenizer, ("b",))
    for token in tokenizer("a b a a", add_special_tokens=False).input_ids:
        stream.put(token)
    stream.end()
    assert stream.text == "a" and stream.stopped


def test_special_tokens_have_no_text(tokenizers: Any) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer("A a", add_special_tokens=False).input_ids
        end = tokenizer.eos_token_id
        mixed = [end, *(part for token in ids for part in (token, end))]
        assert streamed(tokenizer, mixed)[0] == whole(tokenizer, ids)


def test_cost_is_linear(tokenizers: Any) -> None:
    """Each token is decoded with a few preceding ones, however long the answer is."""
    longest = []

    class Counting:
        clean_up_tokenization_spaces = False

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def decode(self, ids: list[int], **more: Any) -> str:
            longest.append(len(ids))
            return self.inner.decode(ids, **more)

    tokenizer = tokenizers["bytes"]
    ids = tokenizer(TEXT * 40, add_special_tokens=False).input_ids
    assert streamed(Counting(tokenizer), ids)[0] == whole(tokenizer, ids)
    assert max(longest) < 40 and len(longest) < 3 * len(ids) + 10
