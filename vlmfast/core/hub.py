"""Weights of stages on the Hugging Face Hub: ``owner/name``, optionally with ``@revision``.

Only JSON, safetensors and the model card are downloaded: nothing that must be unpickled.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vlmfast.errors import ModelError, RecipeError

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PATIENCE = 5  # seconds
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]+))?")

# By the beginnings of the names of their models.
_OWNERS = {
    "aya": "CohereLabs",
    "command": "CohereLabs",
    "fastvlm": "apple",
    "gemma": "google",
    "glm": "zai-org",
    "idefics": "HuggingFaceM4",
    "internvl": "OpenGVLab",
    "lfm": "LiquidAI",
    "llava": "llava-hf",
    "ministral": "mistralai",
    "mistral": "mistralai",
    "ovis": "AIDC-AI",
    "paligemma": "google",
    "qwen": "Qwen",
    "smolvlm": "HuggingFaceTB",
}


def is_hub_id(weights: str) -> bool:
    """Whether ``weights`` can only be a repository: it has the form of one, and is no folder."""
    return _ID.fullmatch(weights) is not None and not os.path.exists(weights)


def download(name: str, weights: str, files: tuple[str, ...]) -> Path:
    """The folder of a repository in the local cache, downloaded if necessary.

    Parameters
    ----------
    name : str
        Method name, for errors.
    weights : str
        ``owner/name`` or ``owner/name@revision``: a branch, a tag or a commit.
    files : tuple of str
        Names of the files to download. Those that the repository lacks are left out.

    Raises
    ------
    RecipeError
        When the repository or its revision does not exist or cannot be reached. With
        ``HF_HUB_OFFLINE=1``, when it is not in the cache.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = _ID.fullmatch(weights)
    assert match is not None  # see `is_hub_id`
    repo, revision = match["repo"], match["revision"]
    about = f"{name}: weights={weights}"
    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=list(files))
    except GatedRepoError as error:
        raise RecipeError(
            f"{about} is a gated repository; request access to it and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise RecipeError(
            f"{about} is neither a local folder nor a repository on {constants.ENDPOINT}; private "
            "repositories require `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise RecipeError(f"{about}: {repo} has no revision {revision or 'main'!r}") from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            reason = "is not a local folder and not in the cache, and HF_HUB_OFFLINE=1 is set"
        else:
            reason = f"is not a local folder, and {constants.ENDPOINT} cannot be reached"
        raise RecipeError(f"{about} {reason}") from error
    except Exception as error:  # the client passes on errors of several libraries
        raise RecipeError(f"{about} cannot be downloaded: {_reason(error)}") from error
    return Path(found)


def check_model(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> None:
    """Raise for a checkpoint that cannot be found, before anything is loaded.

    Of an id that is not in the cache, one request asks whether the Hub answers: its client would
    try again for half a minute. An id without an owner is looked up in the cache alone.

    Parameters
    ----------
    name : str
        A folder or a hub id.
    revision, cache_dir, local_files_only : optional
        As in Hugging Face's ``from_pretrained``.

    Raises
    ------
    ModelError
    """
    if os.path.exists(name):
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError as error:
        raise ModelError(f"{name} is no folder, and no hub id: {_reason(error)}") from error
    if isinstance(cached, str):
        return
    about = f"{name} is neither a folder nor in the cache"
    if "/" not in name:
        owner = next((own for key, own in _OWNERS.items() if name.lower().startswith(key)), "owner")
        raise ModelError(f"{about}; a hub id begins with its owner, as in {owner}/{name}")
    if constants.HF_HUB_OFFLINE or local_files_only:
        setting = "local_files_only" if local_files_only else "HF_HUB_OFFLINE=1"
        raise ModelError(f"{about}, and {setting} is set")
    if not reachable():
        raise ModelError(f"{about}, and {constants.ENDPOINT} cannot be reached")


def reachable() -> bool:
    """Whether the Hub answers one request, within seconds; `download` tries again for longer."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    except Exception:  # of the client's own library
        return False
    return True


def _reason(error: Exception) -> str:
    """The error in one line."""
    text = str(getattr(error, "server_message", None) or error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
