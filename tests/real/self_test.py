"""Contains one test case for each status, for the tests of the sweep."""

import os
import time
import warnings
from collections.abc import Callable

from tests.real.compare import (
    DifferentError,
    check,
    warnings_reported,
    without_mesh,
)


class LayoutMapWarning(UserWarning):
    """Stand-in for the package's warning, which is recognized by its name."""


def trains() -> None:
    with check("fit", 1e-6) as found:
        found.difference = 1e-7


def replicates_an_op() -> None:
    with warnings_reported(), check("fit"):
        warnings.warn(
            "Layer 'd' is replicated.", LayoutMapWarning, stacklevel=1
        )


def is_unsupported() -> None:
    with check("make"):
        raise ValueError("The LayoutMap does not fit.\n\nStack trace: ...")
    with check("fit"):
        pass


def is_rounded() -> None:
    with check("fit", 1e-6, lambda: 1e-5) as found:
        found.difference = 9e-6


def differs() -> None:
    with check("fit", 1e-6, lambda: 1e-5) as found:
        found.difference = 1.1e-5


def differs_in_shape() -> None:
    with check("predict"):
        raise DifferentError("shape (2,) instead of (3,)")


def raises_without_a_message() -> None:
    with check("fit"):
        raise AttributeError("'NoneType' object has no attribute 'op'")


def ends_the_process() -> None:
    with check("fit"):
        os.abort()


def hangs() -> None:
    with check("fit"):
        time.sleep(600)


def fails_without_a_mesh() -> None:
    with without_mesh():
        raise ValueError("The case itself is wrong.")


class Case:
    """Test case that runs a function."""

    def __init__(self, run: Callable[[], None]):
        self.run = run


CASES = {
    function.__name__: Case(function)
    for function in (
        trains,
        replicates_an_op,
        is_unsupported,
        is_rounded,
        differs,
        differs_in_shape,
        raises_without_a_message,
        ends_the_process,
        hangs,
        fails_without_a_mesh,
    )
}
