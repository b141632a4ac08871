"""Strided slices on a mesh, and what goes back through them.

DTensor reads past the end of a slice that adds a dimension and leaves others
out, as `x[:, None]`, which ends the process; takes each device's part for the
whole where it goes backwards; and takes nothing where the end is computed,
which is refused.
"""

# DOC-MERGE: What a strided slice takes of each dimension, written out.
#
# TensorFlow packs it into vectors and masks, with dimensions left out.
#
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import errors, pinning
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.ops.corrections import entries, is_shape, known
from tf_layoutmap.layout.ops.loops import location


@dataclasses.dataclass(frozen=True)
class DimSlice:
    """What is taken of one dimension.

    Attributes:
      start, end: As in `slice`: None is where the dimension begins or ends.
        Ints, or tensors that are computed.
      step: Not 0.
      index: Instead of them, one element, whose dimension is dropped.
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
    """Returns a slice with every dimension named.

    >>> parts, added = expand_slice(  # Of three dimensions, x[None, 1, 2:]
    ...     3, [0, 1, 2], [0, 2, 0], [1, 1, 1], end_mask=4, new_axis_mask=1,
    ...     shrink_axis_mask=2)
    >>> [(part.start, part.index) for part in parts], added
    ([(None, 1), (2, None), (None, None)], [0])

    Args:
      rank: Of the input.
      begin, end, strides: One entry for each dimension that is named, new, or
        an ellipsis.
      begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask: As
        of `tf.strided_slice`.

    Returns:
      A part for each dimension of the input, and which dimensions of the
      result are new, ascending; None for what TensorFlow refuses.
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
    """Returns the same part of `size` elements, whole where it is.

    >>> normalized(DimSlice(-3, 8), 8)
    DimSlice(start=5, end=8, step=1, index=None)
    """
    values = (part.start, part.end, part.step)
    if (
        size is None
        or part.index is not None
        or not all(value is None or isinstance(value, int) for value in values)
    ):
        # Of tensors that are computed nothing is known.
        return part
    start, end, step = slice(*values).indices(size)
    if (start, end, step) == (0, size, 1):
        return FULL
    # Behind the first element there is no number: -1 is the last one.
    return DimSlice(start, None if end < 0 else end, step)


def arguments(parts: Sequence[DimSlice]) -> dict[str, Any]:
    """Returns the arguments of `tf.strided_slice` for such parts."""
    indexed = [part.index is not None for part in parts]
    starts = [
        part.start if part.index is None else part.index for part in parts
    ]
    return {
        "begin": [0 if start is None else start for start in starts],
        # Of an indexed dimension nobody reads it.
        "end": [0 if part.end is None else part.end for part in parts],
        "strides": [part.step for part in parts],
        "begin_mask": _bits([start is None for start in starts]),
        "end_mask": _bits(
            [part.end is None and not one for part, one in zip(parts, indexed)]
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
    """`tf.strided_slice`, each dimension named, new ones added afterwards."""
    x = tf.convert_to_tensor(input)
    written = None
    if not (_is_of_shapes(x) and _goes_forward(strides)) or (
        masks.get("new_axis_mask")
    ):
        written = _written(x.shape, begin, end, strides, masks)
    if not _goes_forward(strides):
        _refuse_in_loops()
    if written is None:
        pin = _pin_of_unknown(strides, mesh)
        return pin(original(pin(x), begin, end, strides, name=name, **masks))
    parts, added = written
    _check_sizes(parts, x)
    if not added or any(part != FULL for part in parts):
        pin = _pin_for(parts, mesh)
        x = pin(original(pin(x), name=name, **arguments(parts)))
    for axis in added:
        x = tf.expand_dims(x, axis)
    return x


def _refuse_in_loops() -> None:
    """Refuses to go backwards in a loop that was not unrolled.

    The relayout that it needs ends the process there.
    """
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function and graph.name.startswith("while_"):
        raise errors.UnsupportedByDTensorError(
            "DTensor cannot reverse a dimension in a loop whose number of "
            "steps is not known while it is traced. Received: a slice with a "
            f"negative stride {location()}. Reverse it before or after the loop, "
            "or make the number of steps a Python int."
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
    """The gradient of `strided_slice`, with the same dimensions whole."""
    sizes = known(shape)
    written = (
        None
        if sizes is None
        else _written(sizes.tolist(), begin, end, strides, masks)
    )
    if written is None:
        pin = _pin_of_unknown(strides, mesh)
        return pin(
            original(shape, begin, end, strides, pin(dy), name=name, **masks)
        )
    parts, added = written
    _check_sizes(parts, dy)
    pin = _pin_for(parts, mesh)
    return pin(
        original(
            shape, dy=pin(_without(dy, added)), name=name, **arguments(parts)
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
    """`tf.raw_ops.TensorStridedSliceUpdate`, likewise."""
    x, value = tf.convert_to_tensor(input), tf.convert_to_tensor(value)
    written = _written(x.shape, begin, end, strides, masks)
    if written is None:
        return original(input, begin, end, strides, value, name=name, **masks)
    parts, added = written
    _check_sizes(parts, x)
    pin = _pin_for(parts, mesh)
    return pin(
        original(
            pin(x),
            value=pin(_without(value, added)),
            name=name,
            **arguments(parts),
        )
    )


def _written(
    shape: Any, begin: Any, end: Any, strides: Any, masks: dict[str, int]
) -> tuple[list[DimSlice], list[int]] | None:
    """Returns what is taken; None for what TensorFlow refuses."""
    shape = tf.TensorShape(shape)
    begin, end, strides = (entries(v) for v in (begin, end, strides))
    if shape.rank is None or begin is None or end is None or strides is None:
        return None
    if len({len(begin), len(end), len(strides)}) > 1 or (
        any(isinstance(step, int) and step == 0 for step in strides)
    ):
        return None
    written = expand_slice(shape.rank, begin, end, strides, **masks)
    if written is None:
        return None
    parts, added = written
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
    """Raises a ValueError if it is not known how much is taken."""
    for axis, part in enumerate(parts):
        computed = [
            value
            for value in (part.start, part.end, part.step)
            if tf.is_tensor(value) and not is_shape(value)
        ]
        if computed and part.index is None:
            raise ValueError(
                "On a mesh, where a slice starts and ends must be known when "
                "its function is traced: DTensor would take nothing. Use "
                "tf.slice with a size that is known, or a mask. Received: "
                f"{computed[0]} for dimension {axis} of {x}."
            )


def _without(x: Any, added: list[int]) -> Any:
    return tf.squeeze(x, added) if added else x


def _pin_for(parts: list[DimSlice], mesh: Mesh | None) -> Callable[[Any], Any]:
    """Returns what makes whole the dimensions that are read backwards."""

    def is_forward(part: DimSlice) -> bool:
        return part.index is not None or (
            isinstance(part.step, int) and part.step > 0
        )

    if all(map(is_forward, parts)):
        return lambda x: x
    if parts[0].index is not None or not is_forward(parts[0]):
        return lambda x: pinning.replicated(x, mesh)
    return lambda x: pinning.unsharded_samples(x, mesh)


def _pin_of_unknown(strides: Any, mesh: Mesh | None) -> Callable[[Any], Any]:
    if _goes_forward(strides):
        return lambda x: x
    return lambda x: pinning.replicated(x, mesh)


def _goes_forward(strides: Any) -> bool:
    static = known(strides)
    return static is not None and bool((static > 0).all())


def _is_of_shapes(x: Any) -> bool:
    # Eager tensors come here because they are on a mesh.
    return tf.is_symbolic_tensor(x) and is_shape(x)
