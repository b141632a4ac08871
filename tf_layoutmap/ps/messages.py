"""TensorFlow's messages about closures: one sentence, one line per event."""

from __future__ import annotations

import collections
import logging
import os
import re
from typing import Any

import tensorflow as tf
from absl import logging as absl_logging

# What TensorFlow writes around the sentence of an operation's error.
_PREFIX = re.compile(r"\(\d+\) *[A-Z_]+: *")
_FRAME = re.compile(
    r"$|Graph execution error:|Detected at node|\d+ root error\(s\) found"
    r"|\d+ successful operations|\d+ derived errors? ignored|File \"|<stack "
    r"|This could happen if the remote|This derived error is ignored"
)
# Behind the sentence: where it was raised, and how it came here.
_TAIL = re.compile(
    r"\s*(\[\[.*|\[Op:\w+\].*|Additional GRPC error information.*"
    r"|:UNKNOWN:.*|\[type\.googleapis\.com.*)"
)

# Of a message of TensorFlow's coordinator: who, and what happened. None where
# another message, or an error, says the same.
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
    # Printed for each checkpoint from the fifth on; users cannot change it.
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
    """Returns what an error of an operation says, without what is around it.

    >>> sentence_of("Graph execution error:\\n\\n1 root error(s) found.\\n"
    ...             "  (0) INVALID_ARGUMENT:  id 9 is bad\\n\\t [[{{node A}}]]")
    'id 9 is bad'

    Args:
      message: Of a `tf.errors.OpError`, as a cluster raises it.
    """
    lines: list[str] = []
    for line in message.splitlines():
        text = _PREFIX.sub("", line.strip(), count=1)
        kept = _TAIL.sub("", text)
        if not _FRAME.match(kept):
            lines.append(kept)
        if lines and (kept != text or _FRAME.match(kept)):
            break  # What follows repeats it.
    return " ".join(lines) or message


def wants_full_text() -> bool:
    """Whether the user has asked for all that TensorFlow says."""
    return os.environ.get(_LOG_LEVEL) == "0"


def concise(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns an error of a closure whose message is its sentence.

    With `TF_CPP_MIN_LOG_LEVEL=0` in the environment it is the error itself.
    """
    if wants_full_text():
        return error
    try:
        return type(error)(error.node_def, error.op, sentence_of(error.message))
    except TypeError:  # A class with other arguments.
        return error


class OneLinePerEvent(logging.Filter):
    """Shortens the messages of TensorFlow's coordinator to a line each.

    A line that comes again is shown the first time, the 10th, the 100th, and so
    on. Messages of other modules pass unchanged, and all messages do with
    `TF_CPP_MIN_LOG_LEVEL=0` in the environment.
    """

    def __init__(self):
        super().__init__()
        self._counts: collections.Counter[str] = collections.Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether TensorFlow's logger shows a record.

        A shorter line is logged by absl instead: TensorFlow's logger has a
        handler and so have those above it, and each shows the record.
        """
        if wants_full_text():
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


_filter = OneLinePerEvent()


def shorten_log() -> None:
    """Lets TensorFlow's coordinator log one line per event, once each."""
    logger: Any = tf.get_logger()
    if _filter not in logger.filters:
        logger.addFilter(_filter)
