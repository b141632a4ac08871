"""Compares initial weights and the first loss of public models on five meshes.

    python -m tests.real.first_losses [MODEL ...]

With one seed, a model of keras-hub or keras.applications must have bitwise
identical weights on each mesh, and the same first loss except for rounding. The
program prints a table in Markdown, which docs/initial_values.md contains.
"""

import sys

import keras
import numpy as np

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tests.real import kinds, placement
from tests.real.compare import without_mesh
from tests.real.models import ModelCase

MODELS = {
    "GPT-2": "keras-hub, language models",
    "Gemma": "keras-hub, language models",
    "Llama": "keras-hub, language models",
    "Mixtral": "keras-hub, language models",
    "BERT": "keras-hub, encoders of text",
    "T5": "keras-hub, encoders of text",
    "ViT": "keras-hub, images",
    "Whisper": "keras-hub, encoders of text",
    "ConvNeXtTiny": "keras.applications",
    "MobileNetV2": "keras.applications",
}
MESHES = {
    "1x2": {"batch": 1, "model": 2},
    "2x1": {"batch": 2, "model": 1},
    "2x2": {"batch": 2, "model": 2},
    "1x4": {"batch": 1, "model": 4},
}


def results(name: str) -> tuple[bool, float, int]:
    """Compares one model on all meshes with the model without a mesh.

    Args:
      name: A key of `MODELS`.

    Returns:
      Whether all weights are bitwise identical on all meshes, the largest
      relative difference of the first loss, and the number of sharded weights
      on the mesh 2x2.
    """
    case = kinds.cases(MODELS[name])[name]
    with without_mesh():
        plain = _fresh(case)
        wanted = _weights(plain)
        x, y = case.data(plain)
        loss = _first_loss(plain, x, y)
    are_identical, largest, num_sharded = True, 0.0, 0
    for mesh_name, sizes in MESHES.items():
        layouts = _layouts(plain, sizes)
        with tlm.layout_map_scope(layouts):
            model = _fresh(case)
        found = _weights(model)
        are_identical &= len(found) == len(wanted) and all(
            np.array_equal(a.view(np.uint8), b.view(np.uint8))
            for a, b in zip(found, wanted, strict=True)
        )
        if mesh_name == "2x2":
            num_sharded = sum(
                any(one.axes) for one in layouts.explain(model).variables
            )
        on_mesh = _first_loss(model, x, y)
        largest = max(largest, abs(on_mesh - loss) / abs(loss))
    return are_identical, largest, num_sharded


def _layouts(model: keras.Model, sizes: dict[str, int]) -> tlm.LayoutMap:
    """Returns a layout map that shards all weights that the mesh divides."""
    mesh = mesh_of(**sizes)
    layouts = tlm.LayoutMap(mesh)
    for key, layout in placement.generic_map([model], mesh).items():
        axes = dict(
            zip(layout.sharding_specs, _shape_of(model, key), strict=False)
        )
        if axes.get("model", sizes["model"]) % sizes["model"] == 0:
            layouts[key] = layout
    return layouts


def _shape_of(model: keras.Model, key: str) -> tuple[int, ...]:
    return next(
        tuple(w.shape) for w in model.weights if placement.key_of(w.path) == key
    )


def _fresh(case: ModelCase) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return case.make()


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [np.ascontiguousarray(w.numpy()) for w in model.weights]


def _first_loss(model: keras.Model, x, y) -> float:
    samples = len(keras.tree.flatten(y)[0])
    return model.fit(
        x, y, batch_size=samples, shuffle=False, verbose=0
    ).history["loss"][0]


def main() -> None:
    print(
        "| model | sharded weights on 2x2 | weights on all meshes | largest "
        "relative difference of the first loss |\n|---|---|---|---|"
    )
    for name in sys.argv[1:] or MODELS:
        are_identical, largest, num_sharded = results(name)
        print(
            f"| {name} | {num_sharded} | "
            f"{'identical' if are_identical else 'different'} | "
            f"{largest:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
