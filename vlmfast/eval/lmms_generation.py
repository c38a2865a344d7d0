"""What lmms-eval's tasks say about the end of answers; without the package ``lmms-eval``."""

from __future__ import annotations

from typing import Any

from vlmfast.errors import VLMFastError

_MAX_NEW_TOKENS = 1024  # if a task has no value
_READ = ("num_beams", "temperature", "max_new_tokens", "do_sample", "top_p", "top_k", "until")
_OF_OTHERS = ("image_aspect_ratio",)  # how LLaVA's own code prepares images
_BETWEEN_EXAMPLES = "\n\n"  # lmms-eval's default


def generation_of(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a task's arguments to those of ``generate``, and its stop strings.

    A blank line is none of them, as in lmms-eval's own models: it separates examples in the
    prompt, and lmms-eval adds it to every task that states no stop strings.

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
    until = [until] if isinstance(until, str) else until
    until = [stop for stop in until if stop and stop != _BETWEEN_EXAMPLES]
    return generation | ({"stop_strings": until} if until else {}), until


def unread(arguments: dict[str, Any]) -> list[str]:
    """The arguments of a task that have no effect and may have been meant to have one.

    lmms-eval's own models ignore those that they do not know.
    """
    return [key for key in arguments if key not in _READ + _OF_OTHERS]


def cut(text: str, until: list[str]) -> str:
    """A text up to the first of the stop strings."""
    for stop in until:
        text = text.partition(stop)[0]
    return text
