"""`model.summary()` of Keras 3 models on a mesh."""

from collections.abc import Callable
from typing import Any

import keras

from tf_layoutmap.layout.keras3.context import context_of_model
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import summary_lines
from tf_layoutmap.layout.mesh.device_mesh import axes_of_layout
from tf_layoutmap.layout.mesh.summary_lines import Weight


def summary(
    original: Callable[..., None],
    model: Any,
    line_length: Any = None,
    positions: Any = None,
    print_fn: Callable[[str], object] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Prints the summary of a model, and how a mesh shards its weights."""
    original(model, line_length, positions, print_fn, *args, **kwargs)
    weights = [
        weight for weight in model.weights if isinstance(weight, MeshVariable)
    ]
    context = context_of_model(model)
    if context is None or not weights:
        return
    summary_lines.print_lines(
        summary_lines.describe(_with_layouts(context, weights), context.mesh),
        print_fn,
        bool(keras.config.is_interactive_logging_enabled()),
    )


def _with_layouts(context: Any, variables: list[Any]) -> list[Weight]:
    """Returns the layouts of variables, without initializing any of them."""
    return [
        Weight(
            assigned.name,
            _axes_of(context, variable, assigned.axes),
            tuple(variable.shape),
            variable._dtype,
        )
        for variable, assigned in zip(
            variables, context.assign_layouts(variables), strict=True
        )
    ]


def _axes_of(
    context: Any, variable: Any, assigned: tuple[str | None, ...]
) -> tuple[str | None, ...] | None:
    """Returns the axes of a variable, or None if no layout is planned yet.

    Args:
      context: `MeshContext` of the variable.
      variable: The variable.
      assigned: Axes that the layout map selects now.
    """
    if variable._value is not None:
        return axes_of_layout(variable.layout)
    if context.planner is not None and not context.planner.is_planned(variable):
        return None
    return assigned
