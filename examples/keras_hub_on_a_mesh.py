"""Trains a keras-hub language model on a mesh, with the model's own layout map.

    python examples/keras_hub_on_a_mesh.py
    python examples/keras_hub_on_a_mesh.py --mesh=1x4 --layers=4

The model is a Llama with random weights and a small configuration; nothing is
downloaded. The layout map comes from `LlamaBackbone.get_layout_map`, which is
part of keras-hub. The mesh consists of logical CPUs, so the program runs on any
machine. The program also trains the same model without a mesh, and compares the
losses. The task is to continue arithmetic sequences modulo the size of the
vocabulary.

keras-hub is an optional package: `pip install keras-hub`.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported. This level hides errors
# that TensorFlow's graph optimizer logs about the shapes in DTensor's graphs.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import logical_mesh
import numpy as np
from completion.report import Report

_MESH = flags.DEFINE_string(
    "mesh", "2x2", "Mesh of logical CPUs: sizes of the axes batch and model."
)
_STEPS = flags.DEFINE_integer(
    "steps",
    200,
    "Training steps, rounded down to a multiple of 4.",
    lower_bound=4,
)
_LAYERS = flags.DEFINE_integer(
    "layers", 2, "Transformer layers.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
    "seed", 7, "Seed of the data and of the initial weights.", lower_bound=0
)
flags.register_validator(
    "mesh", logical_mesh.is_shape, "must look like 2x2, each size 1 to 99."
)

# Size of the vocabulary and length of the inputs.
VOCABULARY, LENGTH = 16, 12
_HEADS, _DIM = 4, 32
BATCH_SIZE = 32
_EPOCHS = 4
_NUM_HELD_OUT = 256


def _fits(shape: str) -> bool:
    batch, model = logical_mesh.parse_shape(shape)
    return BATCH_SIZE % batch == 0 and _HEADS % model == 0


flags.register_validator(
    "mesh",
    lambda shape: not logical_mesh.is_shape(shape) or _fits(shape),
    f"the axis batch must divide the batch size, {BATCH_SIZE}, and the axis "
    f"model must divide the number of attention heads, {_HEADS}.",
)


def sequences(count: int, seed: int) -> np.ndarray:
    """Returns arithmetic sequences, `[count, LENGTH + 1]` int32.

    The first number and the difference of each sequence are random.
    """
    draw = np.random.default_rng(seed)
    first = draw.integers(0, VOCABULARY, (count, 1))
    step = draw.integers(1, 5, (count, 1))
    return ((first + step * np.arange(LENGTH + 1)) % VOCABULARY).astype(
        np.int32
    )


def inputs_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the inputs that a keras-hub language model expects."""
    tokens = rows[:, :-1]
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


def build_model(num_layers: int, seed: int):
    """Returns a compiled model with random weights."""
    import keras
    import keras_hub

    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=num_layers,
        num_query_heads=_HEADS,
        num_key_value_heads=_HEADS,
        hidden_dim=_DIM,
        intermediate_dim=2 * _DIM,
    )
    model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    return model


def train(model, *, steps: int, seed: int) -> list[float]:
    """Trains in four epochs and returns the mean loss of each."""
    rows = sequences(steps // _EPOCHS * BATCH_SIZE, seed)
    history = model.fit(
        inputs_of(rows),
        rows[:, 1:],
        batch_size=BATCH_SIZE,
        epochs=_EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"]


def accuracy(model, seed: int) -> float:
    """Returns the share of held-out tokens that the model predicts correctly.

    The first prediction of a sequence is not counted, because one token does
    not determine the next one.
    """
    rows = sequences(_NUM_HELD_OUT, seed + 1)
    scores = model.predict(inputs_of(rows), batch_size=BATCH_SIZE, verbose=0)
    return float(np.mean(np.argmax(scores, axis=-1)[:, 1:] == rows[:, 2:]))


def run(report: Report, mesh, *, steps: int, num_layers: int, seed: int):
    """Trains with and without the mesh and prints a comparison.

    Args:
      report: Report to print to.
      mesh: `dtensor.Mesh` with the axes "batch" and "model".
      steps: Number of training steps.
      num_layers: Number of Transformer layers.
      seed: Seed of the data and of the initial weights.

    Returns:
      The losses and the accuracies, each without and with the mesh.
    """
    import keras_hub
    from transformer.model import held_bytes

    import tf_layoutmap as tlm

    axes = {axis: mesh.dim_size(axis) for axis in logical_mesh.AXES}
    device_mesh = tlm.distribution.DeviceMesh(
        list(axes.values()), list(axes), [f"CPU:{i}" for i in range(mesh.size)]
    )
    layout_map = keras_hub.models.LlamaBackbone.get_layout_map(device_mesh)
    single = build_model(num_layers, seed)
    # With `init="host"`, the initial weights are the same as on a single
    # device.
    with tlm.layout_map_scope(layout_map, init="host"):
        sharded = build_model(num_layers, seed)
    losses, accuracies = [], []
    for model in (single, sharded):
        losses.append(train(model, steps=steps, seed=seed))
        accuracies.append(accuracy(model, seed))
    weights = sharded.trainable_weights
    num_sharded = sum(
        not weight.value.layout.is_fully_replicated() for weight in weights
    )
    fullest, once = held_bytes(sharded)
    report.table(
        f"LlamaCausalLM on a mesh of {mesh.size} logical CPUs",
        ["", ""],
        [
            ("mesh", " x ".join(f"{n} {size}" for n, size in axes.items())),
            (
                "weights",
                f"{len(weights)} with {sharded.count_params():,} parameters; "
                f"{num_sharded} of them are sharded",
            ),
            ("weights and optimizer, unsharded", f"{once / 1024:.0f} KiB"),
            ("on the fullest device", f"{fullest / 1024:.0f} KiB"),
        ],
    )
    report.table(
        "Training",
        ["", "first epoch's loss", "last epoch's loss", "accuracy"],
        [
            [name, f"{loss[0]:.4f}", f"{loss[-1]:.4f}", f"{share:.1%}"]
            for name, loss, share in zip(
                ("one device", "mesh"), losses, accuracies
            )
        ],
        numbers=["first epoch's loss", "last epoch's loss", "accuracy"],
    )
    difference = np.max(np.abs(np.subtract(*losses)) / np.abs(losses[0]))
    report.say(
        f"The losses differ by at most {difference:.0e} (relative). Devices "
        "add numbers in another order."
        if difference
        else "The losses are bitwise identical."
    )
    report.print_summary()
    return losses, accuracies


def main(argv: list[str]) -> None:
    """Checks that keras-hub is installed, then trains."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    if importlib.util.find_spec("keras_hub") is None:
        print(
            "This example requires keras-hub. Install it with "
            "`pip install keras-hub`.",
            file=sys.stderr,
        )
        sys.exit(2)
    # TensorFlow can split the CPU only before it runs its first operation.
    mesh = logical_mesh.make_mesh(logical_mesh.parse_shape(_MESH.value))
    run(
        Report(),
        mesh,
        steps=_STEPS.value,
        num_layers=_LAYERS.value,
        seed=_SEED.value,
    )


if __name__ == "__main__":
    app.run(main)
