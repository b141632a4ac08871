"""Selects which cases of a parametrized test `make test` runs.

For a test with the mark `covering(1)`, the selected cases contain each value of
each parameter. For a test with the mark `covering(2)`, the cases contain each
pair of values of two parameters. `tests/conftest.py` adds the mark `exhaustive`
to all other cases. The selection is deterministic. With the mark `covering(1,
4)`, at most four cases are selected. With the mark `covering(None)`, all cases
are selected.

Of a test without this mark, `make test` runs all fast cases and at most
`NUM_SLOW_CASES` slow cases.
"""

import collections
import itertools
import zlib
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import pytest

# Number of slow cases of a test that `make test` runs, unless the test has the
# mark `covering`.
NUM_SLOW_CASES = 1


def combinations(
    case: Sequence[Hashable], strength: int
) -> list[tuple[tuple[int, Hashable], ...]]:
    """Returns all combinations of `strength` parameter values of one case.

    >>> combinations("ab", 1)
    [((0, 'a'),), ((1, 'b'),)]
    >>> combinations("ab", 2)
    [((0, 'a'), (1, 'b'))]
    """
    size = min(strength, len(case))
    return list(itertools.combinations(enumerate(case), size))


def covering(
    cases: Sequence[Sequence[Hashable]],
    strength: int,
    most: int | None = None,
    first: int = 0,
) -> list[int]:
    """Returns the indices of cases that together contain all combinations.

    Repeatedly selects the case that contains the largest number of missing
    combinations. If several cases contain equally many, it selects the case
    whose values were selected least often, and then the next case, counted
    from case `first`.

    >>> covering([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 1)
    [0, 3]
    >>> covering([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 2)
    [0, 1, 2, 3]
    >>> covering([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 2, most=2)
    [0, 3]
    >>> covering([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 1, most=1, first=2)
    [2]

    Args:
      cases: Values of the parameters, one sequence per case, all of the same
        length.
      strength: Number of values in a combination, at least 1.
      most: Maximum number of selected cases. With fewer cases than necessary,
        the cases do not contain all combinations.
      first: Number of the preferred case, modulo the number of cases.

    Returns:
      Indices in ascending order.
    """
    contained = [set(combinations(case, strength)) for case in cases]
    missing = set().union(*contained)
    uses = collections.Counter()
    selected = []
    while missing and len(selected) != most:
        best = max(
            range(len(cases)),
            key=lambda index: (
                len(contained[index] & missing),
                -sum(uses[value] for value in enumerate(cases[index])),
                -((index - first) % len(cases)),
            ),
        )
        missing -= contained[best]
        uses.update(enumerate(cases[best]))
        selected.append(best)
    return sorted(selected)


def but(values: Iterable[Any], *exhaustive: Any) -> list[Any]:
    """Returns values for `parametrize`, some of them marked as exhaustive.

    A tuple contains the values of several arguments.
    """
    values = list(values)
    unknown = [one for one in exhaustive if one not in values]
    if unknown:
        raise ValueError(f"Exhaustive cases must exist. Received: {unknown}")
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else [one]),
            marks=[pytest.mark.exhaustive] if one in exhaustive else [],
        )
        for one in values
    ]


def first(*values: Any) -> list[Any]:
    """Returns values for `parametrize`; all but the first are exhaustive."""
    return but(values, *values[1:])


def mark_exhaustive(items: Sequence[Any], slow: Collection[str]) -> None:
    """Marks the cases that `make test` does not run.

    Args:
      items: Cases that pytest has collected.
      slow: Node ids of slow cases.
    """
    groups = collections.defaultdict(list)
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker(
            "exhaustive"
        ):
            continue
        mark = item.get_closest_marker("covering")
        if mark is not None and mark.args == (None,):
            continue
        if mark is not None:
            groups[item.parent, item.originalname, *mark.args].append(item)
        elif item.nodeid in slow:
            groups[item.parent, item.originalname, 1, NUM_SLOW_CASES].append(
                item
            )
    for (_, name, *options), group in groups.items():
        # Each case is represented by the parts of its id. Parameters of the
        # same `parametrize` mark share one part.
        cases = [item.callspec._idlist for item in group]
        # Several tests with the same parameters use different values.
        start = zlib.crc32(name.encode())
        strength, most, *_ = *options, None
        selected = set(covering(cases, strength, most, start))
        for index, item in enumerate(group):
            if index not in selected:
                item.add_marker("exhaustive")
