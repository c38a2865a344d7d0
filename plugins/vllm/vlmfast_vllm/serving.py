"""``vlmfast serve MODEL --engine vllm``: vLLM is imported last, after all that can be refused."""

from __future__ import annotations

import contextlib
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vlmfast.errors import VLMFastError
from vlmfast.integrations.vllm import export
from vlmfast.serve.config import ServerConfig
from vlmfast.serve.server import serve

from .frontend import Frontend
from .options import check, check_reserved, translated
from .recipes import KEY

# Read when vLLM is imported. Its lines are not for stdout, which tells the address. The process of
# the engine must not be a copy of one with threads.
_VARIABLES = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def run(args: Namespace, config: ServerConfig, ready: Callable[[str], None]) -> None:
    """Serve a model with vLLM until SIGTERM or SIGINT.

    Parameters
    ----------
    args : Namespace
        Of the command line.
    config : ServerConfig
        Its options that all engines have.
    ready : callable
        Called with the URL when the model is loaded and warm.

    Raises
    ------
    VLMFastError
        As `prepared`.
    """
    with prepared(args, config) as (frontend, runner):
        serve(config, lambda: frontend, ready, runner)


@contextlib.contextmanager
def prepared(
    args: Namespace, config: ServerConfig
) -> Iterator[tuple[Frontend, Callable[[Any, ServerConfig], Any]]]:
    """A model without its weights, and what loads it and answers its requests, as of `Server`.

    Raises
    ------
    VLMFastError
        For options, recipes and models that vLLM does not support, before anything is loaded.
    """
    check(args)
    with _folder(args.model) as model:
        frontend = Frontend(model, config.recipe)
        for recipe in config.aliases.values():
            frontend.recipe(recipe)
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        engine = _arguments(args, str(model), frontend.plans.default.text)
        from .answering import VllmRunner

        yield frontend, partial(VllmRunner, engine=engine)


@contextlib.contextmanager
def _folder(model: str) -> Iterator[str | Path]:
    """A checkpoint that vLLM loads; the shipped one is exported for it."""
    if model != "tiny":
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="vlmfast-") as folder:
        export(model, folder)
        yield folder


def _arguments(args: Namespace, model: str, recipe: str) -> Any:
    """The arguments of vLLM's engine."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise VLMFastError("--engine vllm needs vLLM: pip install vllm") from error
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    given = _parsed(parser, args.engine_options)
    check_reserved(given, vars(_parsed(parser, [])))
    overrides = given.hf_overrides or {}
    if not isinstance(overrides, dict) or KEY in overrides:
        raise VLMFastError(f"--hf-overrides must be a JSON object without {KEY}; use --recipe")
    given.hf_overrides = {**overrides, KEY: recipe}
    for name, value in {**translated(args), "model": model}.items():
        setattr(given, name, value)
    engine = AsyncEngineArgs.from_cli_args(given)
    formats = engine.structured_outputs_config
    if formats.backend == "auto":
        formats.backend = "guidance"  # as vlmfast's own
    return engine


def _parsed(parser: Any, options: Sequence[str]) -> Namespace:
    """vLLM's options, parsed by its own parser."""

    def refuse(message: str) -> None:
        raise VLMFastError(f"options of vLLM, after --: {message}")

    parser.error = refuse
    return parser.parse_args(list(options))
