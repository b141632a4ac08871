"""Text for users: warnings that point at their program, and printed tables."""

import inspect
import io
import os
import re
import sys
import warnings
from typing import Any

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


class _TextForOutput(io.StringIO):
    """Text that will be printed to the standard output."""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] `io.StringIO` has None.
        return getattr(sys.stdout, "encoding", None) or "utf-8"


def printed(renderable: Any, width: int) -> str:
    """Returns the text that `rich` prints for an object.

    The borders of tables are ASCII if the standard output is.

    Args:
      renderable: An object that `rich` can print.
      width: Width of the text in characters.
    """
    # `rich` is imported here, because importing this package must not take the
    # time to import `rich`.
    import rich.console

    out = _TextForOutput()
    rich.console.Console(file=out, width=width).print(renderable)
    return out.getvalue()
