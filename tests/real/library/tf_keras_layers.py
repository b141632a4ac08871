"""Test cases for layers of tf_keras, each followed by a sharded head."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import tf_layoutmap as tlm
from tests.real import placement
from tests.real.compare import (
    CLOSE,
    check,
    difference,
    losses_differ_by,
    warnings_reported,
    without_mesh,
)
from tests.real.rounding import allowed

# `layout_map_scope` supports tf_keras only if tf_keras has been imported.
import tf_keras  # isort: skip

L = tf_keras.layers
RNG = np.random.default_rng(0)
SAMPLES, CLASSES, STEPS = 8, 4, 4


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=(SAMPLES, *shape)).astype(np.float32)


INPUTS = {
    "vector": floats(8),
    "series": floats(8, 8),
    "image": floats(8, 8, 4),
    "volume": floats(4, 4, 4, 4),
    "images": floats(2, 8, 8, 4),
    "tokens": RNG.integers(0, 16, (SAMPLES, 8)),
    "planes": floats(2, 8, 8),
    # Inputs of layers that precede all layers with weights.
    "pixels": RNG.uniform(0, 1, (SAMPLES, 8, 8, 4)).astype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """Test case for a layer.

    Attributes:
      make: Function that returns the layer.
      takes: Key of `INPUTS` that selects the input of the layer.
      twice: Whether the layer gets a list of two inputs, as merging layers
        require.
    """

    make: Callable[[], Any]
    takes: str
    twice: bool = False

    def run(self) -> None:
        """Runs the test case and prints the result of each check."""
        with warnings_reported():
            _run(self)


def _model(case: LayerCase) -> Any:
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(3)
    x = INPUTS[case.takes]
    inputs = tf_keras.Input(x.shape[1:], dtype=x.dtype)
    before = (
        inputs
        if case.takes in ("tokens", "pixels")
        else (L.Dense(x.shape[-1], name="before")(inputs))
    )
    after = case.make()([before, inputs] if case.twice else before)
    outputs = L.Dense(CLASSES, name="head")(L.Flatten()(after))
    model = tf_keras.Model(inputs, outputs)
    model.compile(
        tf_keras.optimizers.SGD(0.05),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _fit(model: Any, x: np.ndarray) -> list[float]:
    tf_keras.utils.set_random_seed(4)
    return model.fit(
        x,
        np.arange(SAMPLES) % CLASSES,
        epochs=STEPS,
        batch_size=SAMPLES,
        shuffle=False,
        verbose=0,
    ).history["loss"]


def _layouts(model: Any) -> tlm.LayoutMap:
    mesh = placement.mesh()
    layout_map = tlm.LayoutMap(mesh)
    for weight in model.weights:
        name = weight.name.partition(":")[0]
        shape = tuple(weight.shape)
        axes = placement.generic_axes(name, shape)
        key = placement.key_of(name)
        if axes is not None and key not in layout_map:
            layout_map[key] = placement.layout_of(mesh, *axes)
    return layout_map


def _run(case: LayerCase) -> None:
    x = INPUTS[case.takes]
    with without_mesh():
        plain = _model(case)
        layouts = _layouts(plain)
        losses = _fit(plain, x)
        predicted = plain.predict(x, verbose=0)
    with check("make") as made, tlm.layout_map_scope(layouts):
        model = _model(case)
    if made.status != "trained":
        return

    def rounding() -> float:
        return allowed(losses, lambda: _fit(_model(case), x))

    with check("fit", CLOSE, rounding) as found:
        found.difference = losses_differ_by(losses, _fit(model, x))
    with tempfile.TemporaryDirectory() as folder:
        _files(case, pathlib.Path(folder), plain, model)
    with check("predict", CLOSE) as found:
        found.difference = difference(predicted, model.predict(x, verbose=0))


def _files(
    case: LayerCase, folder: pathlib.Path, plain: Any, model: Any
) -> None:
    with check("save") as found:
        file = os.fspath(folder / "mesh.weights.h5")
        model.save_weights(file)
        other = _model(case)
        other.load_weights(file)
        found.difference = _largest(model, other)
    with check("load") as found:
        file = os.fspath(folder / "plain.weights.h5")
        plain.save_weights(file)
        model.load_weights(file)
        found.difference = _largest(plain, model)


def _largest(first: Any, second: Any) -> float:
    return max(
        (
            difference(a, b)
            for a, b in zip(
                first.get_weights(), second.get_weights(), strict=True
            )
        ),
        default=0.0,
    )


def layer(name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Returns a function that creates the layer `name`."""
    return lambda: getattr(L, name)(*arguments, name="tested", **options)


