"""Report of the layouts that a layout map gives to the variables of a model.

`explain` returns an `Explanation` with a `VariableReport` per variable: its
layout, the key that matched, and problems. Nothing is allocated.
"""

import collections
import dataclasses
import difflib
import itertools
from collections.abc import Iterable
from typing import Any

import keras

from tf_layoutmap._core import checks, keras_private, user_warnings
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.keras_map import as_table
from tf_layoutmap.layout.layout_table import LayoutTable
from tf_layoutmap.layout.mesh.device_mesh import mesh_sizes
from tf_layoutmap.layout.replication import measured, report
from tf_layoutmap.layout.replication.measured import MeasuredLayer
from tf_layoutmap.layout.replication.report import ReplicatedOp
from tf_layoutmap.layout.variable_names import ObjectPaths

# Maximum number of rows of a printed table.
_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class VariableReport:
    """The layout of one variable, and the key that selected it.

    Attributes:
      name: The preferred name to use as a key.
      names: All names that keys are matched against.
      path: Path of the variable in Keras.
      shape: Shape of the unsharded variable.
      dtype: Keras' name of the dtype.
      pattern: The key that matches; None if the variable is replicated because
        no key matches.
      shadowed: Keys that also match, but come after `pattern`.
      axes: Mesh axis of each dimension.
      bytes_per_device: Bytes that one device holds; 0 if there are problems.
      bytes_total: Bytes of the unsharded variable.
      problems: Problems and how to fix them; empty if the layout fits.
      initialized_in_full: Whether the host computes the full initial value of
        a sharded variable, because its initializer cannot compute blocks
        (`docs/initial_values.md`).
    """

    name: str
    names: tuple[str, ...]
    path: str
    shape: tuple[int, ...]
    dtype: str
    pattern: str | None
    shadowed: tuple[str, ...]
    axes: tuple[str | None, ...]
    bytes_per_device: int
    bytes_total: int
    problems: tuple[str, ...]
    initialized_in_full: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A report on the layouts of all variables of a model.

    The report can be printed with `print`, and in color with `rich.print`.

    ```python
    report = layout_map.explain(model)
    print(report)
    assert report.ok, report.problems()
    ```

    Attributes:
      variables: A `VariableReport` per variable, in the order of the model.
      unused: Maps each key that selects no layout to the reason.
      mesh: Size of each mesh axis.
      unbuilt: Names of layers that are not built yet.
      replicated_ops: A `ReplicatedOp` for each operation that was replicated
        in the steps that ran.
      measured: A `MeasuredLayer` for each layer and each kind of step that ran,
        from the programs that DTensor compiled: replicated floating-point
        operations and gathered weights. Only programs for CPUs are read.
    """

    variables: tuple[VariableReport, ...]
    unused: dict[str, str]
    mesh: dict[str, int]
    unbuilt: tuple[str, ...]
    replicated_ops: tuple[ReplicatedOp, ...] = ()
    measured: tuple[MeasuredLayer, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every layout fits its variable and every key is used."""
        return not self.unused and not any(v.problems for v in self.variables)

    @property
    def contested(self) -> tuple[VariableReport, ...]:
        """The variables that two or more keys match."""
        return tuple(v for v in self.variables if v.shadowed)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all variables that one device holds."""
        return sum(v.bytes_per_device for v in self.variables)

    @property
    def bytes_total(self) -> int:
        """Bytes of all unsharded variables."""
        return sum(v.bytes_total for v in self.variables)

    def problems(self) -> list[str]:
        """Returns one sentence per problem; empty if there are none."""
        return [
            f"{v.name}: {problem}."
            for v in self.variables
            for problem in v.problems
        ] + [f"Key {key!r} {reason}." for key, reason in self.unused.items()]

    def as_dict(self) -> dict[str, object]:
        """Returns the report as plain data that can be converted to JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return user_warnings.printed(self.__rich__(), width=120).rstrip()

    def __rich__(self) -> Any:
        import rich.console
        import rich.table
        import rich.text

        mesh = " x ".join(f"{k}={v}" for k, v in self.mesh.items())
        table = rich.table.Table(
            title=f"Layouts on mesh {mesh}", title_justify="left"
        )
        for column in ("variable", "shape", "layout", "key"):
            table.add_column(column, overflow="fold")
        table.add_column("per device", justify="right")
        bad_first = sorted(self.variables, key=lambda v: not v.problems)
        for v in bad_first[:_SHOWN]:
            key = "(replicated)" if v.pattern is None else v.pattern
            if v.shadowed:
                key += f"  over {', '.join(v.shadowed)}"
            table.add_row(
                rich.text.Text(v.name),
                str(v.shape),
                str(v.axes),
                rich.text.Text(key),
                "does not fit" if v.problems else _size(v.bytes_per_device),
                style="bold red" if v.problems else None,
            )
        if len(bad_first) > _SHOWN:
            table.add_row(f"... and {len(bad_first) - _SHOWN} more")
        lines = [
            f"{_size(self.bytes_per_device)} per device of "
            f"{_size(self.bytes_total)} in all."
        ]
        lines += [f"Problem: {text}" for text in self.problems()[:_SHOWN]]
        if self.unbuilt:
            lines.append(
                f"Not built yet, therefore not shown: "
                f"{', '.join(self.unbuilt)}."
            )
        lines += [
            f"Initial value computed in full on the host: {v.name}."
            for v in self.variables
            if v.initialized_in_full
        ][:_SHOWN]
        lines += [
            f"Replicated on every device: {op}."
            for op in self.replicated_ops[:_SHOWN]
        ]
        lines += [
            f"Measured: {measurement}."
            for measurement in self.measured[:_SHOWN]
            if measurement.replicated or measurement.gathered_bytes
        ]
        return rich.console.Group(
            table, *(rich.text.Text(line) for line in lines)
        )


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def explain(layout_map: LayoutTable, model: Any) -> Explanation:
    """Returns a report of the layouts that `layout_map` gives to `model`.

    This method allocates no variables, so it can explain a model that was
    created under the scope before the first step of the model. The method can
    also explain a model that was created without a scope.

    ```python
    report = layout_map.explain(model)
    print(report)
    assert report.ok, report.problems()
    ```

    Args:
      layout_map: `tlm.LayoutMap` or `tlm.distribution.LayoutMap`.
      model: A Keras or tf_keras model or layer. Only its built layers are
        included.

    Returns:
      An `Explanation`.

    Raises:
      TypeError: If `layout_map` is not a LayoutMap or `model` is not a layer.
      ValueError: If the map has no mesh.
    """
    layout_map = as_table(layout_map)
    tf_keras = keras_private.imported_tf_keras()
    if tf_keras is not None and isinstance(model, tf_keras.layers.Layer):
        from tf_layoutmap.layout.tf_keras import mapping

        assigned = mapping.assign_layouts(
            layout_map, mapping.find_variables(model, lambda _: True)
        )
    else:
        checks.check_type(
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
        report.replicated_ops_of_model(model),
        measured.measure(model),
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
        initialized_in_full=any(assigned.axes)
        and _is_initialized_in_full(variable),
    )


def _is_initialized_in_full(variable: Any) -> bool:
    initializer = getattr(variable, "_initializer", None)
    if initializer is None:
        # The variable has been initialized. If the variable was initialized on
        # a mesh, this attribute is set.
        variable = getattr(variable, "variable", variable)
        return getattr(variable, "_initialized_in_full", False)
    return initial_values.is_computed_in_full(initializer, variable._dtype)


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
                f"({first}): set this key first, or narrow the earlier one"
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
