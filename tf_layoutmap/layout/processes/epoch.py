"""The epoch of `fit` that this thread is in, and how it ends for others."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tf_layoutmap.layout.processes import messages

# Of this thread: `step`, the number of the last one in this epoch; `awaited`,
# the `ProcessChecks` whose next message the others wait for; `is_stopped`,
# whether all processes ended the epoch together.
state = threading.local()


@contextlib.contextmanager
def of_epoch(original: Callable[..., Any], data: Any) -> Iterator[None]:
    """`catch_stop_iteration` of Keras: all steps of one epoch are inside.

    Keras counts steps where it knows how many there are, and then asks for no
    further batch: the others are told here that there is none.
    """
    before = (getattr(state, "step", None), getattr(state, "awaited", None))
    state.step, state.awaited, state.is_stopped = 0, None, False
    try:
        with original(data):
            try:
                yield
            except StopIteration:
                # Keras would take it for data that ended too early, and
                # tf_keras train no further epoch.
                if not state.is_stopped:
                    raise
        if state.awaited is not None:
            state.awaited.announce(messages.ENDED)
    except BaseException as error:
        if state.awaited is not None:
            state.awaited.announce(messages.FAILED, messages.first_line(error))
        raise
    finally:
        state.step, state.awaited = before
