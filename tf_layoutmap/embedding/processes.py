"""The processes of a strategy, which act together.

`Processes` has two groups of methods. The first group exchanges tensors in
steps, with TensorFlow's collectives, which are not part of the public strategy
API. The all-to-all collective requires blocks of equal size. Therefore
`exchange` pads all blocks to the size of the largest block, and its callers
exchange the sizes first.

The second group exchanges values outside of steps. Calls that several processes
must make together, such as `evict` of an open vocabulary, use it to compare
their arguments, and to raise an error in all processes if one process fails.

No collective has a timeout. For each collective with a timeout, TensorFlow
starts a thread that sleeps until the timeout, also if the collective has ended.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import process_end
from tf_layoutmap._core import tf_private

Array = np.ndarray[Any, Any]

_INT32 = (tf.uint32, tf.int32)

# Keys of the groups of collectives that run in the background. The keys of
# strategies are small numbers.
_group_keys = itertools.count(1 << 24)

# Maximum number of code points in an error message that a process sends to the
# other processes.
_MESSAGE_SIZE = 400


class Processes:
    """The processes of a `MultiWorkerMirroredStrategy`.

    All processes must call the same methods in the same order.

    Attributes:
      rank: Index of this process.
      size: Number of processes.
      num_local: Number of replicas in each process.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Reads the index of this process.

        Args:
          strategy: The strategy, in cross-replica context.
        """
        process_end.wait_for_group()
        self._strategy = strategy
        self._launcher = tf_private.host_collectives_of(strategy)
        self.num_local = len(strategy.extended.worker_devices)
        # Strategies do not have an attribute for the index of the process.
        replicas = strategy.experimental_local_results(
            strategy.run(
                lambda: (
                    tf.distribute.get_replica_context().replica_id_in_sync_group
                )
            )
        )
        self.rank = int(replicas[0]) // self.num_local
        self.size = int(strategy.num_replicas_in_sync) // self.num_local

    @property
    def is_first(self) -> bool:
        """Whether this process is process 0."""
        return self.rank == 0

    def in_background(self) -> Processes:
        """Returns an object for a thread that runs beside training steps.

        The object has separate keys of collectives, because the order of the
        collectives of two threads can differ between processes. All processes
        must create these objects in the same order.
        """
        other = copy.copy(self)
        other._launcher = tf_private.separate_launcher(
            self._launcher, next(_group_keys)
        )
        return other

    # Collectives in steps.

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all processes, concatenated along axis 0.

        Each process must have one replica, which calls the method.

        Args:
          tensor: Tensor of this process. All processes must pass tensors with
            the same shape.
        """
        launcher = self._launcher
        with tf.device(tf_private.device_of_collectives(launcher)):
            return tf_private.all_gather(
                tensor,
                **tf_private.collective_arguments(launcher),
            )

    def broadcast(self, tensor: tf.Tensor, source: int) -> tf.Tensor:
        """Returns the tensor of one process.

        Args:
          tensor: Tensor of this process. All processes must pass tensors with
            the same static shape and dtype.
          source: Index of the process whose tensor is returned.
        """
        launcher = self._launcher
        arguments = tf_private.collective_arguments(launcher)
        # A broadcast has no ordering token. The callers run one collective at a
        # time.
        del arguments["ordering_token"]
        with tf.device(tf_private.device_of_collectives(launcher)):
            if self.rank == source:
                return tf_private.broadcast_send(tensor, **arguments)
            return tf_private.broadcast_recv(
                tensor.shape,
                tensor.dtype,
                **arguments,
            )

    def exchange(
        self,
        blocks: Sequence[tf.Tensor],
        sizes: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Sends a block to each process, and returns the received blocks.

        Args:
          blocks: One vector of float32, int32 or uint32 for each receiving
            process.
          sizes: `[size, size]` int64 sizes of the blocks by sender and
            receiver. The tensor must be equal in all processes.

        Returns:
          The block that this process has received from each process.
        """
        dtype = blocks[0].dtype
        largest = tf.maximum(tf.reduce_max(sizes), 1)
        padded = tf.stack(
            [
                tf.pad(
                    tf.bitcast(block, tf.int32) if dtype in _INT32 else block,
                    [[0, largest - tf.size(block, tf.int64)]],
                )
                for block in blocks
            ]
        )
        launcher = self._launcher
        with tf.device(tf_private.device_of_collectives(launcher)):
            received = tf_private.all_to_all(
                padded,
                **tf_private.collective_arguments(launcher),
            )
        received = tf.ensure_shape(received, [self.size, None])
        return [
            tf.bitcast(received[other, : sizes[other, self.rank]], dtype)
            for other in range(self.size)
        ]

    def gather_vectors(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Returns the int64 vector of each process.

        Args:
          vector: Vector, whose size can differ between processes.
        """
        sizes = tf.ensure_shape(
            self.all_gather(tf.shape(vector, tf.int64)), [self.size]
        )
        # All processes send at least one element, because TensorFlow's op ends
        # the process if all tensors are empty.
        padding = [[0, tf.reduce_max(sizes) + 1 - sizes[self.rank]]]
        gathered = tf.reshape(
            self.all_gather(tf.pad(vector, padding)), [self.size, -1]
        )
        return [
            gathered[process, : sizes[process]] for process in range(self.size)
        ]

    def exchange_vectors(self, vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends an int64 vector to each process; see `exchange`."""
        words = [
            tf.reshape(tf.bitcast(vector, tf.int32), [-1]) for vector in vectors
        ]
        sizes = self.all_gather(
            tf.stack([tf.size(part, tf.int64) for part in words])[tf.newaxis]
        )
        received = self.exchange(
            words, tf.ensure_shape(sizes, [self.size, self.size])
        )
        return [
            tf.bitcast(tf.reshape(part, [-1, 2]), tf.int64) for part in received
        ]

    def check_errors(
        self,
        is_bad: tf.Tensor,
        error: tf.Tensor,
        undo: Callable[[tf.Tensor], tf.Operation | None] | None = None,
    ) -> tf.Tensor:
        """Raises an error in all processes if one process has an error.

        Args:
          is_bad: `[size]` bool tensor: whether each process has an error.
          error: Error message of this process, or an empty string.
          undo: Function that each process calls with the error message before
            it raises the error, or None. The function returns its last
            operation in a graph, and None otherwise.

        Returns:
          A tensor that is computed after the check.
        """

        def raise_error():
            points = tf.strings.unicode_decode(error, "UTF-8")[:_MESSAGE_SIZE]
            points = self.all_gather(
                tf.pad(points, [[0, _MESSAGE_SIZE - tf.size(points)]])[
                    tf.newaxis
                ]
            )
            first = tf.argmax(is_bad)
            points = tf.gather(points, first)
            # Single quotes are removed, because the message of an assertion
            # would show a backslash before each single quote.
            message = tf.strings.regex_replace(
                tf.strings.unicode_encode(
                    tf.boolean_mask(points, points > 0), "UTF-8"
                ),
                "'",
                "",
            )
            undone = None if undo is None else undo(message)
            with tf.control_dependencies([] if undone is None else [undone]):
                check = tf.debugging.Assert(
                    False,
                    [
                        tf.strings.join(
                            [
                                "Process ",
                                tf.strings.as_string(first),
                                ": ",
                                message,
                            ]
                        )
                    ],
                )
            with tf.control_dependencies([] if check is None else [check]):
                return tf.constant(True)

        return tf.cond(
            tf.reduce_any(is_bad), raise_error, lambda: tf.constant(True)
        )

    def all_gather_of_replicas(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the values of all replicas, concatenated along axis 0.

        Each replica of each process calls the method.

        Args:
          values: Values of this replica. Their number can differ between
            replicas, but must not be 0 in all replicas.
        """
        return tf.distribute.get_replica_context().all_gather(values, axis=0)

    def is_in_replica(self) -> bool:
        """Whether the caller is a replica of the strategy."""
        context = tf.distribute.get_replica_context()
        return context is not None and context.strategy is self._strategy

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the replica of this process.

        Each process must have one replica.
        """
        return self._strategy.experimental_local_results(
            self._strategy.run(function, arguments)
        )[0]

    # Values outside of steps.

    def gather_texts(self, text: str) -> list[str]:
        """Returns the string of each process, in the order of the processes."""
        # Collectives do not support bytes, so each byte is sent as an int32.
        values = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return [
            part.astype(np.uint8).tobytes().decode()
            for part in self._gather(values)
        ]

    def gather_rows(self, rows: Array) -> Array:
        """Returns the rows of all processes, in the order of the processes.

        Args:
          rows: `[num_rows, dim]` values of a 16-bit or 32-bit float dtype. The
            number of rows can differ between processes.
        """
        # The conversion of 16-bit values to float32 and back is exact.
        values = rows.astype(np.float32).ravel().view(np.int32)
        gathered = np.concatenate(self._gather(values)).view(np.float32)
        return gathered.astype(rows.dtype).reshape(-1, rows.shape[1])

    def gather_int64(self, values: Array) -> list[Array]:
        """Returns the vector of each process, in the order of the processes.

        Args:
          values: int64 vector. Its size can differ between processes.
        """
        local = np.ascontiguousarray(values, np.int64).view(np.int32)
        return [part.view(np.int64) for part in self._gather(local)]

    def sum(self, value: int) -> int:
        """Returns the sum of the numbers of all processes."""
        return sum(
            int(part[0]) for part in self.gather_int64(np.array([value]))
        )

    def gather_bytes(self, values: bytes) -> list[bytes]:
        """Returns the bytes of each process, in the order of the processes."""
        padding = b"\0" * (-len(values) % 4)
        local = np.frombuffer(values + padding, np.int32)
        gathered = self._gather(np.append(local, np.int32(len(padding))))
        return [
            part[:-1].tobytes()[: 4 * (len(part) - 1) - int(part[-1])]
            for part in gathered
        ]

    def require_eager(self, call: str) -> None:
        """Raises a RuntimeError inside a `tf.function`.

        Args:
          call: Name of a call that all processes make together.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{call} must be called outside tf.function under "
                "MultiWorkerMirroredStrategy, in all processes together."
            )

    @contextlib.contextmanager
    def failing_together(
        self, call: str, undo: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """Raises an error in all processes if the block fails in one process.

        The block must not exchange values with other processes.

        Args:
          call: Name of the call, for the message.
          undo: Function that undoes the block. If the block fails only in other
            processes, it is called with the error message of one of them.

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
        if undo is not None and error is None and any(texts):
            undo(max(texts))
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
        sizes = self._gather_in_replicas(tf.constant([len(values)])).numpy()
        gathered = self._gather_in_replicas(tf.constant(values)).numpy()
        # All replicas of a process send the same vector, so one vector per
        # process is returned.
        parts = np.split(gathered, np.cumsum(sizes)[:-1])[:: self.num_local]
        return [part[:-1] for part in parts]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def _gather_in_replicas(self, values: tf.Tensor) -> tf.Tensor:
        # An argument of a function has no device, which `all_gather` requires.
        return self._strategy.experimental_local_results(
            self._strategy.run(
                lambda: self.all_gather_of_replicas(tf.identity(values))
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
    group = getattr(strategy, _ATTRIBUTE, None)
    if group is None:
        group = Processes(strategy)
        setattr(strategy, _ATTRIBUTE, group)
    return group


def failing_together(
    group: Processes | None,
    call: str,
    undo: Callable[[str], None] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Returns `Processes.failing_together`, or an empty scope without a group.

    Args:
      group: The processes that make the call together, or None.
      call: Name of the call, for the message.
      undo: See `Processes.failing_together`.
    """
    if group is None:
        return contextlib.nullcontext()
    return group.failing_together(call, undo)


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
