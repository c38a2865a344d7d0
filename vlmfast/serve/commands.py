"""The command ``vlmfast serve``."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from vlmfast.api.vlm import VLM
from vlmfast.core.help import RECIPES, examples, names
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError

from .config import MediaLimits, ServerConfig, at_least, limits_of

_KEY = "VLMFAST_API_KEY"
# Products in half precision that PyTorch on a CPU keeps compiled, by their sizes. With the 1024 of
# each kind that are its defaults, a server grows as prompts of ever new lengths arrive.
_KEPT_PRODUCTS = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "128")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast serve``."""
    parser.description = "Serve a model through OpenAI's API."
    parser.epilog = examples(
        "vlmfast serve tiny --recipe balanced --port 8000",
        "vlmfast serve MODEL --device cuda --alias fast=fast --api-key-file keys.txt",
        "vlmfast serve MODEL --host 0.0.0.0 --api-key KEY --max-rows 16",
        "vlmfast serve MODEL --engine vllm --recipe balanced -- --max-model-len 8192",
    )
    add = parser.add_argument
    add("--recipe", default="none", help=f"recipe of requests without one: {RECIPES}")
    add(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=RECIPE",
        help="one more model name, with a recipe of its own; may be given several times",
    )
    add(
        "--engine",
        choices=("vlmfast", "vllm"),
        default="vlmfast",
        help="what answers; vllm needs the package vlmfast-vllm; its own options follow after --",
    )
    add("--name", help="name of the model in the API (default: MODEL)")
    add("--host", default=ServerConfig.host, help="address to listen on")
    add("--port", type=int, default=ServerConfig.port, metavar="N", help="port; 0: any free one")

    group = parser.add_argument_group("access")
    add = group.add_argument
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that clients must present; may be given several times. {_KEY} holds one or "
        "several, separated by commas",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="keys, one in each line")
    add("--insecure", action="store_true", help="let other machines connect without a key")
    add(
        "--allowed-hosts",
        type=names,
        default=(),
        metavar="NAME,NAME",
        help="accepted Host headers (default: this machine's, where it listens for it only)",
    )

    group = parser.add_argument_group("images and videos")
    add = group.add_argument
    add(
        "--allow-remote-media", action="store_true", help="fetch http(s) URLs from global addresses"
    )
    add(
        "--allowed-media-domains",
        type=names,
        default=(),
        metavar="NAME,NAME",
        help="fetch http(s) URLs from these domains and their subdomains",
    )
    add(
        "--allowed-local-media-path",
        type=Path,
        metavar="FOLDER",
        help="let requests name files in this folder as file: URLs",
    )
    _add_limits(group, MediaLimits)

    group = parser.add_argument_group("limits")
    _add_limits(group, ServerConfig)
    add = group.add_argument
    add("--max-rows", type=int, metavar="N", help="answers that are decoded together")
    add("--max-cache-bytes", type=int, metavar="N", help="bytes of all KV caches together")
    add("--prefix-cache-bytes", type=int, metavar="N", help="bytes of the prefix cache; 0: none")
    add("--prefill-chunk-size", type=int, metavar="N", help="rows of a prompt prefilled at once")


def config_of(args: Namespace) -> ServerConfig:
    """The options of a command line.

    Raises
    ------
    VLMFastError
        For options that contradict each other or cannot be used.
    """
    aliases = {}
    for text in args.alias:
        name, equals, recipe = text.partition("=")
        if not equals or not name or not recipe:
            raise VLMFastError(f"--alias {text!r} must be NAME=RECIPE")
        if name in aliases:
            raise VLMFastError(f"--alias {text!r}: {name!r} is given twice")
        aliases[name] = recipe
    for recipe in (args.recipe, *aliases.values()):
        if recipe != "auto":  # depends on the checkpoint, which is loaded later
            Recipe.parse(recipe)
    local = args.allowed_local_media_path
    if local is not None and not local.is_dir():
        raise VLMFastError(f"--allowed-local-media-path {local} is not a folder")
    media = MediaLimits(
        allow_remote=args.allow_remote_media,
        domains=args.allowed_media_domains,
        local_path=local,
        **_values(args, MediaLimits),
    )
    return ServerConfig(
        model=args.name or args.model,
        recipe=args.recipe,
        aliases=aliases,
        host=args.host,
        port=args.port,
        api_keys=_keys(args),
        insecure=args.insecure,
        allowed_hosts=args.allowed_hosts,
        media=media,
        **_values(args, ServerConfig),
    )


def run(args: Namespace, load: Callable[[], VLM]) -> None:
    """Serve the model that ``load`` loads, or with another engine the one that is named."""
    from .server import serve  # raises for missing packages before a checkpoint is loaded

    config = config_of(args)
    if args.engine_options and args.engine == "vlmfast":
        raise VLMFastError(
            f"{args.engine_options[0]!r} stands after --, which is for --engine vllm"
        )
    for name in ("max_rows", "max_cache_bytes", "prefill_chunk_size"):
        if getattr(args, name) is not None:
            at_least(name, getattr(args, name), 1)
    if args.prefix_cache_bytes is not None:
        at_least("prefix_cache_bytes", args.prefix_cache_bytes, 0)

    def ready(address: str) -> None:
        print(f"{config.model} is served at {address}/v1 (stop with Ctrl+C)", flush=True)

    if args.engine == "vllm":
        _plug_in().run(args, config, ready)
        return
    for name, value in _KEPT_PRODUCTS.items():  # read at the first product
        os.environ.setdefault(name, value)

    def loaded() -> VLM:
        vlm = load()
        if args.max_rows is not None:
            vlm.engine.max_rows = args.max_rows
        vlm.engine.max_cache_bytes = args.max_cache_bytes
        vlm.engine.prefill_chunk_size = args.prefill_chunk_size
        if args.prefix_cache_bytes is not None:
            vlm.prefix_cache.limit = args.prefix_cache_bytes
        return vlm

    serve(config, loaded, ready)


def _plug_in() -> Any:
    """The module of the plug-in for vLLM that serves with it."""
    try:
        return import_module("vlmfast_vllm.serving")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vlmfast_vllm":
            raise
        raise VLMFastError(
            "--engine vllm needs the plug-in for vLLM: pip install vlmfast-vllm vllm"
        ) from error


def _add_limits(group: Any, limits: type) -> None:
    for option, f in limits_of(limits).items():
        about = f"{f.metadata['about']} (default: {f.default:,})"
        group.add_argument(option, type=type(f.default), default=f.default, metavar="N", help=about)


def _values(args: Namespace, limits: type) -> dict[str, Any]:
    """The fields that options set."""
    return {
        f.name: getattr(args, option.lstrip("-").replace("-", "_"))
        for option, f in limits_of(limits).items()
    }


def _keys(args: Namespace) -> tuple[str, ...]:
    given = (key.strip() for key in os.environ.get(_KEY, "").split(","))
    found = [*(key.strip() for key in args.api_key), *filter(None, given)]
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise VLMFastError(f"--api-key-file {args.api_key_file}: {error}") from error
        own = [line.strip() for line in lines if line.strip()]
        if not own:
            raise VLMFastError(f"--api-key-file {args.api_key_file} has no key")
        found += own
    return tuple(dict.fromkeys(found))
