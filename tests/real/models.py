"""Runs a Keras 3 model with and without a mesh: `fit`, files, `generate`."""

import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tf_layoutmap as tlm
from tests.real import placement, rounding
from tests.real.compare import (
    CLOSE,
    check,
    difference,
    losses_differ_by,
    say,
    warnings_reported,
    without_mesh,
)
from tests.real.rounding import allowed_of_outputs
from tf_layoutmap.layout.replication import report

STEPS = 4


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """Test case for a model, with its data.

    Attributes:
      make: Function that returns the compiled model.
      data: Function that returns inputs and labels for a model.
      backbone: Class whose layout map is used; None for the generic map.
      planned: Whether the planner creates the layout map.
      generate: Function that returns the tokens that a model generates; None if
        the model generates no tokens.
    """

    make: Callable[[], keras.Model]
    data: Callable[[keras.Model], tuple[Any, Any]]
    backbone: type | None = None
    planned: bool = False
    generate: Callable[[keras.Model], Any] | None = None

    def run(self) -> None:
        """Runs the test case and prints the result of each check."""
        with warnings_reported():
            _run(self)


def _fresh(case: ModelCase) -> keras.Model:
    """Returns the model of a case; the weights are equal in every call."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return case.make()


def _samples(y) -> int:
    return len(keras.tree.flatten(y)[0])


def _fit(model: keras.Model, x, y) -> list[float]:
    return model.fit(
        x, y, epochs=STEPS, batch_size=_samples(y), shuffle=False, verbose=0
    ).history["loss"]


def _predict(model: keras.Model, x) -> list[np.ndarray]:
    return keras.tree.flatten(model.predict(x, verbose=0))


def _largest(pairs) -> float:
    return max((difference(a, b) for a, b in pairs), default=0.0)


def _values(model: keras.Model) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(w) for w in model.weights]


def _run(case: ModelCase) -> None:
    with without_mesh():
        plain = _fresh(case)
        x, y = case.data(plain)
        plain_losses = _fit(plain, x, y)
        kept, predicted = _through_a_file(case, plain, x)
        tokens = case.generate and case.generate(plain)
        if case.backbone is None and not case.planned:
            layouts, remark = (
                placement.generic_map([plain], placement.mesh()),
                "",
            )
    with check("layout map"):
        if case.planned:
            layouts = placement.planned_map(plain, x)
        if case.backbone is not None:
            layouts, remark = placement.own_map(case.backbone)
            if remark:
                say("REASON", sentence=remark)
    with check("make") as made, tlm.layout_map_scope(layouts):
        model = _fresh(case)
    if made.status != "trained":
        return

    def on_mesh() -> list[float]:
        with tlm.layout_map_scope(layouts):
            model = _fresh(case)
        return _fit(model, x, y)

    with check(
        "fit",
        CLOSE,
        lambda: rounding.of_losses(
            found.difference,
            plain_losses,
            lambda: _fit(_fresh(case), x, y),
            on_mesh,
        ),
    ) as found:
        losses = _fit(model, x, y)
        found.difference = losses_differ_by(plain_losses, losses)
    with tempfile.TemporaryDirectory() as folder:
        _files(case, pathlib.Path(folder), plain, model, kept)

    def rounding_of_outputs() -> float:
        def moved() -> float:
            _reset_seeds(plain)
            return _largest(zip(predicted, _predict(plain, x)))

        return allowed_of_outputs(plain, moved)

    _reset_seeds(model)
    with check("predict", CLOSE, rounding_of_outputs) as found:
        # At this point, both models have the weights of the model without a
        # mesh.
        found.difference = _largest(zip(predicted, _predict(model, x)))
    say(
        "REPLICATED",
        bytes=sum(
            one.bytes_per_device
            for one in report.replicated_ops_of_model(model)
        ),
    )
    if case.generate:
        with check("generate") as found:
            found.difference = difference(tokens, case.generate(model))


def _through_a_file(case: ModelCase, plain: keras.Model, x):
    """Saves and loads a model without a mesh, and compares its weights.

    Returns:
      Two values. The first is a list with one bool per weight: whether loading
      restores the saved value, which is False for weights that a model computes
      from other weights. The second is the predictions after loading.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plain.weights.h5"
        plain.save_weights(file)
        other = _fresh(case)
        other.load_weights(file)
    kept = [
        np.array_equal(a, b) for a, b in zip(_values(plain), _values(other))
    ]
    _reset_seeds(other)
    return kept, _predict(other, x)


def _reset_seeds(model: keras.Model) -> None:
    """Sets seeds that some models use in `predict` and that files lack."""
    for variable in model.non_trainable_variables:
        if variable.name == "seed_generator_state":
            variable.assign(np.arange(2))


def _files(
    case: ModelCase,
    folder: pathlib.Path,
    plain: keras.Model,
    model: keras.Model,
    kept: list[bool],
) -> None:
    """Checks weight files that are saved on a mesh or without a mesh."""

    def largest(first: keras.Model, second: keras.Model) -> float:
        return _largest(
            itertools.compress(zip(_values(first), _values(second)), kept)
        )

    with check("save") as found:
        model.save_weights(folder / "mesh.weights.h5")
        other = _fresh(case)
        other.load_weights(folder / "mesh.weights.h5")
        found.difference = largest(model, other)
    with check("load") as found:
        plain.save_weights(folder / "plain.weights.h5")
        model.load_weights(folder / "plain.weights.h5")
        found.difference = largest(plain, model)
