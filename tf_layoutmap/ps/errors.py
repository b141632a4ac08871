"""What ends a run over parameter servers.

TensorFlow's coordinator tells failures apart by words in their messages. These
come after it has done so, and name processes by their addresses.
"""


class ServerLostError(RuntimeError):
    """A parameter server is gone; updates since the checkpoint are lost."""


class StepDeadlineError(RuntimeError):
    """No step has ended within the deadline.

    The process cannot use its cluster any more. It can exit, though, while
    other processes do not answer: `sys.exit(3)` ends it with code 3. From this
    error on, nothing that it has made on other processes is removed there, and
    a shutdown of the interpreter that takes longer than 20 s is forced, with
    exit code 1.
    """
