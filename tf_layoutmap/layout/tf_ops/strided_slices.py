"""Strided slices on a mesh, and what goes back through them.

DTensor reads past the end of a slice that adds a dimension and leaves others
out, as `x[:, None]`, which ends the process; takes each device's part for the
whole where it goes backwards; and takes nothing where the end is computed,
which is refused.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages, pinning
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.tf_ops.known_values import entries, is_shape, known
from tf_layoutmap.layout.tf_ops.slice_parts import (
    WHOLE,
    Part,
    arguments,
    counted_from_the_front,
    written_out,
)
from tf_layoutmap.layout.tf_ops.unrolled_array import where


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
    if not added or any(part != WHOLE for part in parts):
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
        raise error_messages.UnsupportedByDTensorError(
            "DTensor cannot reverse a dimension in a loop whose number of "
            "steps is not known while it is traced. Received: a slice with a "
            f"negative stride {where()}. Reverse it before or after the loop, "
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
) -> tuple[list[Part], list[int]] | None:
    """Returns what is taken; None for what TensorFlow refuses."""
    shape = tf.TensorShape(shape)
    begin, end, strides = (entries(v) for v in (begin, end, strides))
    if shape.rank is None or begin is None or end is None or strides is None:
        return None
    if len({len(begin), len(end), len(strides)}) > 1 or (
        any(isinstance(step, int) and step == 0 for step in strides)
    ):
        return None
    written = written_out(shape.rank, begin, end, strides, **masks)
    if written is None:
        return None
    parts, added = written
    for part, size in zip(parts, shape):
        if part.index is not None and not _is_inside(part, size):
            return None
    return list(map(counted_from_the_front, parts, shape)), added


def _is_inside(part: Part, size: int | None) -> bool:
    if (
        isinstance(part.index, int)
        and size is not None
        and (not -size <= part.index < size)
    ):
        return False
    return not isinstance(part.step, int) or part.step > 0


def _check_sizes(parts: list[Part], x: Any) -> None:
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


def _pin_for(parts: list[Part], mesh: Mesh | None) -> Callable[[Any], Any]:
    """Returns what makes whole the dimensions that are read backwards."""

    def is_forward(part: Part) -> bool:
        return part.index is not None or (
            isinstance(part.step, int) and part.step > 0
        )

    if all(map(is_forward, parts)):
        return lambda x: x
    if parts[0].index is not None or not is_forward(parts[0]):
        return lambda x: pinning.whole(x, mesh)
    return lambda x: pinning.whole_samples(x, mesh)


def _pin_of_unknown(strides: Any, mesh: Mesh | None) -> Callable[[Any], Any]:
    if _goes_forward(strides):
        return lambda x: x
    return lambda x: pinning.whole(x, mesh)


def _goes_forward(strides: Any) -> bool:
    static = known(strides)
    return static is not None and bool((static > 0).all())


def _is_of_shapes(x: Any) -> bool:
    # Eager tensors come here because they are on a mesh.
    return tf.is_symbolic_tensor(x) and is_shape(x)
