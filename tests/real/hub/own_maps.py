"""Runs each backbone of keras-hub that has a layout map under this map."""

import keras_hub

from tests.real.hub import language
from tests.real.hub.common import language_case

models = keras_hub.models

# Backbones with a layout map. The keys are their names in `language.BACKBONES`.
CASES = {
    name: language_case(*language.BACKBONES[name], backbone=backbone)
    for name, backbone in {
        "Gemma": models.GemmaBackbone,
        "Llama": models.LlamaBackbone,
        "Llama 3": models.Llama3Backbone,
        "Qwen": models.QwenBackbone,
        "Qwen MoE": models.QwenMoeBackbone,
        "Qwen 3 MoE": models.Qwen3MoeBackbone,
    }.items()
}


def missing() -> list[str]:
    """Returns backbones that have a layout map but no test case."""
    known = {case.backbone for case in CASES.values()}
    return [
        name
        for name, value in vars(models).items()
        if name.endswith("Backbone")
        and hasattr(value, "get_layout_map")
        and value not in known
    ]
