"""Compares the checks of one case with and without a mesh."""

import contextlib
import json
import re
import traceback
import warnings

import numpy as np

from tests.real.results import Check

# Tolerance of float32 losses, which differ because devices add in a different
# order.
CLOSE = 1e-6
# Errors that Python itself raises do not explain the problem to a user.
NO_SENTENCE = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NameError,
    RecursionError,
)


class DifferentError(Exception):
    """Raised if results differ in their shapes, lengths or NaN values."""


def say(word: str, **values) -> None:
    """Prints a line that the parent process parses."""
    print(word, json.dumps(values), flush=True)


def difference(expected, found) -> float:
    """Returns the largest difference relative to the largest expected value."""
    expected = np.asarray(expected, np.float64)
    found = np.asarray(found, np.float64)
    if expected.shape != found.shape:
        raise DifferentError(f"shape {found.shape} instead of {expected.shape}")
    if not expected.size:
        return 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(
        expected[~finite], found[~finite], equal_nan=True
    ) or (not np.isfinite(found[finite]).all()):
        raise DifferentError("NaN or infinity on one side only")
    expected, found = expected[finite], found[finite]
    scale = max(np.abs(expected).max(initial=0), 1e-30)
    return float(np.abs(expected - found).max(initial=0) / scale)


def losses_differ_by(expected, found) -> float:
    """Returns the largest relative difference of two lists of losses."""
    if len(expected) != len(found):
        raise DifferentError(f"{len(found)} losses instead of {len(expected)}")
    if not np.isfinite(expected).all():
        raise ValueError(f"the losses without a mesh are {expected}")
    return max(
        (difference([a], [b]) for a, b in zip(expected, found)), default=0.0
    )


def judge(found: Check, close: float, rounding) -> None:
    """Sets the status of a check whose difference exceeds `close`.

    Args:
      found: The check, with its difference.
      close: Largest difference that is always accepted.
      rounding: Function that returns the largest difference that rounding
        errors explain, or infinity if they explain any difference.
    """
    if found.difference is None or found.difference <= close:
        return
    most = rounding()
    if found.difference <= most:
        say(
            "REASON",
            sentence="rounding errors, which the model amplifies"
            + (
                f", explain {most:.0e}"
                if np.isfinite(most)
                else ": in float64, the difference is 10,000 times smaller"
            ),
        )
        return
    found.status = "differs"
    found.sentence = (
        f"by {found.difference:.1e}; rounding errors explain {most:.1e}"
    )


def one_line(error: BaseException) -> str:
    """Returns the message of an error without its stack trace."""
    text = str(error).split("\n\nStack trace", 1)[0]
    text = re.sub(r"0x[0-9a-f]+", "0x", " ".join(text.split()))
    return f"{type(error).__name__}: {text[:600]}"


@contextlib.contextmanager
def check(name: str, close: float = 0.0, rounding=None):
    """Runs a block as a check and prints the result.

    Args:
      name: Name of the check.
      close: Largest difference that is accepted without `rounding`.
      rounding: Function that returns the largest difference that rounding
        errors explain. It is called only if the difference exceeds `close`.
        None if rounding errors explain no difference.

    Yields:
      The check. The block stores its result in the attribute `difference`.
    """
    say("START", name=name)
    found = Check(name)
    try:
        yield found
        judge(found, close, rounding or (lambda: 0.0))
    except DifferentError as error:
        found.status, found.sentence = "differs", str(error)
    except NO_SENTENCE as error:
        found.status, found.sentence = "crashed", one_line(error)
        traceback.print_exc()
    except Exception as error:  # The code under test may raise any error.
        found.status, found.sentence = "unsupported", one_line(error)
        traceback.print_exc()
    say("CHECK", **vars(found))


@contextlib.contextmanager
def without_mesh():
    """Reports an error in the block as "broken": the case itself is wrong."""
    say("START", name="without a mesh")
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        say("CHECK", **vars(Check("without a mesh", "broken", one_line(error))))
        say("DONE")
        raise SystemExit(0) from error


@contextlib.contextmanager
def warnings_reported():
    """Prints the warnings about operations that every device replicates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for warning in caught:
                if (
                    warning.category.__name__ == "LayoutMapWarning"
                    and "without effect" not in str(warning.message)
                ):
                    say(
                        "WHOLE",
                        sentence=" ".join(str(warning.message).split()),
                    )
