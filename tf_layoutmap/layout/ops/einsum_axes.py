"""Operand shardings with which DTensor computes an einsum correctly."""

import string
from collections.abc import Sequence

Axes = tuple[str | None, ...]


def without_ellipsis(equation: str, ranks: Sequence[int]) -> str:
    """Returns the equation with labels in place of the ellipsis.

    DTensor does not support ellipses.

    >>> without_ellipsis("...x,xy->...y", (3, 2))
    'ABx,xy->ABy'

    Args:
      equation: Einsum equation with `->`.
      ranks: Rank of each operand.

    Returns:
      The new equation. The result is `equation` if it has no ellipsis. The
      result is also `equation` if the ellipses have different lengths, because
      the operands are then broadcast.
    """
    equation = equation.replace(" ", "")
    hidden = {
        rank - len(term.replace("...", ""))
        for term, rank in zip(equation.partition("->")[0].split(","), ranks)
        if "..." in term
    }
    if len(hidden) != 1:
        return equation
    free = [
        letter for letter in string.ascii_uppercase if letter not in equation
    ]
    return equation.replace("...", "".join(free[: hidden.pop()]))


def sums_several_labels(equation: str) -> bool:
    """Returns whether the einsum sums over several labels.

    If an einsum sums over several labels, the same mesh axis may shard one
    summed label in the first operand, and a different summed label in the
    second operand. DTensor then multiplies and sums elements that do not belong
    together.

    >>> sums_several_labels("abde,dec->abc")
    True
    >>> sums_several_labels("abc,cde->abde")
    False

    Args:
      equation: Einsum equation with `->` and without ellipses.
    """
    return len(_summed(equation)) > 1


def first_dim_may_be_sharded(equation: str) -> list[bool]:
    """Returns whether the first dimension of each operand may be sharded.

    All other dimensions must be unsharded. The first dimensions of both
    operands may then be sharded, unless their labels differ and the einsum sums
    over both labels.

    >>> first_dim_may_be_sharded("abde,dec->abc")
    [True, True]
    >>> first_dim_may_be_sharded("abc,bad->cd")
    [True, False]
    """
    first, second = (
        term[:1] for term in equation.partition("->")[0].split(",")
    )
    return [True, first == second or not {first, second} <= _summed(equation)]


def _summed(equation: str) -> set[str]:
    left, _, result = equation.partition("->")
    first, *others = left.split(",")
    return set(first).intersection(*others) - set(result)


def label_of_samples(equation: str, number: int) -> str | None:
    """Returns the label of the samples of the operand that is not a weight.

    The label is the first one that the weight does not contain. In a layer of
    experts, the first dimension of an operand can be the dimension of experts,
    which the weight also contains.

    >>> label_of_samples("eti,eih->eth", 1)
    't'

    Args:
      equation: Einsum equation of two operands, with `->`.
      number: Index of the operand that is the weight, 0 or 1.
    """
    terms = equation.partition("->")[0].split(",")
    if len(terms) != 2:
        return None
    weight, other = terms[number], terms[1 - number]
    return next((label for label in other if label not in weight), None)


def axes_of_product(
    equation: str, number: int, axes: Sequence[str | None], batch: str | None
) -> tuple[Axes, Axes, Axes] | None:
    """Returns the mesh axes of both operands and of the result.

    Each dimension has the axis of the weight's dimension with the same label.
    With other axes, DTensor may shard a different dimension along the same mesh
    axis, and then sum elements that do not belong together. The batch stays
    sharded. If the batch axis also shards the weight, the weight is gathered
    along this axis.

    >>> axes_of_product("abd,dec->aec", 1, ("batch", "model", None), "batch")
    (('batch', None, None), (None, 'model', None), ('batch', 'model', None))
    >>> axes_of_product("eti,eih->eth", 1, (None, "model", None), "batch")
    ((None, 'batch', 'model'), (None, 'model', None), (None, 'batch', None))

    Args:
      equation: Einsum equation of two operands, with `->`.
      number: Index of the operand that is the weight, 0 or 1.
      axes: Mesh axis of each dimension of the weight, None if unsharded.
      batch: Mesh axis that shards the samples of the other operand, or None;
        see `label_of_samples`.

    Returns:
      The axes of the first operand, the second operand and the result. None if
      no change is necessary, because the other operand and the result each
      contain only one label of the weight, as in a matrix product. DTensor
      computes such an einsum correctly.
    """
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or "." in equation:
        return None
    weight, other = terms[number], terms[1 - number]
    is_product_of_matrices = weight[:1] == other[-1:] and (
        result == other[:-1] + weight[1:]
    )
    if (
        is_product_of_matrices
        and max(len(set(weight) & set(term)) for term in (other, result)) < 2
    ):
        return None
    axis_of = dict(zip(weight, axes))
    samples = label_of_samples(equation, number)
    if batch is not None and samples is not None:
        axis_of = {
            label: axis for label, axis in axis_of.items() if axis != batch
        }
        axis_of[samples] = batch
    first, second, product = [
        tuple(axis_of.get(label) for label in term) for term in (*terms, result)
    ]
    return first, second, product
