"""States of a cell: what happens if a feature is used on a runtime."""

import dataclasses

# Maps the name of each runtime to its title on the page.
RUNTIMES = {
    "host": "host",
    "mirrored": "`MirroredStrategy`",
    "replicated": "`MultiWorkerMirroredStrategy`, replicated tables",
    "sharded": "`MultiWorkerMirroredStrategy`, sharded tables",
    "servers": "parameter servers",
    "mesh": "mesh",
    "tpu": "emulated TPU",
    "tpu_host": "emulated TPU, tables on the host",
    "sparse_cores": "emulated TPU with SparseCores",
}


@dataclasses.dataclass(frozen=True)
class Works:
    """The program runs and computes the numbers of the host.

    Attributes:
      reason: Remark on the page, a complete sentence, or an empty string.
      ignored: Regular expression of the names of numbers that differ from the
        host for this reason.
      tolerance: Largest difference from the numbers of the host. The value 0
        requires bitwise identical numbers.
    """

    reason: str = ""
    ignored: str = ""
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Raises:
    """The program raises an error.

    Attributes:
      error: Regular expression that the message of the error must contain.
      reason: Reason on the page, a complete sentence.
    """

    error: str
    reason: str


class Impossible(Raises):
    """The combination has no meaning, or another feature replaces it."""


@dataclasses.dataclass(frozen=True)
class NotTried:
    """The combination cannot be tried by the tests.

    Attributes:
      reason: Reason on the page, a complete sentence.
    """

    reason: str


class Absent(NotTried):
    """The runtime does not have the feature, so there is nothing to try."""


State = Works | Impossible | NotTried


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a program on one runtime.

    Attributes:
      error: Type and message of the error, or None if the program succeeded.
      numbers: Path of an `.npz` file with the results, or None.
    """

    error: str | None = None
    numbers: str | None = None
