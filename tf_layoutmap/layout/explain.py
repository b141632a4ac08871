"""What a layout map does to a model, before anything is allocated."""

import collections
import difflib
import itertools
from collections.abc import Iterable
from typing import Any

import keras

from tf_layoutmap import _checks, _keras_private
from tf_layoutmap.layout.explanation import Explanation, VariableReport
from tf_layoutmap.layout.keras_layout_map import as_table
from tf_layoutmap.layout.mesh.layouts import mesh_sizes
from tf_layoutmap.layout.plan import assignments
from tf_layoutmap.layout.plan.layout_table import LayoutTable
from tf_layoutmap.layout.plan.variable_names import ObjectPaths
from tf_layoutmap.layout.step import computed_whole_report


def explain(layout_map: LayoutTable, model: Any) -> Explanation:
    """Returns what `layout_map` does to `model`, and what is wrong with it.

    Nothing is allocated, so a model made under the scope can be explained
    before its first step. A model made without a scope can be explained too.

    ```python
    report = layout_map.explain(model)
    print(report)
    assert report.ok, report.problems()
    ```

    Args:
      layout_map: `tlm.LayoutMap` or `tlm.distribution.LayoutMap`.
      model: A Keras or tf_keras model or layer; what of it is built.

    Returns:
      An `Explanation`.

    Raises:
      TypeError: `layout_map` is no LayoutMap or `model` no layer.
      ValueError: The map has no mesh.
    """
    layout_map = as_table(layout_map)
    tf_keras = _keras_private.imported_tf_keras()
    if tf_keras is not None and isinstance(model, tf_keras.layers.Layer):
        from tf_layoutmap.layout.tf_keras import found_variables

        assigned = found_variables.assign_layouts(
            layout_map, found_variables.find(model, lambda _: True)
        )
    else:
        _checks.check_type(
            "model", model, keras.layers.Layer, "a Keras model or layer"
        )
        layers = assignments.layers_of_variables(model)
        assigned = assignments.assign(
            layout_map,
            model.weights,
            ObjectPaths([model]),
            owners=[layers.get(id(v)) for v in model.weights],
        )
    sizes = mesh_sizes(layout_map.mesh_in_use())
    reports = tuple(_report(p) for p in assigned)
    unbuilt = tuple(
        layer.name for layer in model._flatten_layers() if not layer.built
    )
    return Explanation(
        reports,
        _unused(layout_map, reports),
        sizes,
        unbuilt,
        computed_whole_report.of_model(model),
    )


def _report(assigned: assignments.LayoutAssignment) -> VariableReport:
    variable = assigned.variable
    shape = tuple(variable.shape)
    return VariableReport(
        name=assigned.name,
        names=tuple(assigned.names),
        path=variable.path,
        shape=shape,
        dtype=variable._dtype,
        pattern=assigned.pattern,
        shadowed=assigned.shadowed,
        axes=assigned.axes,
        bytes_per_device=assigned.bytes_per_device,
        bytes_total=assignments.num_bytes(shape, variable._dtype),
        problems=tuple(assigned.problems),
    )


def _unused(
    layout_map: LayoutTable, reports: Iterable[VariableReport]
) -> dict[str, str]:
    matched = {v.pattern for v in reports}
    shadowed_by = collections.defaultdict(dict)
    for v in reports:
        for key in v.shadowed:
            shadowed_by[key][v.pattern] = None
    reasons = {}
    for key in layout_map:
        if key in matched:
            continue
        if key in shadowed_by:
            firsts = list(map(repr, shadowed_by[key]))
            first = ", ".join(firsts[:3]) + (
                f" and {len(firsts) - 3} more" if len(firsts) > 3 else ""
            )
            reasons[key] = (
                "matches only variables that an earlier key matches "
                f"({first}): set it first, or narrow the earlier one"
            )
        else:
            reasons[key] = "matches no variable" + _nearest(key, reports)
    return reasons


def _nearest(key: str, reports: Iterable[VariableReport]) -> str:
    names = list(
        itertools.islice((name for v in reports for name in v.names), 500)
    )
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; the nearest name is {close[0]!r}" if close else ""
