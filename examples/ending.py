"""How a program ends when it cannot go on: a sentence, not a traceback."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def in_a_sentence(*errors: type[Exception]) -> Iterator[None]:
    """Prints what went wrong; the exit code is 2, or 130 when interrupted.

    Args:
      *errors: What a user can fix. Any other error is ours, and is raised.
    """
    try:
        yield
    except errors as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nInterrupted. Started again, it goes on from the model saved "
            "last.",
            file=sys.stderr,
        )
        sys.exit(130)
