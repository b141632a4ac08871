"""Functions that train the same model with and without a mesh."""

import functools
import weakref

import keras
import numpy as np

import tf_layoutmap as tlm
from tests.layout.meshes import axes_of, layout_of, mesh_of

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(32, 8)).astype(np.float32)
SERIES = RNG.normal(size=(32, 6, 8)).astype(np.float32)
IMAGES = RNG.normal(size=(32, 8, 8, 3)).astype(np.float32)
TOKENS = RNG.integers(0, 16, size=(32, 6))
LABELS = RNG.integers(0, 4, size=32)

# Sums over shards are computed in a different order, and the square root in an
# optimizer amplifies the differences in the last bits.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)

DENSE = {
    "d1.kernel": (None, "model"),
    "d1.bias": ("model",),
    "d2.kernel": ("model", None),
}


def dense_model():
    return sequential(
        (8,), keras.layers.Dense(16, activation="tanh", name="d1")
    )


def sequential(shape, *layers):
    """Returns a model of `layers` and a Dense layer of four logits."""
    return keras.Sequential(
        [
            keras.Input(shape),
            *layers,
            keras.layers.Flatten(),
            keras.layers.Dense(4, name="d2"),
        ]
    )


# Models without a mesh. `fit` runs these models eagerly for at most
# `_MAX_EAGER_STEPS` steps, because tracing and compiling a step takes as long
# as 12 to 30 eager steps.
_PLAIN = weakref.WeakSet()
_MAX_EAGER_STEPS = 12


def plain(make):
    keras.utils.set_random_seed(3)
    model = make()
    _PLAIN.add(model)
    return model


def is_plain(model) -> bool:
    """Returns whether `plain` made the model, so that short runs are eager."""
    return model in _PLAIN


def on_mesh(make, axes=None, mesh=None, **options):
    """Returns the same model as `plain(make)` on a mesh, with equal weights."""
    mesh = mesh or mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    for key, value in (DENSE if axes is None else axes).items():
        layout_map[key] = layout_of(mesh, *value)
    keras.utils.set_random_seed(3)
    with tlm.layout_map_scope(layout_map, **options):
        model = make()
    return model


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(
    model,
    x=FEATURES,
    y=LABELS,
    *,
    optimizer=None,
    epochs=2,
    metrics=("accuracy",),
    run_eagerly=None,
    **options,
):
    """Trains `model` and returns the history as `{name: values}`.

    By default, short runs without a mesh use eager execution. Pass
    `run_eagerly=False` for a model that calls `tf.random`, because these
    operations draw different numbers in a graph.
    """
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    if run_eagerly is None:
        run_eagerly = (
            model in _PLAIN
            and isinstance(x, np.ndarray)
            and len(x) * epochs <= _MAX_EAGER_STEPS * options["batch_size"]
        )
    model.compile(
        keras.optimizers.Adam(0.01) if optimizer is None else optimizer,
        loss(),
        metrics=list(metrics),
        run_eagerly=run_eagerly,
    )
    return model.fit(x, y, epochs=epochs, **options).history


def assert_alike(first, second, **tolerance):
    """Compares the numbers in two nested structures."""
    keras.tree.assert_same_structure(first, second)
    for a, b in zip(keras.tree.flatten(first), keras.tree.flatten(second)):
        np.testing.assert_allclose(a, b, **(tolerance or TOLERANCE))


def assert_same_weights(first, second, *, but=(), **tolerance):
    """Compares weights, statistics and optimizer state.

    Args:
      first: Model.
      second: Model with the same weights.
      but: Names of weights that are not compared, because their gradients
        consist of rounding errors.
      **tolerance: `rtol` and `atol`.
    """
    pairs = list(zip(first.weights, second.weights, strict=True))
    if first.compiled and first.optimizer is not None:
        pairs += zip(
            first.optimizer.variables, second.optimizer.variables, strict=True
        )
    for a, b in pairs:
        if not any(name in a.path.replace("/", "_") for name in but):
            np.testing.assert_allclose(
                a.numpy(), b.numpy(), err_msg=a.path, **(tolerance or TOLERANCE)
            )


@functools.lru_cache(maxsize=4)
def _reference(make, x_id, optimizer, options):
    """Returns a trained model without a mesh, and its history."""
    model = plain(make)
    return model, fit(model, _X[x_id], optimizer=optimizer(), **dict(options))


# Maps the `id` of each array to the array. `_reference` is cached by this id,
# and the reference to the array keeps the id valid.
_X = {}


def adam():
    return keras.optimizers.Adam(0.01)


def assert_trains_alike(make, x, axes, *, mesh=None, optimizer=adam, **options):
    """Trains both models and compares losses, weights and slots.

    The most recent references are cached. Cases with the same functions `make`
    and `optimizer` that differ only in `axes` or `mesh` therefore share one
    reference.
    """
    _X[id(x)] = x
    reference, expected = _reference(
        make, id(x), optimizer, tuple(sorted(options.items()))
    )
    model = on_mesh(make, axes, mesh)
    assert_alike(expected, fit(model, x, optimizer=optimizer(), **options))
    assert_same_weights(reference, model)
    return model


def assert_slots_have_layouts_of_weights(model):
    """Checks that slots with the same shape as a weight have its layout."""
    weights = {w.path.replace("/", "_"): w for w in model.trainable_weights}
    slots = 0
    for slot in model.optimizer.variables:
        for path, weight in weights.items():
            if path in slot.path and slot.shape == weight.shape:
                assert axes_of(slot) == axes_of(weight), slot.path
                slots += 1
    return slots
