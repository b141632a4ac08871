"""Which dimensions of an einsum's operands a mesh may divide."""

import string
from collections.abc import Sequence

Axes = tuple[str | None, ...]


def without_ellipsis(equation: str, ranks: Sequence[int]) -> str:
    """Returns the equation with labels for what an ellipsis stands for.

    DTensor does not know ellipses.

    >>> without_ellipsis("...x,xy->...y", (3, 2))
    'ABx,xy->ABy'

    Args:
      equation: With `->`.
      ranks: Dimensions of each operand.

    Returns:
      The same equation if it has no ellipsis, or if operands have ellipses of
      several lengths, which is broadcasting.
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
    """Whether two operands have several labels that the result has not.

    DTensor may find one divided in the first operand and the next one, by the
    same axis, in the second, and then adds up wrong pairs.

    >>> sums_several_labels("abde,dec->abc"), sums_several_labels("abc,cde->abde")
    (True, False)

    Args:
      equation: With `->` and without ellipses.
    """
    return len(_summed(equation)) > 1


def first_dim_may_be_sharded(equation: str) -> list[bool]:
    """Whether the first dimension of each operand may stay divided.

    If the others are whole, at most one summed label is divided then.

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


def axes_of_product(
    equation: str, number: int, axes: Sequence[str | None], first: str | None
) -> tuple[Axes, Axes, Axes] | None:
    """Returns the axes of both operands and of the result.

    Each dimension is divided as the weight's dimension of the same label.
    Left to itself, DTensor may divide another one by the same axis and then
    add up wrong pairs. Samples stay divided: where the weight is divided by
    their axis, too, it is gathered along that one.

    >>> axes_of_product("abd,dec->aec", 1, ("batch", "model", None), "batch")
    (('batch', None, None), (None, 'model', None), ('batch', 'model', None))

    Args:
      equation: Of two operands, with `->`.
      number: Which of them is the weight, 0 or 1.
      axes: The weight's mesh axes, None where it is whole.
      first: What may divide the first dimension of the other operand; None if
        nothing does.

    Returns:
      All three, or None for what DTensor gets right: where only one label of
      the weight stands in each of the others, as in a product of matrices.
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
    if first is not None and other and axis_of.get(other[0]) is None:
        axis_of = {
            label: axis for label, axis in axis_of.items() if axis != first
        }
        axis_of[other[0]] = first
    one, two, product = [
        tuple(axis_of.get(label) for label in term) for term in (*terms, result)
    ]
    return one, two, product
