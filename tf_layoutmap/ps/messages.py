"""Shortens TensorFlow's messages about closures to one line per event."""

from __future__ import annotations

import collections
import logging
import os
import re
from typing import Any

import tensorflow as tf
from absl import logging as absl_logging

# Prefixes that TensorFlow adds to the message of an op.
_PREFIX = re.compile(r"\(\d+\) *[A-Z_]+: *")
_FRAME = re.compile(
    r"$|Graph execution error:|Detected at node|\d+ root error\(s\) found"
    r"|\d+ successful operations|\d+ derived errors? ignored|File \"|<stack "
    r"|This could happen if the remote|This derived error is ignored"
)
# Suffixes that say where an error was raised and how it was transmitted.
_TAIL = re.compile(
    r"\s*(\[\[.*|\[Op:\w+\].*|Additional GRPC error information.*"
    r"|:UNKNOWN:.*|\[type\.googleapis\.com.*)"
)

# Each entry has a pattern of the coordinator's messages, with groups for the
# worker and the error, and a shorter text. If the text is None, the message is
# hidden, because another message or an error has the same information.
_EVENTS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (
        re.compile(
            r"\s*(\S+) encountered the following error when processing "
            r"(?:resource )?closure: \w+\(.*?\):(.*)",
            re.DOTALL,
        ),
        "A closure failed on {}: {}",
    ),
    (
        re.compile(r"Worker (\S+) failed with \w+\(.*?\):(.*)", re.DOTALL),
        "Lost worker {}, whose closures run again: {}",
    ),
    (
        re.compile(
            r"Remote function on worker (\S+) failed with \w+\(.*?\):(.*)"
            r"\nIt is treated as a transient",
            re.DOTALL,
        ),
        "A call of worker {} failed, and is repeated: {}",
    ),
    (re.compile(r"Start cancelling closures due to error"), None),
    (
        re.compile(
            r"Remote function on worker .*This derived error is ignored",
            re.DOTALL,
        ),
        None,
    ),
    # TensorFlow prints the next message for each checkpoint after the fourth.
    # Users cannot disable the message.
    (
        re.compile(
            r"\d+ out of the last \d+ calls to <function "
            r"MultiDeviceSaver\.save\."
        ),
        None,
    ),
)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def sentence_of(message: str) -> str:
    """Extracts the message of an op from the text of an error.

    >>> sentence_of("Graph execution error:\\n\\n1 root error(s) found.\\n"
    ...             "  (0) INVALID_ARGUMENT:  id 9 is bad\\n\\t [[{{node A}}]]")
    'id 9 is bad'

    Args:
      message: Message of a `tf.errors.OpError` that a cluster raised.
    """
    lines: list[str] = []
    for line in message.splitlines():
        text = _PREFIX.sub("", line.strip(), count=1)
        kept = _TAIL.sub("", text)
        if not _FRAME.match(kept):
            lines.append(kept)
        if lines and (kept != text or _FRAME.match(kept)):
            break  # The following lines repeat the message.
    return " ".join(lines) or message


def is_full_text_requested() -> bool:
    """Returns whether the user requested TensorFlow's full messages."""
    return os.environ.get(_LOG_LEVEL) == "0"


def shorten_error(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns a copy of a closure's error with a short message.

    If the environment contains `TF_CPP_MIN_LOG_LEVEL=0`, the function returns
    `error`.
    """
    if is_full_text_requested():
        return error
    try:
        return type(error)(error.node_def, error.op, sentence_of(error.message))
    except TypeError:  # A subclass has other arguments.
        return error


class CoordinatorLogFilter(logging.Filter):
    """Log filter that shortens messages of TensorFlow's coordinator.

    If a line is repeated, only its 1st, 10th, 100th, ... occurrence is shown.
    The filter does not change messages of other modules. If the environment
    contains `TF_CPP_MIN_LOG_LEVEL=0`, the filter changes no messages.
    """

    def __init__(self):
        super().__init__()
        self._counts: collections.Counter[str] = collections.Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether TensorFlow's logger shows a record.

        If the line is shortened, the method logs the shorter line with absl and
        returns False. The record itself is not changed, because TensorFlow's
        logger and its parent loggers each have a handler, and the line would
        appear several times.
        """
        if is_full_text_requested():
            return True
        message = record.getMessage()
        for pattern, form in _EVENTS:
            match = pattern.match(message)
            if match is None:
                continue
            if form is None:
                return False
            worker, error = match.groups()
            line = form.format(worker, sentence_of(error))
            self._counts[line] += 1
            count = self._counts[line]
            if str(count).strip("0") == "1":
                absl_logging.warning(
                    "%s", line if count == 1 else f"{line} ({count} times)"
                )
            return False
        return True


_filter = CoordinatorLogFilter()


def shorten_log() -> None:
    """Installs the filter, so that the coordinator logs one line per event."""
    logger: Any = tf.get_logger()
    if _filter not in logger.filters:
        logger.addFilter(_filter)
