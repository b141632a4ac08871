"""`model.summary()` of tf_keras models on a mesh."""

from collections.abc import Callable
from typing import Any

import tf_keras

from tf_layoutmap.layout.mesh import summary_lines
from tf_layoutmap.layout.mesh.device_mesh import axes_of_layout
from tf_layoutmap.layout.mesh.summary_lines import Weight
from tf_layoutmap.layout.tf_keras.mapping import HostReadableVariable


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
    variables = [
        variable
        for variable in model.weights
        if isinstance(variable, HostReadableVariable)
    ]
    if not variables:
        return
    weights = [
        Weight(
            variable.name.removesuffix(":0"),
            axes_of_layout(variable.layout),
            tuple(variable.shape.as_list()),
            variable.dtype.name,
        )
        for variable in variables
    ]
    summary_lines.print_lines(
        summary_lines.describe(weights, variables[0].layout.mesh),
        print_fn,
        tf_keras.utils.is_interactive_logging_enabled(),
    )
