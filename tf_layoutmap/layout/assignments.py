"""Selection and validation of the layout of each variable.

Only names and shapes are used to select a layout, and no variable is allocated.
When a layer is built, `assign` also checks whether DTensor supports the layouts
of its weights. Without this check, TensorFlow would raise an error only during
a training step, and the error would name an op instead of a layer. Each problem
description names the layer, the variable and the layout, and suggests a change.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import keras
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, keras_private
from tf_layoutmap.layout import key_matching
from tf_layoutmap.layout.mesh import device_mesh, shard_map, shard_shapes
from tf_layoutmap.layout.mesh.device_mesh import (
    Layout,
    axes_of_layout,
    mesh_sizes,
)

_TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    *_TRANSPOSED,
    *_DEPTHWISE,
    *_SEPARABLE,
)
# The last dimension of the weights of these cells contains a block per gate.
GATED_CELLS = (
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras_private.ConvLSTMCell,
)
_RECURRENT = (
    *GATED_CELLS,
    keras.layers.SimpleRNNCell,
    keras.layers.StackedRNNCells,
    keras.layers.RNN,
    keras.layers.Bidirectional,
)

# DTensor computes these layers correctly only if each sample is unsharded.
# `keras3/step.py` and `tf_keras/calls.py` therefore pin the layouts of the
# inputs and outputs of these layers.
BATCH_PARALLEL = (
    *CONVOLUTIONS,
    *_RECURRENT,
    keras.layers.TimeDistributed,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
)


def is_kind(layer: Any, kinds: tuple[type, ...]) -> bool:
    """Returns whether `layer` is an instance of a class in `kinds`.

    Args:
      layer: A layer.
      kinds: Layer classes of Keras 3. A tf_keras layer matches if its class, or
        a base class, has the same name as a class in `kinds`.
    """
    return isinstance(layer, kinds) or any(
        base.__module__.startswith("tf_keras.")
        and base.__name__ in {kind.__name__ for kind in kinds}
        for base in type(layer).__mro__
    )


def gathers_weights(layer: Any) -> bool:
    """Returns whether the weights of a layer are gathered for each call.

    The Embedding layer of Keras 3 looks up each row on the device that holds
    the row, and needs no gathered table, unless the table is quantized or
    contains integers. The Embedding layer of tf_keras needs the full table. For
    convolutions, see `sharded_kernels`; for recurrent cells, see `gate_axes`.
    """
    if isinstance(layer, keras.layers.Embedding):
        return layer.built and not (
            layer.quantization_mode is None
            and tf.as_dtype(layer._embeddings.dtype).is_floating
        )
    if isinstance(layer, _tf_keras_embedding()):
        layout = getattr(layer.embeddings, "layout", None)
        return layout is not None and (
            layout.sharding_specs[0] != tf.experimental.dtensor.UNSHARDED
        )
    if is_kind(layer, CONVOLUTIONS):
        return not sharded_kernels(layer)
    # Recurrent layers of tf_keras can read the weights of their cell.
    cell = getattr(layer, "cell", layer)
    return is_kind(cell, GATED_CELLS) and gate_axes(cell) is None


def is_recurrent(layer: Any) -> bool:
    """Returns whether `layer` is a recurrent layer or a recurrent cell.

    Args:
      layer: A layer of Keras 3 or tf_keras.
    """
    return is_kind(layer, _RECURRENT)


def gathers_all_layouts(layer: Any) -> bool:
    """Returns whether a call gathers the weights of a layer in every layout."""
    return is_kind(layer, GATED_CELLS) and not dtensor_ops.has_local_blocks()


def is_sharded_recurrent(layer: Any) -> bool:
    """Returns whether `layer` is recurrent and has sharded weights.

    Args:
      layer: A recurrent layer or cell of Keras 3 or tf_keras.
    """
    return is_kind(layer, _RECURRENT) and any(
        isinstance(layout, Layout) and not layout.is_fully_replicated()
        for layout in (getattr(w, "layout", None) for w in layer.weights)
    )


def gate_axes(cell: Any) -> dict[str, tuple[str | None, ...]] | None:
    """Returns how the weights of a recurrent cell are sharded in its call.

    Args:
      cell: A cell of `GATED_CELLS`, whose weights are on a mesh.

    Returns:
      Mesh axes of each weight, by the name of the attribute. None if a weight
      of the cell must be gathered.
    """
    axes_by_name = {}
    for name in ("kernel", "recurrent_kernel", "bias"):
        weight = getattr(cell, name, None)
        layout = getattr(weight, "layout", None)
        if not isinstance(layout, Layout):
            continue
        axes = _axes_in_call(weight, layout)
        if axes is None or (
            any(axes) and _gate_problem(cell, axes, is_kernel=name != "bias")
        ):
            return None
        axes_by_name[name] = axes
    return axes_by_name


def _axes_in_call(weight: Any, layout: Layout) -> tuple[str | None, ...] | None:
    """Returns the mesh axes of a weight in the call of its layer.

    Weights of Keras 3 that are sharded along the batch axis are gathered along
    this axis when they are read. Weights of tf_keras can be gathered only along
    all axes; the result is None.
    """
    axes = axes_of_layout(layout)
    context = getattr(weight, "_mesh_context", None)
    if context is not None:
        return tuple(
            None if axis == context.batch_dim else axis for axis in axes
        )
    batch_dim = getattr(weight, "_layoutmap_batch_dim", None)
    return None if batch_dim is not None and batch_dim in axes else axes


def _gate_problem(
    cell: Any, axes: tuple[str | None, ...], is_kernel: bool
) -> str | None:
    """Returns the reason why a cell must gather a sharded weight, or None."""
    if not dtensor_ops.has_local_blocks():
        return "this process cannot register the necessary ops with DTensor"
    if not is_kernel:
        return None
    if getattr(cell, "data_format", "channels_last") != "channels_last":
        return "its data_format is not 'channels_last'"
    if any(axes[:-2]):
        return "only the channels of a convolution kernel can be sharded"
    return None


def sharded_kernels(layer: Any) -> list[shard_map.ShardedKernel]:
    """Returns the sharded kernels of a convolution that are not gathered.

    Args:
      layer: A layer of Keras 3 or tf_keras, whose weights are on a mesh.

    Returns:
      The sharded kernels; empty if the layer has none, if it is not a
      convolution, or if a weight of the layer must be gathered.
    """
    if not is_kind(layer, CONVOLUTIONS):
        return []
    kernels = []
    for weight in layer.weights:
        layout = getattr(weight, "layout", None)
        if not isinstance(layout, Layout):
            continue
        axes = _axes_in_call(weight, layout)
        if axes is None:
            return []
        if not any(axes):
            continue
        if _convolution_problem(layer, weight, axes, mesh_sizes(layout.mesh)):
            return []
        kind = _kernel_kind(layer, weight)
        if kind is not None:
            kernels.append(
                shard_map.ShardedKernel(
                    kind, tuple(weight.shape[-2:]), (axes[-2], axes[-1])
                )
            )
    return kernels


def _kernel_kind(layer: Any, weight: Any) -> str | None:
    """Returns the kind of a kernel, or None for other weights of a layer."""
    name = weight.name.split("/")[-1].removesuffix(":0")
    if name == "depthwise_kernel" or (
        name == "kernel" and is_kind(layer, _DEPTHWISE)
    ):
        return "depthwise"
    if name not in ("kernel", "pointwise_kernel"):
        return None
    return "transpose" if is_kind(layer, _TRANSPOSED) else "convolution"


def _convolution_problem(
    layer: Any,
    weight: Any,
    axes: tuple[str | None, ...],
    sizes: dict[str, int],
) -> str | None:
    """Returns the reason why a layer must gather a sharded weight, or None."""
    if not dtensor_ops.has_local_blocks():
        return "this process cannot register the necessary ops with DTensor"
    if layer.data_format != "channels_last":
        return "its data_format is not 'channels_last'"
    kind = _kernel_kind(layer, weight)
    if kind is None:
        is_bias = weight.name.split("/")[-1].removesuffix(":0") == "bias"
        return None if is_bias else "only kernels and biases can be sharded"
    if any(axes[:-2]):
        return "only the channels of a convolution kernel can be sharded"
    if kind == "depthwise" and axes[-1] is not None:
        return "the depth multiplier cannot be sharded"
    groups = getattr(layer, "groups", 1)
    if kind == "convolution" and groups > 1:
        if axes[-2] is not None:
            return "the input channels of groups cannot be sharded"
        outer = axes[-1]
        if outer is not None and groups % sizes[outer]:
            return (
                f"mesh axis {outer!r} of size {sizes[outer]} must divide the "
                f"number of groups, {groups}"
            )
    return None


def weight_problems(
    layer: Any,
    variable: Any,
    axes: tuple[str | None, ...],
    strict: bool,
    sizes: dict[str, int],
) -> list[str]:
    """Returns the reasons why `layer` cannot use `variable` with a layout.

    Args:
      layer: Layer of Keras 3 or tf_keras.
      variable: A weight of the layer.
      axes: Mesh axis of each dimension.
      strict: Whether to report a weight that must be gathered for `layer` as a
        problem.
      sizes: Size of each mesh axis.

    Returns:
      One clause per problem; empty if the layer supports the layout.
    """
    if not strict and is_kind(
        layer, (*CONVOLUTIONS, *GATED_CELLS, keras.layers.Embedding)
    ):
        return []
    problem = None
    if any(axes) and is_kind(layer, CONVOLUTIONS):
        problem = _convolution_problem(layer, variable, axes, sizes)
    elif any(axes) and is_kind(layer, GATED_CELLS):
        problem = _gate_problem(layer, axes, is_kernel=len(axes) > 2)
    if problem is not None:
        return [
            f"{_named(layer)} would gather the weight, because {problem}; "
            f"use {(None,) * len(axes)}"
        ]
    if isinstance(layer, _tf_keras_embedding()) and axes[0] is not None:
        return [
            f"DTensor cannot look up rows of a table that is sharded by rows; "
            f"shard the columns of {_named(layer)}: use {(None, axes[0])}, or "
            "the Embedding of Keras 3, which supports sharded rows"
        ]
    # Layers of this package check their weights themselves.
    problems_of_layout = getattr(layer, "problems_of_layout", None)
    return [] if problems_of_layout is None else problems_of_layout(axes)


def _tf_keras_embedding() -> tuple[type, ...]:
    tf_keras = keras_private.imported_tf_keras()
    return () if tf_keras is None else (tf_keras.layers.Embedding,)


def _named(layer: Any) -> str:
    return f"layer {layer.name!r} ({type(layer).__name__})"


dtensor = tf.experimental.dtensor

# Attributes in which layers of Keras 3 and tf_keras store the variables that
# they create.
_VARIABLE_LISTS = (
    "_trainable_variables",
    "_non_trainable_variables",
    "_trainable_weights",
    "_non_trainable_weights",
)


class Names(Protocol):
    """Interface through which `assign` reads the names of variables."""

    def of_variable(self, variable: Any, owner: Any, /) -> list[str]:
        """Returns all names; the first one is the preferred key."""
        ...

    def aliases(self, variable: Any, owner: Any, /) -> Collection[str]:
        """Returns names of a variable that omit the name of an inner model."""
        ...

    def all_names(self) -> Collection[str]:
        """Returns the names of all known variables."""
        ...

    def with_holders(self, layer: Any, /) -> list[Any]:
        """Returns a layer and every layer that contains it."""
        ...


@dataclasses.dataclass
class LayoutAssignment:
    """The layout of one variable, and the key that selected it.

    Attributes:
      variable: The Keras variable.
      names: All names of the variable; the first one is the preferred key.
      pattern: The key of the map that matches. None if no key matches, or if
        the variable is state (a seed, or a variable of a metric or optimizer),
        because layout maps have no keys for state.
      shadowed: Keys of the map that also match, but come after `pattern`.
      axes: Mesh axis of each dimension.
      layout: `dtensor.Layout`; None if there are problems.
      bytes_per_device: Bytes that one device will hold.
      problems: One clause per problem; empty if the layout is valid.
    """

    variable: Any
    names: list[str]
    pattern: str | None
    shadowed: tuple[str, ...]
    axes: tuple[str | None, ...]
    layout: Layout | None
    bytes_per_device: int
    problems: list[str]

    @property
    def name(self) -> str:
        """The preferred name to use as a key."""
        return self.names[0]

    def settled_layout(self) -> Layout:
        """Returns the layout; call this only after `raise_problems`."""
        assert self.layout is not None
        return self.layout


def assign(
    layout_map: Any,
    variables: Iterable[Any],
    paths: Names,
    *,
    owners: Iterable[Any] | None = None,
) -> list[LayoutAssignment]:
    """Returns the layout of each of `variables`, in the same order.

    Args:
      layout_map: `LayoutTable` with the layouts.
      variables: Keras variables.
      paths: Names of the variables and layers.
      owners: The layer of each variable; None to use the owner that each
        variable records.
    """
    mesh = layout_map.mesh_in_use()
    sizes = mesh_sizes(mesh)
    layouts: dict[tuple[str | None, ...], Layout] = {}
    assigned = []
    owned = (
        zip(variables, ((owner, False) for owner in owners))
        if owners is not None
        else ((variable, owner_of(variable)) for variable in variables)
    )
    for variable, (owner, is_state) in owned:
        names = paths.of_variable(variable, owner)
        shape = tuple(variable.shape)
        user_layout = getattr(variable, "_given_layout", None)
        match, value, problems = None, None, []
        if user_layout is None and not is_state:
            match = _find(layout_map, variable, owner, names, paths)
        if isinstance(user_layout, Layout):
            axes = axes_of_layout(user_layout)
            layouts[axes] = user_layout
        elif user_layout is not None:
            # User code passed this TensorLayout to `add_weight`.
            axes = tuple(user_layout.axes)
            if user_layout.device_mesh is not None and (
                device_mesh.to_dtensor_mesh(user_layout.device_mesh) != mesh
            ):
                problems.append(
                    "the layout passed to it is on another mesh than the "
                    "mesh of the LayoutMap"
                )
        elif match is None:
            axes = (None,) * len(shape)
        else:
            value = layout_map[match.pattern]
            axes = tuple(layout_map.axes_of(value))
            problems += _match_problems(layout_map, match)
        if getattr(variable, "pads_rows", False) and dtensor.num_clients() == 1:
            problems += shard_shapes.padding_problems(axes, shape, sizes)
            problems += shard_shapes.fit_problems(
                axes, shard_shapes.padded_rows(axes, shape, sizes), sizes
            )
        else:
            problems += shard_shapes.fit_problems(axes, shape, sizes)
        if owner is not None:
            problems += weight_problems(
                owner, variable, axes, layout_map.strict, sizes
            )
        layout, held = None, 0
        if not problems:
            layout = layouts.get(axes)
            if layout is None:
                layout = layouts[axes] = dtensor.Layout(
                    [dtensor.UNSHARDED if a is None else a for a in axes], mesh
                )
            held = num_bytes(
                shard_shapes.local_shape(axes, shape, sizes), variable._dtype
            )
        assigned.append(
            LayoutAssignment(
                variable,
                names,
                match and match.pattern,
                match.shadowed if match else (),
                axes,
                layout,
                held,
                problems,
            )
        )
    return assigned


def _find(
    layout_map: Any, variable: Any, owner: Any, names: list[str], paths: Names
) -> key_matching.Match | None:
    """Returns the key that matches a variable.

    Some names of a variable omit the name of an inner model. These shorter
    names are used only if no key matches a full name. For example, if
    `^ffn/dense/kernel$` selects a weight of the inner model `ffn`, then
    `^dense/kernel$` does not select this weight.
    """
    keys = layout_map._names_to_match(variable.path, names)
    others = paths.all_names()
    aliases = paths.aliases(variable, owner)
    if aliases and not any(key in layout_map for key in keys):
        match = layout_map.find(
            [key for key in keys if key not in aliases], reserved_names=others
        )
        if match is not None:
            return match
    return layout_map.find(keys, reserved_names=others)


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the size of a tensor in bytes."""
    return math.prod(shape) * tf.as_dtype(dtype).size


