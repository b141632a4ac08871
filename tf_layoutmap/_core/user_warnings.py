"""Warnings that point at the line of the user's program."""

import inspect
import os
import re
import warnings

# Frames of this package, and of libraries, are not code of the user.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen")
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that points at the line of the user's program.

    This line is in the innermost frame that belongs neither to this package nor
    to an installed library nor to Python's standard library. If there is no
    such frame, the warning points at the caller of this package.

    Args:
      message: Text of the warning.
      category: Class of the warning.
    """
    level, caller_level = 1, None
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None:
        level += 1
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGE + os.sep):
            if not (
                _LIBRARY.search(path)
                or path.startswith(_STANDARD_LIBRARY + os.sep)
            ):
                caller_level = level
                break
            caller_level = caller_level or level
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=caller_level or 2)
