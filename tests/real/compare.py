"""One case with and without a mesh, check by check."""

import contextlib
import json
import re
import traceback
import warnings

import numpy as np

from tests.real.results import Check

# Losses of 32-bit sums that several devices add up in another order.
CLOSE = 1e-6
# What Python raises by itself says nothing to a user.
NO_SENTENCE = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NameError,
    RecursionError,
)


class DifferentError(Exception):
    """Results with and without a mesh that are not those of one model."""


def say(word: str, **values) -> None:
    """A line for the process that reads what this one finds."""
    print(word, json.dumps(values), flush=True)


def difference(expected, found) -> float:
    """The largest difference, relative to the largest number expected."""
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
    """The largest difference of two lists of losses, each to its own size."""
    if len(expected) != len(found):
        raise DifferentError(f"{len(found)} losses instead of {len(expected)}")
    if not np.isfinite(expected).all():
        raise ValueError(f"the losses without a mesh are {expected}")
    return max(
        (difference([a], [b]) for a, b in zip(expected, found)), default=0.0
    )


def judge(found: Check, close: float, rounding) -> None:
    """Allows for what rounding makes of a difference above `close`.

    Args:
      found: The check, with its difference.
      close: What needs no reason.
      rounding: Measures, when it is called, how much is rounding; infinity
        where all of it is known to be.
    """
    if found.difference is None or found.difference <= close:
        return
    most = rounding()
    if found.difference <= most:
        say(
            "REASON",
            sentence="rounding, which the model amplifies"
            + (
                f", explains {most:.0e}"
                if np.isfinite(most)
                else ": in float64 it is ten thousand times smaller"
            ),
        )
        return
    found.status = "differs"
    found.sentence = f"by {found.difference:.1e}; rounding explains {most:.1e}"


def one_line(error: BaseException) -> str:
    """The sentence of an error, without a graph or a dump after it."""
    text = str(error).split("\n\nStack trace", 1)[0]
    text = re.sub(r"0x[0-9a-f]+", "0x", " ".join(text.split()))
    return f"{type(error).__name__}: {text[:600]}"


@contextlib.contextmanager
def check(name: str, close: float = 0.0, rounding=None):
    """Reports what the block comes to; yields where it puts a difference.

    Args:
      name: Of the check.
      close: How much may differ.
      rounding: Called if that is too little, for how much is rounding; None
        where nothing is.
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
    except Exception as error:  # Whatever others' code raises.
        found.status, found.sentence = "refused", one_line(error)
        traceback.print_exc()
    say("CHECK", **vars(found))


@contextlib.contextmanager
def without_mesh():
    """What fails in here is the fault of the case."""
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
    """Reports which layers are computed whole, as a warning says."""
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
                        sentence=" ".join(str(warning.message).split())[:300],
                    )
