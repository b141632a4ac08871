"""Strided slices on a mesh, and their gradients.

DTensor has three defects, which this module works around:

* If a slice adds a dimension and omits other dimensions, such as `x[:, None]`,
  DTensor reads past the end of the slice and ends the process.
* If a stride is negative, DTensor treats each shard as the full tensor.
* If the end of the slice is computed, DTensor returns an empty slice. This
  module raises an error for such slices.

TensorFlow describes a slice with vectors and bit masks, and can omit
dimensions. `expand_slice` converts this description to one `DimSlice` per
dimension.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import errors, tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.known_layouts import known_axes
from tf_layoutmap.layout.ops import stacks
from tf_layoutmap.layout.ops.corrections import (
    is_shape,
    static_array,
    static_value,
    vector_entries,
)
from tf_layoutmap.layout.ops.loops import location


@dataclasses.dataclass(frozen=True)
class DimSlice:
    """A slice of one dimension.

    Attributes:
      start: Start as in `slice`: an int, a tensor, or None for the first
        element.
      end: End as in `slice`: an int, a tensor, or None for the end of the
        dimension.
      step: Step, not 0.
      index: Index of a single element, or None. If `index` is set, `start` and
        `end` are ignored and the dimension is removed.
    """

    start: Any = None
    end: Any = None
    step: Any = 1
    index: Any = None


FULL = DimSlice()


def expand_slice(
    rank: int,
    begin: Sequence[Any],
    end: Sequence[Any],
    strides: Sequence[Any],
    *,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
) -> tuple[list[DimSlice], list[int]] | None:
    """Converts the arguments of `tf.strided_slice` to a slice per dimension.

    >>> parts, added = expand_slice(  # x[None, 1, 2:], rank 3
    ...     3, [0, 1, 2], [0, 2, 0], [1, 1, 1], end_mask=4, new_axis_mask=1,
    ...     shrink_axis_mask=2)
    >>> [(part.start, part.index) for part in parts], added
    ([(None, 1), (2, None), (None, None)], [0])

    Args:
      rank: Rank of the input.
      begin: One entry per specified dimension, new dimension and ellipsis.
      end: Entries like `begin`.
      strides: Entries like `begin`.
      begin_mask: Mask as in `tf.strided_slice`.
      end_mask: Mask as in `tf.strided_slice`.
      ellipsis_mask: Mask as in `tf.strided_slice`.
      new_axis_mask: Mask as in `tf.strided_slice`.
      shrink_axis_mask: Mask as in `tf.strided_slice`.

    Returns:
      A `DimSlice` for each dimension of the input, and the indices of the new
      dimensions of the result, ascending. None if TensorFlow rejects the
      slice.
    """
    dots = [i for i in range(len(strides)) if ellipsis_mask >> i & 1]
    new = [
        i
        for i in range(len(strides))
        if new_axis_mask >> i & 1 and i not in dots
    ]
    missing = rank - (len(strides) - len(dots) - len(new))
    if len(dots) > 1 or missing < 0:
        return None
    parts: list[DimSlice] = []
    added: list[int] = []
    position = 0
    for i, (start, stop, step) in enumerate(zip(begin, end, strides)):
        if i in dots:
            parts += [FULL] * missing
            position += missing
        elif i in new:
            added.append(position)
            position += 1
        elif shrink_axis_mask >> i & 1:
            parts.append(DimSlice(step=step, index=start))
        else:
            parts.append(
                DimSlice(
                    None if begin_mask >> i & 1 else start,
                    None if end_mask >> i & 1 else stop,
                    step,
                )
            )
            position += 1
    return parts + [FULL] * (rank - len(parts)), added


def normalized(part: DimSlice, size: int | None) -> DimSlice:
    """Returns an equivalent slice of `size` elements with bounds of at least 0.

    If the slice selects all elements in order, the result is `FULL`.

    >>> normalized(DimSlice(-3, 8), 8)
    DimSlice(start=5, end=8, step=1, index=None)
    """
    values = (part.start, part.end, part.step)
    if (
        size is None
        or part.index is not None
        or not all(value is None or isinstance(value, int) for value in values)
    ):
        # The value of a bound that is a tensor is unknown.
        return part
    start, end, step = slice(*values).indices(size)
    if (start, end, step) == (0, size, 1):
        return FULL
    # An `end` of -1 means the last element, so it cannot express "before
    # element 0". None is used instead. None means it.
    return DimSlice(start, None if end < 0 else end, step)


def arguments(parts: Sequence[DimSlice]) -> dict[str, Any]:
    """Converts `parts` to the arguments of `tf.strided_slice`."""
    indexed = [part.index is not None for part in parts]
    starts = [
        part.start if part.index is None else part.index for part in parts
    ]
    return {
        "begin": [0 if start is None else start for start in starts],
        # TensorFlow ignores the end of a dimension that is indexed.
        "end": [0 if part.end is None else part.end for part in parts],
        "strides": [part.step for part in parts],
        "begin_mask": _bits([start is None for start in starts]),
        "end_mask": _bits(
            [
                part.end is None and not is_index
                for part, is_index in zip(parts, indexed)
            ]
        ),
        "shrink_axis_mask": _bits(indexed),
    }


def _bits(values: Sequence[bool]) -> int:
    return sum(1 << i for i, value in enumerate(values) if value)


def strided_slice(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    begin: Any,
    end: Any,
    strides: Any,
    name: str | None = None,
    **masks: int,
) -> Any:
    """Computes `tf.strided_slice` with all dimensions specified.

    New dimensions are added after the slice.
    """
    x = tf.convert_to_tensor(input)
    expanded = None
    if not (_is_shape_tensor(x) and _goes_forward(strides)) or (
        masks.get("new_axis_mask")
    ):
        expanded = _expanded(x.shape, begin, end, strides, masks)
    if not _goes_forward(strides):
        _check_not_in_loop()
    if expanded is None:
        pin = _pin_for_unknown_slice(strides, mesh)
        return pin(original(pin(x), begin, end, strides, name=name, **masks))
    parts, added = expanded
    x, parts = _without_stack(x, parts)
    x, parts = _without_windows(x, parts)
    x, parts = _without_elements_of_unknown_dims(x, parts)
    _check_sizes(parts, x)
    if parts and (not added or any(part != FULL for part in parts)):
        pin, pin_result = _pins_for_known_layout(x, parts, mesh)
        x = pin_result(original(pin(x), name=name, **arguments(parts)))
    for axis in added:
        x = tf.expand_dims(x, axis)
    return x


def _without_stack(x: Any, parts: list[DimSlice]) -> tuple[Any, list[DimSlice]]:
    """Selects a part of a stack, which is not copied.

    Returns:
      The selected part, and the slices of its dimensions; no slices if the
      full part is selected. The arguments if the slice selects no single part.
    """
    stacked = stacks.stack_of(x)
    if stacked is None:
        return x, parts
    index = parts[stacked.axis].index
    if not isinstance(index, int):
        return x, parts
    others = parts[: stacked.axis] + parts[stacked.axis + 1 :]
    return stacked.parts[index], [] if set(others) == {FULL} else others


def _without_windows(
    x: Any, parts: list[DimSlice]
) -> tuple[Any, list[DimSlice]]:
    """Gathers slices `start : start + size` whose start is computed.

    DTensor cannot infer the size of such a slice. Unlike a slice, the lookup
    raises an error if an index is out of range.

    Returns:
      The input after these slices, and the remaining slices.
    """
    parts = list(parts)
    for axis, part in enumerate(parts):
        size = _window_size(part)
        if size is not None:
            rows = part.start + tf.range(size, dtype=part.start.dtype)
            x = tf.gather(x, rows, axis=axis)
            parts[axis] = FULL
    return x, parts


def _without_elements_of_unknown_dims(
    x: Any, parts: list[DimSlice]
) -> tuple[Any, list[DimSlice]]:
    """Gathers single elements of dimensions whose size is unknown.

    The size of the result of `tf.where(mask)` is unknown during tracing, and
    DTensor rejects a slice of such a tensor.

    Returns:
      The input without these dimensions, and the slices of the other
      dimensions.
    """
    sizes = list(x.shape)
    for axis in reversed(range(len(parts))):
        index = parts[axis].index
        if isinstance(index, int) and sizes[axis] is None:
            if index < 0:
                index += tf.shape(x)[axis]
            x = tf.gather(x, index, axis=axis)
            del parts[axis]
    return x, parts


def _window_size(part: DimSlice) -> int | None:
    start, end = part.start, part.end
    if (
        part.index is not None
        or not isinstance(part.step, int)
        or part.step != 1
        or not tf.is_symbolic_tensor(start)
        or not tf.is_symbolic_tensor(end)
        or end.op.type not in ("Add", "AddV2")
        or is_shape(start)
    ):
        return None
    first, second = end.op.inputs
    other = second if first is start else first if second is start else None
    size = None if other is None else static_value(other)
    return None if size is None or size < 0 else int(size)


# Name of the graph of a loop body. It starts with the name scope of the loop.
_LOOP = re.compile(r"while(_\d+)?_(body|cond)_\d+$")


def _check_not_in_loop() -> None:
    """Raises an error in the body of a loop that was not unrolled.

    A negative stride needs a relayout, and a relayout in a loop body ends the
    process.
    """
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function and _LOOP.search(graph.name):
        raise errors.UnsupportedByDTensorError(
            "A slice in a loop on a mesh must not have a negative stride if "
            "the number of steps is unknown during tracing. Received: a slice "
            f"with a negative stride {location()}. Reverse the dimension "
            "before or after the loop, or make the number of steps a Python "
            "int."
        )


def strided_slice_gradient(
    original: Callable[..., Any],
    mesh: Mesh | None,
    shape: Any,
    begin: Any,
    end: Any,
    strides: Any,
    dy: Any,
    name: str | None = None,
    **masks: int,
) -> Any:
    """Computes the gradient of `strided_slice` in the same layout."""
    sizes = static_array(shape)
    expanded = (
        None
        if sizes is None
        else _expanded(sizes.tolist(), begin, end, strides, masks)
    )
    if expanded is None:
        pin = _pin_for_unknown_slice(strides, mesh)
        return pin(
            original(shape, begin, end, strides, pin(dy), name=name, **masks)
        )
    parts, added = expanded
    _check_sizes(parts, dy)
    pin = _pin_for(parts, mesh)
    return pin(
        original(
            shape, dy=pin(_squeezed(dy, added)), name=name, **arguments(parts)
        )
    )


def strided_slice_update(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    begin: Any,
    end: Any,
    strides: Any,
    value: Any,
    name: str | None = None,
    **masks: int,
) -> Any:
    """Computes `tf.raw_ops.TensorStridedSliceUpdate` like `strided_slice`."""
    x, value = tf.convert_to_tensor(input), tf.convert_to_tensor(value)
    expanded = _expanded(x.shape, begin, end, strides, masks)
    if expanded is None:
        return original(input, begin, end, strides, value, name=name, **masks)
    parts, added = expanded
    _check_sizes(parts, x)
    pin = _pin_for(parts, mesh)
    return pin(
        original(
            pin(x),
            value=pin(_squeezed(value, added)),
            name=name,
            **arguments(parts),
        )
    )


def _expanded(
    shape: Any, begin: Any, end: Any, strides: Any, masks: dict[str, int]
) -> tuple[list[DimSlice], list[int]] | None:
    """Returns the expanded slice; None if TensorFlow rejects the slice."""
    shape = tf.TensorShape(shape)
    begin, end, strides = (vector_entries(v) for v in (begin, end, strides))
    if shape.rank is None or begin is None or end is None or strides is None:
        return None
    if len({len(begin), len(end), len(strides)}) > 1 or (
        any(isinstance(step, int) and step == 0 for step in strides)
    ):
        return None
    expanded = expand_slice(shape.rank, begin, end, strides, **masks)
    if expanded is None:
        return None
    parts, added = expanded
    for part, size in zip(parts, shape):
        if part.index is not None and not _is_inside(part, size):
            return None
    return list(map(normalized, parts, shape)), added


def _is_inside(part: DimSlice, size: int | None) -> bool:
    if (
        isinstance(part.index, int)
        and size is not None
        and (not -size <= part.index < size)
    ):
        return False
    return not isinstance(part.step, int) or part.step > 0


def _check_sizes(parts: list[DimSlice], x: Any) -> None:
    """Raises a `ValueError` if the size of a slice is computed."""
    for axis, part in enumerate(parts):
        computed = [
            value
            for value in (part.start, part.end, part.step)
            if tf.is_tensor(value) and not is_shape(value)
        ]
        if computed and part.index is None:
            raise ValueError(
                "On a mesh, the start, end and step of a slice must be known "
                "during tracing, because DTensor returns an empty slice "
                f"otherwise. Received: {computed[0]} for dimension {axis} of "
                f"{x}. Use tf.slice with a static size, or a mask."
            )


def _squeezed(x: Any, added: list[int]) -> Any:
    return tf.squeeze(x, added) if added else x


def _pin_for(parts: list[DimSlice], mesh: Mesh | None) -> Callable[[Any], Any]:
    """Returns a function that gathers dimensions with a negative step."""

    def is_forward(part: DimSlice) -> bool:
        return part.index is not None or (
            isinstance(part.step, int) and part.step > 0
        )

    if all(map(is_forward, parts)):
        return lambda x: x
    if parts[0].index is not None or not is_forward(parts[0]):
        return lambda x: tracing.pin_replicated(x, mesh)
    return lambda x: tracing.pin_unsharded_samples(x, mesh)


def _pins_for_known_layout(
    x: Any, parts: list[DimSlice], mesh: Mesh | None
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns functions that pin the input and the result of a slice.

    DTensor's gradient of a slice of a sharded dimension fails. If the layout of
    the input is known, this dimension is gathered, and the gradient has the
    same layout. The other dimensions stay sharded.
    """
    axes = known_axes(x) if tf.is_symbolic_tensor(x) else None
    is_cut = [part.index is None and part != FULL for part in parts]
    if axes is None or not any(
        cut and axis is not None for cut, axis in zip(is_cut, axes)
    ):
        pin = _pin_for(parts, mesh)
        return pin, pin
    specs = [None if cut else axis for cut, axis in zip(is_cut, axes)]
    kept = [axis for axis, part in zip(specs, parts) if part.index is None]
    return (
        lambda x: tracing.pin_sharded(x, mesh, specs),
        lambda y: tracing.pin_sharded(y, mesh, kept),
    )


def _pin_for_unknown_slice(
    strides: Any, mesh: Mesh | None
) -> Callable[[Any], Any]:
    if _goes_forward(strides):
        return lambda x: x
    return lambda x: tracing.pin_replicated(x, mesh)


def _goes_forward(strides: Any) -> bool:
    static = static_array(strides)
    return static is not None and bool((static > 0).all())


def _is_shape_tensor(x: Any) -> bool:
    # Eager tensors in this function are always on a mesh, so they are not
    # shapes.
    return tf.is_symbolic_tensor(x) and is_shape(x)
