"""Optimizers of the random models in `random_models.py`, and ways of training.

Each function of `WAYS` trains a compiled model and returns all reported
numbers. The function gets the mesh of the model, or None.
"""

import contextlib
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import dtensor

BATCH_SIZE, EPOCHS = 4, 2

O = keras.optimizers  # noqa: E741 - A table of optimizers follows.


def _several(**options):
    return O.MultiOptimizer(
        O.OptimizerMap(
            O.SGD(0.05, momentum=0.5, name="others", **options),
            {".*kernel": O.Adam(0.01, name="kernels", **options)},
        )
    )


# The functions get options of each optimizer, such as `clipnorm`.
OPTIMIZERS = {
    "SGD": lambda **o: O.SGD(0.1, **o),
    "SGD nesterov": lambda **o: O.SGD(0.05, momentum=0.9, nesterov=True, **o),
    "SGD schedule": lambda **o: O.SGD(
        O.schedules.ExponentialDecay(0.1, 2, 0.5), **o
    ),
    "Adam": lambda **o: O.Adam(0.01, **o),
    "Adam amsgrad": lambda **o: O.Adam(0.01, amsgrad=True, **o),
    "Adam schedule": lambda **o: O.Adam(
        O.schedules.PiecewiseConstantDecay([2, 4], [0.02, 0.01, 0.005]), **o
    ),
    "Adam global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=0.1),
    "AdamW": lambda **o: O.AdamW(0.01, **{"weight_decay": 0.01, **o}),
    "Adadelta": lambda **o: O.Adadelta(0.5, **o),
    "Adafactor": lambda **o: O.Adafactor(0.01, **o),
    "Adagrad": lambda **o: O.Adagrad(0.05, **o),
    "RMSprop": lambda **o: O.RMSprop(0.01, **o),
    "RMSprop centered": lambda **o: O.RMSprop(
        0.01, momentum=0.5, centered=True, **o
    ),
    "Nadam": lambda **o: O.Nadam(0.01, **o),
    "Adamax": lambda **o: O.Adamax(0.01, **o),
    "Ftrl": lambda **o: O.Ftrl(0.05, **o),
    "Lion": lambda **o: O.Lion(0.01, **o),
    "Lamb": lambda **o: O.Lamb(0.01, **o),
    "Muon": lambda **o: O.Muon(0.01, **o),
    "ScheduleFreeAdamW": lambda **o: O.ScheduleFreeAdamW(0.01, **o),
    "several": _several,
}
# `LossScaleOptimizer` supports neither clipping nor moving averages itself; the
# inner optimizer has these options.
SCALED = "scaled"


def draw_options(rng, is_sparse: bool) -> dict:
    """Draws options of an optimizer.

    Args:
      rng: `random.Random`.
      is_sparse: Whether the model can have sparse gradients.
    """
    options = {}
    if rng.random() < 0.4:
        clip = rng.choice(
            [("clipnorm", 0.1), ("clipvalue", 0.01), ("global_clipnorm", 0.1)]
        )
        options[clip[0]] = clip[1]
    if rng.random() < 0.25:
        options["weight_decay"] = 0.05
    if rng.random() < 0.25:
        options["gradient_accumulation_steps"] = rng.choice([2, 3])
    if rng.random() < 0.3:
        options |= {
            "use_ema": True,
            "ema_momentum": 0.5,
            "ema_overwrite_frequency": rng.choice([None, 2, 3]),
        }
    if rng.random() < 0.15:
        options["loss_scale_factor"] = 8.0
    elif rng.random() < 0.15:
        options[SCALED] = True
    if is_sparse:
        # Keras divides a `tf.IndexedSlices` by the factor, which fails.
        options.pop("loss_scale_factor", None)
    return options


def optimizer(name: str, options: dict) -> keras.optimizers.Optimizer:
    """Returns a new optimizer.

    Args:
      name: Key of `OPTIMIZERS`.
      options: Result of `draw_options`.
    """
    options = dict(options)
    if options.pop(SCALED, False):
        inner = OPTIMIZERS[name](**options)
        return O.LossScaleOptimizer(inner, dynamic_growth_steps=3)
    return OPTIMIZERS[name](**options)


def _loss(kind_of_labels: str) -> keras.losses.Loss:
    if kind_of_labels == "f":
        return keras.losses.MeanSquaredError()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_model(model, program) -> None:
    if program.loss == "mse":
        loss, metrics = _loss("f"), ["mae", "cosine_similarity"]
    else:
        loss, metrics = _loss("i"), ["sparse_categorical_accuracy"]
    model.compile(
        optimizer(program.optimizer, program.options),
        loss,
        metrics=metrics if program.way in FITS else None,
        run_eagerly=program.way == "fit eagerly",
        steps_per_execution=2 if program.way == "two steps" else 1,
    )
    if program.optimizer == "ScheduleFreeAdamW" or program.way not in FITS:
        # Without a mesh, Keras assigns the initial momentum of
        # `ScheduleFreeAdamW` again in each step if `fit` builds it.
        model.optimizer.build(model.trainable_variables)


