"""What ends a run over parameter servers.

TensorFlow's coordinator tells failures apart by words in their messages. These
come after it has done so, and name processes by their addresses.
"""


class ServerLostError(RuntimeError):
    """A parameter server is gone, and with it rows since the last checkpoint.
    """


class StepDeadlineError(RuntimeError):
    """No step has ended within the deadline."""
