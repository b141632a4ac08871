"""Stacks of tensors whose parts are read without a copy.

The cache of a language model is a stack of the caches of its layers, and the
cache of a layer is a stack of keys and values. A step of `generate` reads the
parts of the cache, and stacks the new parts. As one tensor, the cache would be
copied several times per token.

`stack` records the parts of its result. A slice that selects a part returns the
part itself (`layout/ops/strided_slices.py`), and a loop that runs from the host
passes the parts as separate loop variables (`layout/ops/host_loops.py`).
DTensor removes stacks that no op reads.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap.layout.ops import corrections

# Attribute of a tensor that `stack` has returned.
_STACK = "_layoutmap_stack"


class Stack(NamedTuple):
    """The parts of a stacked tensor.

    Attributes:
      axis: Dimension that was added, at least 0.
      parts: The tensors that were stacked.
    """

    axis: int
    parts: list[Any]


class Structure(NamedTuple):
    """Describes how a tensor consists of stacks of stacks.

    Attributes:
      axis: Dimension that the outermost stack added.
      parts: Structures of the parts; None for a part that is not a stack.
    """

    axis: int
    parts: "list[Structure | None]"


def stack(tensors: Sequence[Any], axis: int) -> Any:
    """Returns the stacked tensors, whose layouts do not change.

    Args:
      tensors: Symbolic tensors of the same shape and dtype.
      axis: Dimension that is added.
    """
    parts = list(tensors)
    with tf.name_scope(corrections.STACK):
        result = tf.concat([tf.expand_dims(x, axis) for x in parts], axis)
    if result.shape.rank is not None:
        setattr(result, _STACK, Stack(axis % result.shape.rank, parts))
    return result


def stack_of(x: Any) -> Stack | None:
    """Returns the parts of a stack of this graph, or None."""
    stacked = getattr(x, _STACK, None)
    if stacked is None or x.graph is not tf.compat.v1.get_default_graph():
        return None
    return stacked


def structure_of(x: Any) -> Structure | None:
    """Returns the structure of a tensor, or None if it is not a stack."""
    stacked = stack_of(x)
    if stacked is None:
        return None
    return Structure(stacked.axis, [structure_of(y) for y in stacked.parts])


def split(x: Any, structure: Structure | None) -> Iterator[Any]:
    """Yields the innermost parts of a tensor.

    Args:
      x: A tensor.
      structure: Structure of the parts. If `x` has another structure, the parts
        are slices of `x`.
    """
    if structure is None:
        yield x
        return
    axis, structures = structure
    stacked = stack_of(x)
    if (
        stacked is not None
        and stacked.axis == axis
        and len(stacked.parts) == len(structures)
    ):
        parts = stacked.parts
    else:
        before = [slice(None)] * axis
        parts = [x[(*before, number)] for number in range(len(structures))]
    for part, inner in zip(parts, structures):
        yield from split(part, inner)


def joined(parts: Iterator[Any], structure: Structure | None) -> Any:
    """Returns a tensor that consists of the next elements of `parts`."""
    if structure is None:
        return next(parts)
    return stack(
        [joined(parts, inner) for inner in structure.parts], structure.axis
    )


def split_all(
    tensors: Sequence[Any], structures: Sequence[Structure | None]
) -> list[Any]:
    """Returns the innermost parts of all tensors."""
    return [
        part
        for x, structure in zip(tensors, structures)
        for part in split(x, structure)
    ]


def join_all(
    parts: Sequence[Any], structures: Sequence[Structure | None]
) -> list[Any]:
    """Returns the tensors that consist of `parts`."""
    remaining = iter(parts)
    return [joined(remaining, structure) for structure in structures]