def _fit(model, x, y, mesh, **options):
    del mesh
    history = model.fit(
        x,
        y,
        **{
            "batch_size": BATCH_SIZE,
            "epochs": EPOCHS,
            "shuffle": False,
            "verbose": 0,
            **options,
        },
    ).history
    return [number for numbers in history.values() for number in numbers]


def _predict_first(model, x, y, mesh):
    model.predict(x, batch_size=BATCH_SIZE, verbose=0)
    first = model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
    return [*_as_list(first), *_fit(model, x, y, mesh)]


def _dataset(model, x, y, mesh):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    return _fit(model, data, None, mesh, batch_size=None, validation_data=data)


def _sample_weights(model, x, y, mesh):
    weights = np.arange(len(y)) % 3 / 2
    return _fit(model, x, y, mesh, sample_weight=weights)


def _batches(x, y):
    for _ in range(EPOCHS):
        for start in range(0, len(y), BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            yield keras.tree.map_structure(lambda a: a[rows], (x, y))


def _train_on_batch(model, x, y, mesh):
    del mesh
    numbers = []
    for batch in _batches(x, y):
        numbers += _as_list(model.train_on_batch(*batch))
        numbers += _as_list(model.test_on_batch(*batch))
    return numbers


def _as_list(numbers):
    return [float(number) for number in np.ravel(numbers)]


def _custom(model, x, y, mesh, *, whole=False, forward=False, apply=True):
    """Trains with a gradient tape.

    Args:
      model: Compiled model.
      x: Inputs.
      y: Labels.
      mesh: Mesh of the model, or None.
      whole: Whether the step is a `tf.function`.
      forward: Whether the forward pass is a `tf.function`.
      apply: If false, the `tf.function` returns the gradients, which are
        applied eagerly.
    """
    call = tf.function(model) if forward else model
    loss_of = _loss(y.dtype.kind)
    weights = model.trainable_variables

    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, call(x, training=True))
            for extra in model.losses:
                loss = loss + tf.cast(extra, loss.dtype)
            loss = model.optimizer.scale_loss(loss)
        return loss, tape.gradient(loss, weights)

    def apply_gradients(found):
        model.optimizer.apply(found, weights)

    def step(x, y):
        loss, found = gradients(x, y)
        apply_gradients(found)
        return loss

    if whole and apply:
        step = tf.function(step)
    elif whole:
        gradients = tf.function(gradients)
    numbers = []
    scope = (
        contextlib.nullcontext()
        if mesh is None
        else tlm.layout.default_mesh(mesh, "batch")
    )
    with scope:
        for batch in _batches(x, y):
            if mesh is not None:
                batch = keras.tree.map_structure(
                    lambda a: _on_mesh(a, mesh), batch
                )
            loss = step(*batch)
            numbers.append(
                float(loss if mesh is None else tlm.layout.to_host(loss))
            )
        if model.optimizer.use_ema:
            model.optimizer.finalize_variable_values(weights)
    return numbers


def _on_mesh(value, mesh):
    sharded = len(value) % mesh.dim_size("batch") == 0
    batch = "batch" if sharded else dtensor.UNSHARDED
    rest = [dtensor.UNSHARDED] * (value.ndim - 1)
    return tlm.layout.to_mesh(value, dtensor.Layout([batch, *rest], mesh))


FITS = {
    "fit": _fit,
    "fit eagerly": _fit,
    "two steps": _fit,
    "predict first": _predict_first,
    "dataset": _dataset,
    "sample weights": _sample_weights,
    "train_on_batch": _train_on_batch,
}
WAYS = FITS | {
    "tape in a function": lambda *a: _custom(*a, whole=True),
    "eager tape": _custom,
    "eager tape of a function": lambda *a: _custom(*a, forward=True),
    "gradients of a function": lambda *a: _custom(*a, whole=True, apply=False),
}
# Ways in which a trained model is saved and loaded.
FILES = ("weights.h5", "keras", "checkpoint")


def saved(model, file: str, folder: str) -> str:
    """Saves a model and its optimizer; returns the path."""
    path = str(pathlib.Path(folder) / f"model.{file}")
    if file == "weights.h5":
        model.save_weights(path)
    elif file == "keras":
        model.save(path)
    else:
        path = tf.train.Checkpoint(
            model=model, optimizer=model.optimizer
        ).write(path)
    return path


def loaded(file: str, path: str, build, program):
    """Returns the compiled model that `saved` wrote.

    Args:
      file: Element of `FILES`.
      path: Result of `saved`.
      build: Function that returns a new model.
      program: The program of the model.
    """
    if file == "keras":
        return keras.saving.load_model(path)
    model = build()
    compile_model(model, program)
    model.optimizer.build(model.trainable_variables)
    if file == "weights.h5":
        model.load_weights(path)
    else:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(
            path
        ).assert_existing_objects_matched()
    return model
