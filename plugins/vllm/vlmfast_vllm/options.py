"""Options of ``vlmfast serve`` where vLLM answers: a closed list. Imports nothing of vLLM.

Every option of the command stands in one of `SAME`, `TRANSLATED` and `REFUSED`. vLLM's own options
follow after ``--``; those of `RESERVED` are set by the command.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from vlmfast.errors import VLMFastError

SAME = (
    "MODEL",
    "--model",
    "--recipe",
    "--alias",
    "--engine",
    "--name",
    "--host",
    "--port",
    "--api-key",
    "--api-key-file",
    "--insecure",
    "--allowed-hosts",
    "--allow-remote-media",
    "--allowed-media-domains",
    "--allowed-local-media-path",
    "--max-images",
    "--max-pixels",
    "--max-frames",
    "--max-video-seconds",
    "--max-video-pixels",
    "--max-media-bytes",
    "--media-timeout",
    "--max-body-bytes",
    "--max-total-body-bytes",
    "--max-new-tokens",
    "--max-stops",
    "--timeout",
    "--header-timeout",
    "--max-connections",
    "--max-requests-per-key",
    "--max-queue",
    "--grace",
    "--media-threads",
    "--shadow",
)
# To arguments of vLLM's engine.
TRANSLATED = {
    "--dtype": "dtype",
    "--max-rows": "max_num_seqs",
    "--max-cache-bytes": "kv_cache_memory_bytes",
    "--prefix-cache-bytes": "enable_prefix_caching",
}
REFUSED = {
    "--device": "vLLM is built for one kind of device; choose GPUs with CUDA_VISIBLE_DEVICES",
    "--prefix-cache-bytes": "vLLM's prefix cache takes what running requests leave of the KV "
    "cache; only 0, which turns it off, is allowed",
    "--prefill-chunk-size": "vLLM bounds the tokens of a step: -- --max-num-batched-tokens N",
}
_ALLOWED = {"--prefix-cache-bytes": (None, 0)}  # by default None alone
# Arguments of vLLM's engine, and what sets them.
RESERVED = {
    "model": "MODEL",
    "tokenizer": "the tokenizer of MODEL",
    "revision": "a folder as MODEL",
    "served_model_name": "--name and --alias, before the --",
    "dtype": "--dtype, before the --",
    "max_num_seqs": "--max-rows, before the --",
    "kv_cache_memory_bytes": "--max-cache-bytes, before the --",
    "enable_prefix_caching": "--prefix-cache-bytes 0, before the --",
    "mm_processor_kwargs": "preprocessor_config.json of MODEL",
    "max_logprobs": "top_logprobs of a request, at most 20",
    "skip_tokenizer_init": "the tokenizer of MODEL",
}
# What clients of the same server see of vLLM, by a short name.
DIFFERENT = {
    "recipes": "stages that act outside the visual tokens of the prompt, such as `snapkv` and "
    "`keyframes`, and methods without an exact count, such as `hired:0.2` on crops, are refused",
    "positions": "on LLaVAs recipes run with `positions=compact`, and are named so",
    "trace": "`trace` and `POST /tokenize` are refused: vLLM does not tell which tokens are kept",
    "usage": "`usage.vlmfast` has no `kv_bytes`, `kv_bytes_full`, `drafted_tokens` and "
    "`accepted_tokens`; `cached_tokens` counts tokens of the shortened prompt",
    "sampling": "a `seed` gives other tokens",
    "ties": "methods that compare tokens, such as `scope`, may keep another of two whose scores "
    "differ by rounding alone",
    "shadow": "`--shadow` compares distributions of the first token before a `response_format` and "
    "penalties act on them; vLLM computes a client's request beside one that is answered again",
    "length": "a prompt and its answer may be as long as `--max-model-len`; a longer answer is cut",
    "metrics": "`/metrics` has vLLM's own gauges, named `vllm:`, in place of those of the engine",
}


def check(args: Namespace) -> None:
    """Refuse options of a command line that have no meaning in vLLM.

    Raises
    ------
    VLMFastError
        For the first of them, with the reason.
    """
    for option, reason in REFUSED.items():
        value = getattr(args, _field(option))
        if value not in _ALLOWED.get(option, (None,)):
            raise VLMFastError(f"{option} {value} has no meaning with --engine vllm: {reason}")


def translated(args: Namespace) -> dict[str, Any]:
    """The arguments of vLLM's engine that a command line sets."""
    found: dict[str, Any] = {}
    for option, name in TRANSLATED.items():
        value = getattr(args, _field(option))
        if value is not None:
            found[name] = bool(value) if name == "enable_prefix_caching" else value
    if args.shadow:
        found["max_logprobs"] = -1  # for whole distributions
    return found


def check_reserved(given: Namespace, defaults: dict[str, Any]) -> None:
    """Refuse options after ``--`` that the command itself sets.

    Parameters
    ----------
    given : Namespace
        As vLLM parses them.
    defaults : dict
        What it gives for none.
    """
    for name, use in RESERVED.items():
        if getattr(given, name, None) != defaults.get(name):
            option = f"--{name.replace('_', '-')}"
            raise VLMFastError(f"{option} cannot be passed on to vLLM; use {use}")


def table() -> str:
    """The options that are refused, as a table in Markdown."""
    rows = [f"| `{option}` | {reason} |" for option, reason in REFUSED.items()]
    return "\n".join(["| option | why it is refused |", "| --- | --- |", *rows])


def differences() -> str:
    """What clients see of vLLM, as a list in Markdown."""
    return "\n".join(f"- {about}" for about in DIFFERENT.values())


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
