"""vlmfast as a model of lmms-eval: ``--model vlmfast --model_args pretrained=...,recipe=...``.

lmms-eval finds it through the entry point of the installed package. All tasks with generated text
answers work; ``docs/evaluation.md`` shows the command.
"""

from __future__ import annotations

import time
from typing import Any

from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.models.registry_v2 import ModelManifest
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from vlmfast.errors import MediaError, VLMFastError

_MAX_NEW_TOKENS = 1024  # if a task has no value


def manifests() -> ModelManifest:
    """Manifest for the entry point of lmms-eval."""
    return ModelManifest(model_id="vlmfast", chat_class_path=f"{__name__}.VLMFast")


class VLMFast(lmms):
    """A model under a recipe; the chat interface of lmms-eval 0.7.

    Parameters
    ----------
    pretrained : str
        ``tiny``, a local folder, or a hub id.
    recipe : str
        With ``;`` instead of ``,``, because lmms-eval splits arguments at commas:
        ``hired:0.2;positions=keep``.
    device, dtype, revision : str, optional
    num_frames : int
        Frames of each video.
    batch_size : int
        Must be 1: requests are answered one after another.

    Raises
    ------
    VLMFastError
        For an unknown argument, and as `VLM.from_pretrained` and `Recipe.parse` do.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "tiny",
        recipe: str = "none",
        device: str | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        num_frames: int = 32,
        batch_size: int | str = 1,
        **unknown: Any,
    ) -> None:
        from vlmfast.api.vlm import VLM

        super().__init__()
        # lmms-eval passes these to every model.
        unknown = {k: v for k, v in unknown.items() if k != "max_batch_size" or v is not None}
        if unknown:
            raise VLMFastError(
                f"vlmfast has no model_args {', '.join(unknown)}; it has pretrained, recipe, "
                "device, dtype, revision and num_frames"
            )
        if str(batch_size) != "1":
            raise VLMFastError(f"batch_size is {batch_size}; with lmms-eval it must be 1")
        self.num_frames = int(num_frames)
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        if self._world_size > 1 and self.accelerator.device.type == "cuda":
            device = str(self.accelerator.device)
        kwargs: dict[str, Any] = {} if revision is None else {"revision": revision}
        kwargs["prefix_cache_bytes"] = 0  # times are reported
        self.vlm = VLM.from_pretrained(pretrained, device=device, dtype=dtype, **kwargs)
        self.recipe = self.vlm.recipe(str(recipe).replace(";", ","))

    @property
    def model(self) -> Any:
        return self.vlm.model

    @property
    def tokenizer(self) -> Any:
        return self.vlm.processor.tokenizer

    @property
    def device(self) -> Any:
        return self.vlm.model.device

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests."""
        results, answers, start = [], [], time.perf_counter()
        for request in tqdm(requests, disable=self.rank != 0, desc="vlmfast"):
            context, doc_to_messages, arguments, doc_id, task, split = request.args
            doc = self.task_dict[task][split][doc_id]
            messages = chat_of(ChatMessages(messages=doc_to_messages(doc)), self.num_frames)
            generation, until = generation_of(arguments)
            answer = self.vlm.chat(messages, recipe=self.recipe, **generation)
            text = answer.text
            for stop in until:
                text = text.partition(stop)[0]
            answers.append(answer)
            counts = TokenCounts(answer.stats.prompt_tokens, len(answer.token_ids))
            results.append(GenerationResult(text, counts))
            self.cache_hook.add_partial("generate_until", (context, arguments), text)
        self._log(answers, time.perf_counter() - start)
        return results

    def _log(self, answers: list[Any], seconds: float) -> None:
        if not answers:
            return

        def mean(name: str) -> float:
            return sum(getattr(answer.stats, name) for answer in answers) / len(answers)

        tokens = sum(len(answer.token_ids) for answer in answers)
        own = ("visual_tokens_in", "equivalent_tokens", "ttft_s", "kv_bytes", "flops_prefill")
        log_metrics(
            total_elapsed_time=seconds,
            total_gen_tokens=tokens,
            avg_speed=tokens / seconds,
            additional_metrics={"recipe": str(self.recipe)} | {name: mean(name) for name in own},
        )

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("vlmfast generates text; loglikelihood is not supported")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("multi-round tasks are not supported")


def chat_of(messages: ChatMessages, num_frames: int) -> list[dict[str, Any]]:
    """Convert lmms-eval's messages for `VLM.chat`, with images at their position in the text.

    Raises
    ------
    MediaError
        For audio.
    """
    chat = []
    for message in messages.messages:
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if part.type == "text":
                parts.append({"type": "text", "text": part.text})
            elif part.type == "image":
                parts.append({"type": "image", "image": part.url})
            elif part.type == "video":
                parts.append({"type": "video", "video": part.url, "num_frames": num_frames})
            else:
                raise MediaError(f"a message has {part.type}; supported are images and videos")
        chat.append({"role": message.role, "content": parts})
    return chat


def generation_of(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a task's arguments to those of ``generate``, and its stop strings.

    Raises
    ------
    VLMFastError
        For beam search.
    """
    if (arguments.get("num_beams") or 1) > 1:
        raise VLMFastError(f"num_beams is {arguments['num_beams']}; beam search is not supported")
    temperature = arguments.get("temperature")
    generation = {
        "max_new_tokens": arguments.get("max_new_tokens") or _MAX_NEW_TOKENS,
        # Tasks combine temperature 0 with do_sample to request greedy decoding.
        "do_sample": bool(arguments.get("do_sample", temperature)) and temperature != 0,
    }
    if generation["do_sample"]:
        chosen = {key: arguments.get(key) for key in ("temperature", "top_p", "top_k")}
        generation |= {key: value for key, value in chosen.items() if value is not None}
    until = arguments.get("until") or []
    return generation, [until] if isinstance(until, str) else list(until)