def owner_of(variable: Any) -> tuple[Any, bool]:
    """Returns the layer of `variable`, and whether `variable` is state.

    State variables are seeds, and variables of metrics and optimizers. Layout
    maps have no keys for state variables.
    """
    reference = getattr(variable, "_mesh_owner", None)
    return (
        None if reference is None else reference(),
        getattr(variable, "_mesh_is_state", False),
    )


def layers_of_variables(model: Any) -> dict[int, Any]:
    """Returns a dict from the `id` of each variable to its layer.

    Args:
      model: Model of Keras 3 or tf_keras.
    """
    layers: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for name in _VARIABLE_LISTS:
            for variable in getattr(layer, name, ()):
                layers.setdefault(id(variable), layer)
    return layers


def _match_problems(layout_map: Any, match: key_matching.Match) -> list[str]:
    try:
        layout_map._check_match(match)
    except ValueError as error:
        return [str(error).rstrip(".")]
    return []


def raise_problems(assigned: Iterable[LayoutAssignment]) -> None:
    """Raises a `ValueError` with the problems of all assignments, if any."""
    lines = [
        f"  {p.name} {tuple(p.variable.shape)} with layout {p.axes}"
        f"{'' if p.pattern is None else f' from key {p.pattern!r}'}: "
        f"{'; '.join(p.problems)}."
        for p in assigned
        if p.problems
    ]
    if lines:
        shown = lines[:20]
        if len(lines) > len(shown):
            shown.append(f"  ... and {len(lines) - len(shown)} more.")
        raise ValueError(
            f"The LayoutMap does not fit {len(lines)} variable"
            f"{'s' if len(lines) > 1 else ''}; nothing was allocated:\n"
            + "\n".join(shown)
        )
