"""Mixins of vLLM's processing classes: counts of placeholders, notes, keys of caches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails

from vlmfast.errors import RecipeError

from .recipes import KEY, Family, Media, Plan, Plans, plans_of
from .travel import Note, rows

OWN = "vlmfast_"  # prefix of our keywords and fields
TEXT = "vlmfast_text"  # tokens before the first placeholder, then all text tokens
MODALITIES = ("image", "video")


def own_key(name: str, modality: str) -> str:
    """A field of ours of images or videos."""
    return f"{OWN}{name}_{modality}"


def note_key(modality: str) -> str:
    """The field of their notes."""
    return own_key("note", modality)


def _foreign(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if not key.startswith(OWN)}


class Informed:
    """Of processing infos: our keywords do not reach Hugging Face's processor."""

    family: type[Family]

    @property
    def plans(self) -> Plans | None:
        if not hasattr(self, "_plans"):
            self._plans = plans_of(self.get_hf_config(), self.family)
        return self._plans

    def get_hf_processor(self, **kwargs: Any) -> Any:
        return super().get_hf_processor(**_foreign(kwargs))


class Counted:
    """Of multimodal processors: media take as many places as the recipe keeps tokens.

    A family defines `about` and `tokens`.
    """

    reduced = MODALITIES  # what recipes reduce
    tagged = False  # whether extents depend on what is kept, where tokens are renumbered

    def about(self, modality: str, item: Mapping[str, Any]) -> Media:
        """An image or video, by the tensors of its item."""
        raise NotImplementedError(f"{type(self).__name__}.about")

    def items(self, modality: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tensors of each item of the processor's output that `about` reads."""
        raise NotImplementedError(f"{type(self).__name__}.items")

    def fields(self, items: Any, data: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """More tensors for the processor's output, one row for each item, see `own_key`."""
        return {}

    def token(self, modality: str) -> int:
        """The placeholder."""
        config = self.info.get_hf_config()
        found = getattr(config, f"{modality}_token_id", None)
        return getattr(config, f"{modality}_token_index") if found is None else found

    def around(self, modality: str, item: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of the text that is written into a video, with one placeholder for each step."""
        return ()

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        given, plans = inputs.hf_processor_mm_kwargs, self.info.plans
        if odd := sorted(key for key in given if key.startswith(OWN) and key != KEY):
            raise RecipeError(f"mm_processor_kwargs: {odd[0]} is unknown; allowed is {KEY}")
        if plans is None:
            if KEY in given:
                raise RecipeError(
                    f"{KEY}={given[KEY]!r}: this server takes no recipes; start it with "
                    f'--hf-overrides \'{{"{KEY}": "none"}}\''
                )
            return super().apply(inputs, timing_ctx)
        plan = plans.of(given.get(KEY))
        # What is added here is a part of vLLM's hash of each item, and so of the keys of the
        # processor cache, the encoder cache and the prefix cache.
        own = {KEY: plan.text}
        if plan.asks:
            own[TEXT] = self._text(inputs.prompt)
        kwargs = {**given, **own}
        return super().apply(replace(inputs, hf_processor_mm_kwargs=kwargs), timing_ctx)

    def _text(self, prompt: Sequence[int]) -> list[int]:
        config = self.info.get_hf_config()
        names = [f"{m}_token_{end}" for m in MODALITIES for end in ("id", "index")]
        media = {getattr(config, name, None) for name in names}
        text = [token for token in prompt if token not in media]
        first = next((i for i, token in enumerate(prompt) if token in media), len(text))
        return [first, *text]

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        data = super()._apply_hf_processor_main(mm_items, _foreign(hf_kwargs))
        if self.info.plans is None:
            return data
        data |= self.fields(mm_items, data, _foreign(hf_kwargs))
        plan = self.info.plans.of(hf_kwargs.get(KEY))
        before, *text = hf_kwargs.get(TEXT) or [0]
        for modality in self.reduced:
            notes = [
                self._note(plan, modality, item, before, text)
                for item in self.items(modality, data)
            ]
            if notes:
                data[note_key(modality)] = rows(notes)
        return data

    def _note(
        self, plan: Plan, modality: str, item: dict[str, Any], before: int, text: list[int]
    ) -> Note:
        around = self.around(modality, item)
        if text and around:  # the text of the video is a part of the prompt
            token, ids = self.token(modality), list(text)
            ids[before:before] = [this for this in around if this != token]
            text, before = ids, before + around.index(token)
        if plan.counts(self.about(modality, item)) is not None:
            around = ()
        tag = _tag(plan.text, text, item) if plan.compact and self.tagged else 0
        return Note(plan.text, before, tuple(text), around, tag)

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        fields = dict(super()._get_mm_fields_config(hf_inputs, _foreign(hf_processor_mm_kwargs)))
        for key in hf_inputs:
            if key.startswith(OWN):
                modality = key.rpartition("_")[2]
                fields[key] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        return fields

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        given = _foreign(hf_processor_mm_kwargs)
        return [
            self._shortened(update, out_mm_kwargs) if update.modality in self.reduced else update
            for update in super()._get_prompt_updates(mm_items, given, out_mm_kwargs)
        ]

    def _shortened(self, update: Any, out_mm_kwargs: Any) -> Any:
        """A replacement whose runs of placeholders are cut to the number of kept tokens."""
        modality, token = update.modality, self.token(update.modality)

        def shorter(index: int) -> Any:
            full = update.replacement
            full = full(index) if callable(full) else full
            item = out_mm_kwargs[modality][index]
            if note_key(modality) not in item:
                return full
            data = item.get_data()
            plan = self.info.plans.of(Note.of(data[note_key(modality)]).recipe)
            media = self.about(modality, data)
            content, counts = getattr(full, "full", full), plan.counts(media)
            if isinstance(content, str):
                content = self.info.get_tokenizer().encode(content, add_special_tokens=False)
            ids = list(content)
            if counts is None:  # its text is a part of the encoder's output
                text = sum(this != token for this in ids)
                ids = [token] * (text + plan.count(media))
            else:
                ids = cut(ids, token, counts)
            return PromptUpdateDetails.select_token_id(ids, token)

        return PromptReplacement(modality=modality, target=update.target, replacement=shorter)


def _tag(recipe: str, text: Sequence[int], item: Mapping[str, Any]) -> int:
    """A number of all that decides which tokens of an image or video are kept."""
    digest = hashlib.blake2b(f"{recipe} {list(text)}".encode(), digest_size=7)
    for name, value in sorted(item.items()):
        digest.update(f";{name} ".encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().view(torch.uint8).numpy().data)
        else:
            digest.update(str(value).encode())
    return int.from_bytes(digest.digest())


def cut(ids: Sequence[int], token: int, counts: Sequence[int]) -> list[int]:
    """``ids`` with the runs of ``token`` cut to ``counts``."""
    found: list[int] = []
    left, run, last = 0, -1, None
    for this in ids:
        if this == token:
            if last != token:
                run += 1
                left = counts[run]
            if left > 0:
                found.append(this)
            left -= 1
        else:
            found.append(this)
        last = this
    if run + 1 != len(counts):
        raise RecipeError(f"{run + 1} runs of placeholders, and {len(counts)} are counted")
    return found
