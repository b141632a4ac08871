"""What a strided slice takes of each dimension, written out.

TensorFlow packs it into vectors and masks, with dimensions left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
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


WHOLE = Part()


def written_out(
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
) -> tuple[list[Part], list[int]] | None:
    """Returns a slice with every dimension named.

    >>> parts, added = written_out(  # Of three dimensions, x[None, 1, 2:]
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
    parts: list[Part] = []
    added: list[int] = []
    position = 0
    for i, (start, stop, step) in enumerate(zip(begin, end, strides)):
        if i in dots:
            parts += [WHOLE] * missing
            position += missing
        elif i in new:
            added.append(position)
            position += 1
        elif shrink_axis_mask >> i & 1:
            parts.append(Part(step=step, index=start))
        else:
            parts.append(
                Part(
                    None if begin_mask >> i & 1 else start,
                    None if end_mask >> i & 1 else stop,
                    step,
                )
            )
            position += 1
    return parts + [WHOLE] * (rank - len(parts)), added


def counted_from_the_front(part: Part, size: int | None) -> Part:
    """Returns the same part of `size` elements, whole where it is.

    >>> counted_from_the_front(Part(-3, 8), 8)
    Part(start=5, end=8, step=1, index=None)
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
        return WHOLE
    # Behind the first element there is no number: -1 is the last one.
    return Part(start, None if end < 0 else end, step)


def arguments(parts: Sequence[Part]) -> dict[str, Any]:
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
