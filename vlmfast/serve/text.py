"""The text of an answer while it is generated."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from tokenizers.models import BPE

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONTEXT = 8  # tokens that the next one is decoded after; an incomplete character has at most 3
_CHECKED = 16  # byte tokens in a row that are searched for stop strings before the row ends
_REPLACEMENT = "\ufffd"
# Where a text may be cut before spaces are cleaned up: before a space, but not inside of what
# ``clean_up_tokenization`` replaces, also one replacement after another (" n ' t").
_CLEAN_CUT = re.compile(r"[^ 'n](?= )")


class TextStream:
    """Text of an answer, token by token, up to a stop string.

    A streamer and a stopping criterion in one: pass it to ``generate`` as both. The pieces that
    `take` returns add up to what ``tokenizer.decode(ids, skip_special_tokens=True)`` has before the
    first stop string, stripped. One thread may add tokens while others take text.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    stops : sequence of str
        Stop strings, none of them empty. The one that is complete first ends the text; of several
        that the same token completes, the one that begins first.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._decoder = _Decoder(tokenizer)
        self._stops = tuple(stops)
        self._lock = threading.Lock()
        self._final: list[str] = []
        self._taken = 0
        self._pending = ""  # decoded; it may be the beginning of a stop string, or end the answer
        self._stopped = self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        with self._lock:
            return self._stopped

    @property
    def text(self) -> str:
        """All text that is final so far; the whole one after `end`."""
        with self._lock:
            return "".join(self._final)

    def take(self) -> str:
        """Text that became final since the last call."""
        with self._lock:
            pieces = self._final[self._taken :]
            self._taken = len(self._final)
            return "".join(pieces)

    def put(self, token: Any) -> None:
        """Add a token.

        Parameters
        ----------
        token : Tensor or int
            One id.
        """
        with self._lock:
            if self._stopped or self._ended:
                return
            checked = _CHECKED if self._stops else 0
            settled, tentative = self._decoder.add(int(token), checked)
            self._pending += settled
            if self._is_cut(tentative):
                return
            end = len(self._pending) - _overlap(self._pending, self._stops)
            self._release(end)

    def end(self) -> None:
        """Make the rest of the text final: no token follows."""
        with self._lock:
            if self._stopped or self._ended:
                return
            self._ended = True
            self._pending += self._decoder.end()
            if not self._is_cut():
                self._release(len(self._pending))

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        """As a stopping criterion, called after `put` for the same token."""
        return self.stopped

    def _is_cut(self, tentative: str = "") -> bool:
        """End the text at a stop string, if there is one."""
        text = self._pending + tentative
        found = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if not found:
            return False
        self._pending = text
        self._release(min(found))
        self._pending, self._stopped = "", True
        return True

    def _release(self, end: int) -> None:
        """Make held text before ``end`` final, but whitespace only between other text."""
        text, rest = self._pending[:end], self._pending[end:]
        if not self._final:
            text = text.lstrip()
        final = text.rstrip()
        if final:
            self._final.append(final)
        self._pending = text[len(final) :] + rest


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that a stop string begins with."""
    longest = 0
    for stop in stops:
        sizes = range(min(len(stop) - 1, len(text)), longest, -1)
        longest = next((size for size in sizes if text.endswith(stop[:size])), longest)
    return longest


class _Decoder:
    """Decodes ids one by one, at constant cost.

    Each id is decoded after a few preceding ones, and the text by which it is longer is new.
    tokenizers' ``DecodeStream`` does the same, but fails on invalid bytes of tokenizers with byte
    tokens, and has no end.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_cleaned = _is_cleaned(tokenizer)
        self._ids: list[int] = []
        self._size = 0  # of the settled text of these ids
        self._bytes = 0  # byte tokens among the last ids that are not decoded yet

    def add(self, token: int, checked: int = 0) -> tuple[str, str]:
        """New text, and text that following tokens may change.

        Parameters
        ----------
        token : int
        checked : int
            Byte tokens in a row for which the second text is decoded, too.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        self._ids.append(token)
        # tokenizers decodes byte tokens in a row together: one that is invalid makes all of them
        # invalid, so that none is settled before another token follows.
        if isinstance(piece, str) and _BYTE.fullmatch(piece):
            self._bytes += 1
            if self._bytes > checked:
                return "", ""
            text = self._decode(self._ids)
            return "", text[self._size :].rstrip(_REPLACEMENT)
        if self._is_skipped(token):
            self._ids.pop()
            return "", ""
        self._bytes = 0
        text = self._decode(self._ids)
        settled = self._settled(text)
        new = settled[self._size :]
        self._size = max(self._size, len(settled))
        if len(self._ids) > 2 * _CONTEXT:
            # The beginning of a text may be decoded in another way, as without its first space.
            rest, last = text[self._size :], self._decode(self._ids[-_CONTEXT:])
            if len(last) > len(rest) and last.endswith(rest):
                self._ids, self._size = self._ids[-_CONTEXT:], len(last) - len(rest)
        return new, ""

    def end(self) -> str:
        """The rest of the text."""
        return self._decode(self._ids)[self._size :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _is_skipped(self, token: int) -> bool:
        """Whether a token has no text, as special ones and ids outside the vocabulary."""
        # Twice: a leading space is stripped from the first token of a text.
        return not self._decode([token, token])

    def _settled(self, text: str) -> str:
        """The part of the text of the current ids that following ones do not change."""
        if text.endswith(_REPLACEMENT):
            text = text[:-1]
        if self._is_cleaned:
            cuts = [match.start() + 1 for match in _CLEAN_CUT.finditer(text)]
            text = text[: cuts[-1]] if cuts else ""
        return text


def _is_cleaned(tokenizer: Any) -> bool:
    """Whether ``decode`` removes spaces before punctuation; transformers does not for BPE."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    model = type(tokenizer.backend_tokenizer.model) if tokenizer.is_fast else None
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return model is not BPE or bool(getattr(tokenizer, forced, False))
