"""Mixins of vLLM's Qwens: reduced images and videos that keep their rotary ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.multimodal.utils import copy_mm_embedding_modality

from vlmfast.core.layout import VisualTokens
from vlmfast.errors import ModelError

from .grid_tower import Seen, statistics, watching
from .grids import Blocks, Grids, numbered, runs_of
from .processing import Counted, Informed, note_key
from .recipes import KEY, Media, plans_of
from .shifts import BITS, Chain, Shifts
from .travel import Note, batches, digits, split_places, with_places

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class Info(Informed):
    family = Grids


class Processor(Counted):
    """Of the Qwens' processors."""

    tagged = True

    def about(self, modality: str, item: Mapping[str, Any]) -> Media:
        return self.info.plans.family.media(modality, item[f"{modality}_grid_thw"].tolist())

    def items(self, modality: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        key = f"{modality}_grid_thw"
        if key not in data or PIXELS[modality] not in data:
            return []  # embeddings of the client are left alone
        times = data.get("timestamps") if modality == "video" else None
        pixels = data[PIXELS[modality]].split(data[key].prod(-1).tolist())
        return [
            {key: grid, "pixels": own, "timestamps": times and times[i]}
            for i, (grid, own) in enumerate(zip(data[key], pixels, strict=True))
        ]

    def around(self, modality: str, item: Mapping[str, Any]) -> tuple[int, ...]:
        if not item["timestamps"]:
            return ()
        config = self.info.get_hf_config()
        return tuple(
            self.get_video_repl(
                tokens_per_frame=[1] * len(item["timestamps"]),
                timestamps=item["timestamps"],
                tokenizer=self.info.get_tokenizer(),
                vision_start_token_id=config.vision_start_token_id,
                vision_end_token_id=config.vision_end_token_id,
                video_token_id=config.video_token_id,
            ).full
        )


class Reduced:
    """Of the Qwens' models.

    Kept features carry their rotary ids as more columns. `get_mrope_input_positions` gives text its
    ids, and the rows of media the first id of their block; `forward` adds what the columns say. So
    nothing of vLLM's own pruning of videos is switched on, and a prompt whose media are in the
    prefix cache needs no features. Where tokens are renumbered, ids of text say after what they
    stand, see `Shifts`.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        plans = plans_of(config, Grids)  # before any weights are allocated
        if plans is not None:
            _check(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.plans = plans
        levels = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        self._width = config.get_text_config().hidden_size * (1 + levels)
        scheduled = vllm_config.scheduler_config
        tokens = min(scheduled.max_num_encoder_input_tokens, scheduled.encoder_cache_size)
        self._patches = tokens * config.vision_config.spatial_merge_size**2  # of a pass
        self._waiting: tuple[Tensor, Tensor] | None = None  # rows of a batch, and their ids
        self._shifts = plans and Shifts(self.visual.device)

    # --- features ------------------------------------------------------------------------------

    def embed_multimodal(self, **kwargs: Any) -> Any:
        if self.plans is None:
            return super().embed_multimodal(**kwargs)
        found: list[Tensor] = []
        for part in self._parts(kwargs):
            for name, given in self._parse_and_validate_multimodal_inputs(**part).items():
                modality = name.removesuffix("s")
                found += self._embed(modality, given, part.get(note_key(modality)))
        return tuple(found)

    def _parts(self, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Arguments of passes no longer than those that vLLM profiled: it counts kept tokens."""
        given = [modality for modality, pixels in PIXELS.items() if pixels in kwargs]
        if len(given) != 1 or note_key(given[0]) not in kwargs:
            yield kwargs
            return
        pixels = PIXELS[given[0]]
        sizes = kwargs[f"{given[0]}_grid_thw"].prod(-1).tolist()
        ends = [0, *accumulate(sizes)]
        for items in batches(sizes, self._patches):
            rows = slice(ends[items.start], ends[items.stop])
            yield {key: of[rows if key == pixels else items] for key, of in kwargs.items()}

    def _embed(self, modality: str, given: Any, rows: Any) -> list[Tensor]:
        """Features of images or videos of a batch, those under a recipe with columns."""
        process = getattr(self, f"_process_{modality}_input")
        if rows is None or given["type"] != PIXELS[modality]:
            return list(process(given))
        notes, family = [Note.of(row) for row in rows], self.plans.family
        plans = [self.plans.of(note.recipe) for note in notes]
        with watching(self.visual, family, plans, _of_all_ranks) as seen:
            features = process(given)
        grids, seconds = given[f"{modality}_grid_thw"], given.get("second_per_grid_ts")
        found, first = [], 0
        for i, (note, plan, own) in enumerate(zip(notes, plans, features, strict=True)):
            patches = int(grids[i].prod())
            if plan.stages:
                media = family.media(
                    modality, grids[i].tolist(), 1.0 if seconds is None else float(seconds[i])
                )
                tensors = {}
                if plan.digests:
                    pixels = given[PIXELS[modality]][first : first + patches]
                    tensors = {
                        PIXELS[modality]: self.visual.input_norm(
                            pixels.to(self.visual.device), self.visual.dtype
                        ),
                        f"{modality}_grid_thw": grids[i : i + 1],
                    }
                    if seconds is not None:
                        tensors["second_per_grid_ts"] = torch.as_tensor(seconds[i]).reshape(1)
                own = self._reduced(note, media, own, seen, first, tensors)
            found.append(own)
            first += patches
        return found

    def _reduced(
        self,
        note: Note,
        media: Blocks,
        features: Tensor,
        seen: Seen,
        first: int,
        tensors: dict[str, Tensor],
    ) -> Tensor:
        """The kept rows of one image or video, with their rotary ids as more columns."""
        plan, device = self.plans.of(note.recipe), features.device
        main, *levels = features.split(self.config.get_text_config().hidden_size, dim=1)
        stats = statistics(plan, self.plans.family, media, seen, first, tensors)
        text = self._text(note.text, device) if note.text else main[:0]
        whole = VisualTokens(main, media.on(device, "layout"), tuple(levels))
        tokens, renumbered = plan.reduce(media, whole, stats, text, note.before)
        parts, order = (tokens.features, *tokens.extra), tokens.layout.order
        if not (plan.compact or note.around):  # nothing is read from the device
            return with_places(parts, media.on(device, "columns")[order])
        kept = order.cpu()
        places, extents = media.places[:, kept], [media.extent] * media.runs
        if renumbered:
            places, extents = self.plans.family.compacted(media, kept)
        if plan.compact:
            self._shifts.know(note.tag, media.extent * media.runs - sum(extents))
        if note.around:
            rows = torch.cat(parts, dim=1)
            rows, places = self._joined(note.around, media, rows, kept, places, extents)
            parts = (rows,)
        return with_places(parts, digits(places))

    def _joined(
        self,
        around: Sequence[int],
        media: Blocks,
        rows: Tensor,
        kept: Tensor,
        own: Tensor,
        extents: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Rows and ids of all steps of a video and of the text around them, as one block."""
        ids = torch.tensor(around)
        step = ids == self.config.video_token_id
        text = self._text(ids.masked_fill(step, 0).tolist(), rows.device)
        text = pad(text, (0, rows.shape[1] - text.shape[1]))  # nothing is added in deeper layers
        found, places, next_id, number = [], [], 0, 0
        for i, is_step in enumerate(step.tolist()):
            if not is_step:
                found.append(text[i : i + 1])
                places.append(torch.full((3, 1), next_id))
                next_id += 1
                continue
            mine = (media.step[kept] == number).nonzero().flatten()
            found.append(rows[mine.to(rows.device)])
            places.append(own[:, mine] + next_id)
            next_id, number = next_id + extents[number], number + 1
        return torch.cat(found), torch.cat(places, dim=1)

    def _text(self, ids: Sequence[int], device: Any) -> Tensor:
        return self.language_model.embed_input_ids(torch.tensor(ids, device=device))

    # --- rotary ids ----------------------------------------------------------------------------

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[Tensor, int]:
        if self.plans is None:
            return super().get_mrope_input_positions(input_tokens, mm_features)
        blocks: list[tuple[int, int, int, Tensor | None]] = []
        chain: Chain | None = None
        for feature in sorted(mm_features, key=lambda of: of.mm_position.offset):
            own, chain = self._blocks(feature, input_tokens, chain)
            blocks += own
        ids = numbered(len(input_tokens), blocks)
        return ids[:, :-1], int(ids[0, -1]) - len(input_tokens)

    def _blocks(
        self, feature: Any, tokens: Sequence[int], chain: Chain | None
    ) -> tuple[list[tuple[int, int, int, Tensor | None]], Chain | None]:
        """The blocks of an image or video, as `numbered` takes them, and the chain after them."""
        modality, data = feature.modality, feature.data.get_data()
        seconds = data.get("second_per_grid_ts")
        media = self.plans.family.media(
            modality,
            data[f"{modality}_grid_thw"].tolist(),
            1.0 if seconds is None else float(seconds),
        )
        row = data.get(note_key(modality))
        note = Note("none") if row is None else Note.of(row)
        plan, found = self.plans.of(note.recipe), []
        extent = media.extent
        if note.around:
            extent = media.runs * media.extent + len(note.around) - media.runs
        first = feature.mm_position.offset
        token = getattr(self.config, f"{modality}_token_id")
        runs = runs_of(tokens, token, first, first + feature.mm_position.length)
        places = media.places.split(len(media) // media.runs, dim=1)
        for number, (start, rows) in enumerate(runs):
            after, before = extent, 0 if chain is None else chain.number
            if plan.compact and (shift := self._shifts.known(note.tag)) is not None:
                after -= shift
            elif plan.compact:
                chain = self._shifts.chain(chain, note.tag)
                after += (chain.number - before) << BITS
            found.append((start, rows, after, None if plan.stages else places[number]))
        return found, chain

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        self._waiting = None
        given = multimodal_embeddings
        if self.plans is not None and given is not None and len(given):
            parts = [self._parted(rows) for rows in given]
            if any(rows.shape[1] > self._width for rows in given):
                assert is_multimodal is not None
                rows = is_multimodal.nonzero().flatten()  # of the host
                self._waiting = rows, torch.cat([places for _, places in parts], dim=1)
            multimodal_embeddings = [features for features, _ in parts]
        return super().embed_input_ids(
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )

    def _parted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features and rotary ids; 0 where the rows have theirs already."""
        if rows.shape[1] == self._width:
            return rows, torch.zeros(3, len(rows), dtype=torch.int64, device=rows.device)
        features, places = split_places(rows)
        return copy_mm_embedding_modality(rows, features), places

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._waiting is not None:
            # In place: what runs after the model on the same batch reads the same ids.
            (rows, places), self._waiting = self._waiting, None
            at = rows.to(positions.device, non_blocking=True)
            positions.index_add_(1, at, places.to(positions.device, positions.dtype))
        if self._shifts is not None:
            self._shifts.apply(positions)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)


def _of_all_ranks(heads: Tensor) -> Tensor:
    """Each rank has a part of the heads; all must choose the same tokens."""
    return tensor_model_parallel_all_gather(heads.contiguous(), dim=0)


def _check(vllm_config: Any) -> None:
    """Raise `ModelError` for options with which a recipe would not be run, or not as asked."""
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    settings, drafting = vllm_config.model_config.multimodal_config, vllm_config.speculative_config
    mode = compilation.cudagraph_mode
    for option, refused, use in (
        (
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size > 1,
            "1: only the first rank knows the positions of visual tokens",
        ),
        ("mm_encoder_tp_mode", settings.mm_encoder_tp_mode == "data", "weights"),
        (
            "kv_transfer_config",
            vllm_config.kv_transfer_config is not None,
            "none: where tokens are renumbered, a worker must have encoded its images itself",
        ),
        ("video_pruning_rate", bool(settings.video_pruning_rate), "none; a recipe prunes videos"),
        (
            "cudagraph_mm_encoder",
            compilation.cudagraph_mm_encoder,
            "false: captured passes do not run recipes",
        ),
        ("compile_mm_encoder", compilation.compile_mm_encoder, "false"),
        (
            "cudagraph_mode",
            mode is not None and mode.mixed_mode().name == "FULL",
            "FULL_AND_PIECEWISE: captured prefills would not set positions",
        ),
        (
            "speculative_config",
            drafting is not None and drafting.method not in ("ngram", "suffix"),
            "ngram: draft models do not know the positions of visual tokens",
        ),
    ):
        if refused:
            raise ModelError(f"{KEY}: {option} cannot be used as it is set; use {use}")
