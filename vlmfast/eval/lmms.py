"""vlmfast as a model of lmms-eval: ``--model vlmfast --model_args pretrained=...,recipe=...``.

lmms-eval finds the manifest through the entry point of the installed package, in the middle of its
own import. This module therefore imports nothing of it; the models are in `lmms_model`.
``docs/evaluation.md`` shows the command.
"""

from __future__ import annotations

from typing import Any

_MODELS = f"{__name__}_model"


def manifests() -> Any:
    """The ``ModelManifest`` for the entry point of lmms-eval.

    ``--force_simple`` selects the second class, which lmms-eval needs for multiple-choice tasks.
    """
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="vlmfast",
        chat_class_path=f"{_MODELS}.VLMFast",
        simple_class_path=f"{_MODELS}.VLMFastSimple",
    )
