"""What processes send to each other in a step: vectors of unequal sizes.

TensorFlow's collectives do it, which are not part of the interface of its
strategies. Its all-to-all sends blocks of one size; so sizes are told first,
and the largest block of a step is that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private

# How long a process waits for the others, which may be writing a checkpoint.
# One that died is noticed earlier, by its connection.
TIMEOUT_SECONDS = 600

_INT32 = (tf.uint32, tf.int32)


class Group:
    """The processes of a `MultiWorkerMirroredStrategy`.

    Attributes:
      size: How many they are.
      rank: The number of this one.
    """

    def __init__(self, strategy: Any):
        """Takes the strategy, outside of its replicas.

        Raises:
          NotImplementedError: If a process has several replicas.
        """
        self._launcher = _tf_private.host_collectives_of(strategy)
        self.size = int(strategy.num_replicas_in_sync)
        if len(strategy.extended.worker_devices) != 1:
            raise NotImplementedError(
                'Argument `over_processes` must be "copied" where a process '
                "has several devices: the parts of a table belong to "
                'processes of one replica. Received: "divided" with the '
                f"devices {strategy.extended.worker_devices}."
            )
        # Not under a name of its own in the interface of strategies.
        self.rank = int(
            strategy.run(
                lambda: (
                    tf.distribute.get_replica_context().replica_id_in_sync_group
                )
            )
        )

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all processes, one after the other.

        Args:
          tensor: Of one shape in all processes.
        """
        launcher = self._launcher
        with tf.device(_tf_private.device_of_collectives(launcher)):
            return _tf_private.all_gather(
                tensor,
                timeout=TIMEOUT_SECONDS,
                **_tf_private.collective_arguments(launcher),
            )

    def exchange(
        self,
        blocks: Sequence[tf.Tensor],
        sizes: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Sends each process its block, and returns what came from each.

        Args:
          blocks: By process, a vector of float32, int32 or uint32.
          sizes: `[size, size]` int64: of the block from each process to each,
            the same in all processes.

        Returns:
          By process, the block that it has sent here.
        """
        dtype = blocks[0].dtype
        largest = tf.maximum(tf.reduce_max(sizes), 1)
        padded = tf.stack(
            [
                tf.pad(
                    tf.bitcast(one, tf.int32) if dtype in _INT32 else one,
                    [[0, largest - tf.size(one, tf.int64)]],
                )
                for one in blocks
            ]
        )
        launcher = self._launcher
        with tf.device(_tf_private.device_of_collectives(launcher)):
            received = _tf_private.all_to_all(
                padded,
                timeout=TIMEOUT_SECONDS,
                **_tf_private.collective_arguments(launcher),
            )
        received = tf.ensure_shape(received, [self.size, None])
        return [
            tf.bitcast(received[other, : sizes[other, self.rank]], dtype)
            for other in range(self.size)
        ]
