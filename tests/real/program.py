"""Runs a training program without a mesh and with a mesh."""

import dataclasses
from collections.abc import Callable, Sequence

import keras

import tf_layoutmap as tlm
from tests.real import placement, rounding
from tests.real.compare import (
    CLOSE,
    check,
    losses_differ_by,
    warnings_reported,
    without_mesh,
)

# Result of a program: its losses and its models.
Trained = tuple[Sequence[float], Sequence[keras.layers.Layer]]


@dataclasses.dataclass(frozen=True)
class ProgramCase:
    """Test case for a program.

    Attributes:
      program: Function that creates data and models, trains the models, and
        returns losses and models.
      scope: Whether the program runs under `tlm.layout_map_scope` instead of
        after `tlm.distribution.set_distribution`.
    """

    program: Callable[[], Trained]
    scope: bool = False

    def run(self) -> None:
        """Runs the test case and prints the result of each check."""
        with warnings_reported():
            _run(self)


def _from_start(program: Callable[[], Trained]) -> Trained:
    """Runs a program with fresh names and seeds, as in a new process."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return program()


def _run(case: ProgramCase) -> None:
    with without_mesh():
        expected, models = _from_start(case.program)
        if not losses_move(expected):
            raise ValueError(f"the losses do not change: {expected}")
        layouts = placement.generic_map(models, placement.mesh())
        if not len(layouts):
            raise ValueError("no weight of the program is sharded")
    with check(
        "train",
        CLOSE,
        lambda: rounding.of_losses(
            found.difference,
            expected,
            lambda: _from_start(case.program)[0],
            lambda: _on_mesh(case, layouts)[0],
        ),
    ) as found:
        losses, models = _on_mesh(case, layouts)
        found.difference = losses_differ_by(expected, losses)
    if found.status not in ("trained", "differs"):
        return
    # Equal losses do not prove that the program used the mesh, so the mesh is
    # also checked.
    with check("sharded"):
        missing = [
            weight.path
            for model in models
            for weight in model.weights
            if placement.key_of(weight.path) in layouts
            and getattr(weight, "layout", None) is None
        ]
        if missing:
            raise ValueError(f"weights without a layout: {missing}")


def losses_move(losses: Sequence[float]) -> bool:
    """Returns whether the losses change, as they do if a program trains."""
    return len({float(loss) for loss in losses}) > 1


def _on_mesh(case: ProgramCase, layouts: tlm.LayoutMap) -> Trained:
    if not case.scope:
        return _with_distribution(case.program, layouts)
    with tlm.layout_map_scope(layouts, init="host"):
        return _from_start(case.program)


def _with_distribution(
    program: Callable[[], Trained], layouts: tlm.LayoutMap
) -> Trained:
    tlm.distribution.set_distribution(
        tlm.distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch", init="host"
        )
    )
    try:
        return _from_start(program)
    finally:
        tlm.distribution.set_distribution(None)
