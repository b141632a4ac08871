"""How far tables are that take seconds to make, as a bar."""

import contextlib
import sys
import threading
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap import _ops

# Until the bar comes, and from one state of it to the next; where no person
# looks at a terminal, each state is a line of a file.
FIRST_SECONDS = 3.0
TERMINAL_SECONDS = 0.5
FILE_SECONDS = 10.0

# Less is made before the bar would come.
LEAST_BYTES = 1 << 28

_MIB = 1 << 20


class _Made:
    """Bytes of first values that this process has made."""

    def __init__(self) -> None:
        # Those that come from elsewhere than our operation.
        self.by_others = 0
        # One bar at a time: tables are made of shards, models of tables.
        self.is_shown = False

    def bytes(self) -> int:
        """Returns all by now, those of a running operation too."""
        return self.by_others + int(_ops.bytes_drawn())


_made = _Made()


def add(num_bytes: int) -> None:
    """Counts a value that is ready and was not drawn by `new_rows`."""
    _made.by_others += num_bytes


@contextlib.contextmanager
def shown(num_bytes: int) -> Iterator[None]:
    """Shows how much of `num_bytes` is made inside, after a few seconds.

    Nothing inside of another one, of small tables, and while functions are
    traced.
    """
    if num_bytes < LEAST_BYTES or _made.is_shown or (
            not tf.executing_eagerly()):
        yield
        return
    _made.is_shown = True
    before, ended = _made.bytes(), threading.Event()
    thread = threading.Thread(
        target=_show, args=(num_bytes, before, ended), daemon=True)
    thread.start()
    try:
        yield
        # What creators of the program made was not counted.
        _made.by_others += max(before + num_bytes - _made.bytes(), 0)
    finally:
        ended.set()
        thread.join()
        _made.is_shown = False


def _show(num_bytes: int, before: int, ended: threading.Event) -> None:
    if ended.wait(FIRST_SECONDS):
        return
    total = max(num_bytes // _MIB, 1)
    print("Making tables", flush=True)
    # Of the Keras that the program uses.
    bar = tf.keras.utils.Progbar(total, unit_name="MiB")
    pause = (TERMINAL_SECONDS if sys.stdout.isatty() else FILE_SECONDS)
    is_last = False
    while not is_last:
        is_last = ended.wait(pause)
        made = min((_made.bytes() - before) // _MIB, total)
        bar.update(made, finalize=is_last)
