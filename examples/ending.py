"""Prints a one-sentence error message instead of a traceback."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def in_a_sentence(*errors: type[Exception]) -> Iterator[None]:
    """Prints the message of an error and exits with code 2.

    An interrupted program exits with code 130.

    Args:
      *errors: Types of errors that a user can fix. Errors of other types are
        not caught.
    """
    try:
        yield
    except errors as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "\nInterrupted. The next run resumes from the model that was saved "
            "last.",
            file=sys.stderr,
        )
        sys.exit(130)
