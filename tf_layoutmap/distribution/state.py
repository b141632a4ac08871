"""Which distribution a thread has set."""

import threading
from typing import Any

import keras

_current = threading.local()


def distribution() -> Any:
    """Returns the distribution of this thread, set or in scope, or None.

    Also one of ours that `keras.distribution.set_distribution` was given;
    Keras' own does nothing there.
    """
    theirs = keras.distribution.distribution()
    return (
        noted()
        if noted() is not None
        or not hasattr(theirs, "_context_if_set_in_keras")
        else theirs
    )


def noted() -> Any:
    """Returns what `note` was given last in this thread, or None."""
    return getattr(_current, "value", None)


def note(value: Any) -> None:
    """Makes `distribution` return `value`."""
    _current.value = value