def _table() -> dict[str, LayerCase]:
    table = {}

    def add(
        takes: str,
        name: str,
        *arguments: Any,
        twice: bool = False,
        **options: Any,
    ) -> None:
        label = f"{name} (twice)" if name in table else name
        table[label] = LayerCase(
            layer(name, *arguments, **options), takes, twice
        )

    for name in ("Dense", "LocallyConnected1D"):
        add(
            "vector" if name == "Dense" else "series",
            name,
            *((16,) if name == "Dense" else (4, 3)),
        )
    add("series", "EinsumDense", "abc,cd->abd", (None, 16), bias_axes="d")
    add("tokens", "Embedding", 16, 8)
    for name in (
        "ReLU",
        "LeakyReLU",
        "PReLU",
        "ELU",
        "Softmax",
        "ThresholdedReLU",
        "UnitNormalization",
        "Identity",
        "LayerNormalization",
        "BatchNormalization",
        "ActivityRegularization",
        "Masking",
    ):
        add("series", name, **({"theta": 0.1} if "Threshold" in name else {}))
    add("series", "Activation", "tanh")
    add("vector", "RepeatVector", 3)
    add("series", "Permute", (2, 1))
    add("series", "Reshape", (4, 16))
    add("series", "Flatten")
    add("series", "Lambda", lambda x: x * 2)
    for name in (
        "Add",
        "Subtract",
        "Multiply",
        "Average",
        "Maximum",
        "Minimum",
        "Concatenate",
        "Dot",
        "Attention",
        "AdditiveAttention",
    ):
        add("series", name, *((2,) if name == "Dot" else ()), twice=True)
    add("series", "MultiHeadAttention", 2, 4)
    table["MultiHeadAttention"] = LayerCase(lambda: _self_attention(), "series")
    for rank, takes in ((1, "series"), (2, "image"), (3, "volume")):
        for name, arguments in {
            f"Conv{rank}D": (4, 3),
            f"Conv{rank}DTranspose": (4, 2),
            f"MaxPooling{rank}D": (2,),
            f"AveragePooling{rank}D": (2,),
            f"GlobalMaxPooling{rank}D": (),
            f"GlobalAveragePooling{rank}D": (),
            f"Cropping{rank}D": (1,),
            f"ZeroPadding{rank}D": (1,),
            f"UpSampling{rank}D": (2,),
            f"SpatialDropout{rank}D": (0.5,),
        }.items():
            add(takes, name, *arguments)
    for name in ("DepthwiseConv1D", "SeparableConv1D"):
        add("series", name, *((3,) if "Depth" in name else (4, 3)))
    for name in ("DepthwiseConv2D", "SeparableConv2D", "LocallyConnected2D"):
        add("image", name, *((3,) if "Depth" in name else (4, 3)))
    add("image", "GroupNormalization", 2)
    for name in ("Dropout", "GaussianDropout", "AlphaDropout", "GaussianNoise"):
        add("series", name, 0.5)
    for name in ("SimpleRNN", "GRU", "LSTM"):
        add("series", name, 8, return_sequences=True)
    for rank, takes in ((1, "planes"), (2, "images")):
        add(takes, f"ConvLSTM{rank}D", 4, 3)
    table["Bidirectional"] = LayerCase(
        lambda: L.Bidirectional(L.LSTM(8), name="tested"), "series"
    )
    table["RNN of cells"] = LayerCase(
        lambda: L.RNN([L.LSTMCell(8), L.GRUCell(8)], name="tested"), "series"
    )
    table["TimeDistributed"] = LayerCase(
        lambda: L.TimeDistributed(L.Dense(16), name="tested"), "series"
    )
    table["Normalization"] = LayerCase(
        layer("Normalization", mean=1.0, variance=4.0), "vector"
    )
    add("pixels", "Rescaling", 0.5)
    add("pixels", "Resizing", 4, 4)
    add("pixels", "CenterCrop", 4, 4)
    for name, arguments in {
        "RandomFlip": (),
        "RandomBrightness": (0.2,),
        "RandomContrast": (0.2,),
        "RandomCrop": (4, 4),
        "RandomRotation": (0.1,),
        "RandomZoom": (0.1,),
        "RandomTranslation": (0.1, 0.1),
    }.items():
        add("pixels", name, *arguments, seed=1)
    add("tokens", "CategoryEncoding", 16)
    return table


def _self_attention() -> Any:
    attention = L.MultiHeadAttention(2, 4, name="tested")
    return lambda x: attention(x, x)


CASES = _table()
