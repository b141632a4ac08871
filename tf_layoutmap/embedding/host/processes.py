"""Exchange of small values between processes, outside of steps.

Calls that several processes must make together, such as `evict` of an open
vocabulary, use `Processes` to compare their arguments, and to raise an error in
all processes if one process fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.host import multi_process

Array = np.ndarray[Any, Any]


class Processes:
    """The processes of a `MultiWorkerMirroredStrategy`.

    All processes must call the same methods in the same order, outside of
    `tf.function`.

    Attributes:
      rank: Index of this process.
      size: Number of processes.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Reads the index of this process.

        Args:
          strategy: The strategy, in cross-replica context.
        """
        self._strategy = strategy
        self._num_local = len(strategy.extended.worker_devices)
        # Strategies do not have an attribute for the index of the process.
        replicas = strategy.experimental_local_results(
            strategy.run(
                lambda: (
                    tf.distribute.get_replica_context().replica_id_in_sync_group
                )
            )
        )
        self.rank = int(replicas[0]) // self._num_local
        self.size = int(strategy.num_replicas_in_sync) // self._num_local

    @property
    def is_first(self) -> bool:
        """Whether this process is process 0."""
        return self.rank == 0

    def gather_texts(self, text: str) -> list[str]:
        """Returns the string of each process, in the order of the processes."""
        # Collectives do not support bytes, so each byte is sent as an int32.
        values = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return [
            one.astype(np.uint8).tobytes().decode()
            for one in self._gather(values)
        ]

    def gather_rows(self, rows: Array) -> Array:
        """Returns the rows of all processes, in the order of the processes.

        Args:
          rows: `[num_rows, dim]` values of a 16-bit or 32-bit float dtype. The
            number of rows can differ between processes.
        """
        # The conversion of 16-bit values to float32 and back is exact.
        values = rows.astype(np.float32).ravel().view(np.int32)
        found = np.concatenate(self._gather(values)).view(np.float32)
        return found.astype(rows.dtype).reshape(-1, rows.shape[1])

    def gather_int64(self, values: Array) -> list[Array]:
        """Returns the vector of each process, in the order of the processes.

        Args:
          values: int64 vector. Its size can differ between processes.
        """
        local = np.ascontiguousarray(values, np.int64).view(np.int32)
        return [one.view(np.int64) for one in self._gather(local)]

    def sum(self, value: int) -> int:
        """Returns the sum of the numbers of all processes."""
        return sum(int(one[0]) for one in self.gather_int64(np.array([value])))

    def gather_bytes(self, values: bytes) -> list[bytes]:
        """Returns the bytes of each process, in the order of the processes."""
        padding = b"\0" * (-len(values) % 4)
        local = np.frombuffer(values + padding, np.int32)
        gathered = self._gather(np.append(local, np.int32(len(padding))))
        return [
            one[:-1].tobytes()[: 4 * (len(one) - 1) - int(one[-1])]
            for one in gathered
        ]

    @contextlib.contextmanager
    def failing_together(self, call: str) -> Iterator[None]:
        """Raises an error in all processes if the block fails in one process.

        The block must not exchange values with other processes.

        Args:
          call: Name of the call, for the message.

        Raises:
          Exception: The error of the block in this process.
          RuntimeError: If the block failed only in other processes. The message
            contains the error and the index of the process.
        """
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        texts = self.gather_texts(describe_error(error))
        raise_errors(call, error, texts)

    def check_equal(self, argument: str, value: str) -> None:
        """Checks that all processes have passed the same argument.

        Args:
          argument: Name of the call and the argument, for the message.
          value: Description of the argument.

        Raises:
          ValueError: If the values differ. All processes raise this error.
        """
        first, *others = self.gather_texts(value)
        for number, other in enumerate(others, start=1):
            if other != first:
                raise ValueError(
                    f"{argument} must be equal in all processes of a "
                    f"MultiWorkerMirroredStrategy. Received: {first} in "
                    f"process 0, {other} in process {number}."
                )

    def _gather(self, values: Array) -> list[Array]:
        """Returns the int32 vector of each process."""
        # One element is added to each vector, because TensorFlow's op ends the
        # process if all vectors are empty.
        values = np.append(values, np.zeros([1], np.int32))
        sizes = self._all_gather(tf.constant([len(values)])).numpy()
        gathered = self._all_gather(tf.constant(values)).numpy()
        # All replicas of a process send the same vector, so one vector per
        # process is returned.
        parts = np.split(gathered, np.cumsum(sizes)[:-1])[:: self._num_local]
        return [one[:-1] for one in parts]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def _all_gather(self, values: tf.Tensor) -> tf.Tensor:
        # An argument of a function has no device, which `all_gather` requires.
        return self._strategy.experimental_local_results(
            self._strategy.run(
                lambda: multi_process.all_gather(tf.identity(values))
            )
        )[0]


# Attribute of a strategy that stores its `Processes`, so that the functions of
# the object are traced once per strategy.
_ATTRIBUTE = "_tf_layoutmap_processes"


def of_strategy(strategy: tf.distribute.Strategy) -> Processes:
    """Returns the `Processes` of a strategy.

    All processes must call this function together.

    Args:
      strategy: The strategy, in cross-replica context.
    """
    found = getattr(strategy, _ATTRIBUTE, None)
    if found is None:
        found = Processes(strategy)
        setattr(strategy, _ATTRIBUTE, found)
    return found


def failing_together(
    group: Processes | None, call: str
) -> contextlib.AbstractContextManager[None]:
    """Returns `Processes.failing_together`, or an empty scope without a group.

    Args:
      group: The processes that make the call together, or None.
      call: Name of the call, for the message.
    """
    if group is None:
        return contextlib.nullcontext()
    return group.failing_together(call)


def describe_error(error: BaseException | None) -> str:
    """Returns the class and the message of an error, or an empty string."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def raise_errors(
    call: str,
    error: Exception | None,
    texts: Sequence[str],
    make_error: Callable[[str], Exception] = RuntimeError,
) -> None:
    """Raises an error if a call has failed in at least one process.

    Args:
      call: Name of the call, for the message.
      error: The error of this process, or None.
      texts: Return value of `describe_error` in each process.
      make_error: Function that creates the error of the other processes.
    """
    if error is not None:
        raise error
    for number, text in enumerate(texts):
        if text:
            raise make_error(f"{call} failed in process {number}: {text}")
