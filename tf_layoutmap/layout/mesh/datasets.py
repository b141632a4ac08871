"""`dtensor.DTensorDataset`: every batch once, and a mesh that works afterwards.

Two things are wrong with it in TensorFlow 2.21, on the CPU at least.

* It divides the number of all devices of a kind, not of those on its mesh, by
  what each of its replicas has here, and takes the quotient for a number of
  clients. On four of eight devices it repeats each batch for a second client
  that is not there, without an error.
* The end of the data is an error inside each device's thread. It stays there:
  every later operation on a mesh fails with "Function was cancelled".
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh.layouts import is_own


def iterate(
    original: Callable[[Any], Any],
    dataset: tf.experimental.dtensor.DTensorDataset,
) -> Any:
    """Returns an iterator over batches, each of which comes once."""
    if not is_own(dataset._mesh):
        return original(dataset)
    per_client = dataset._num_local_devices_per_replica
    clients = dataset._mesh.size // (dataset.num_global_replicas * per_client)
    dataset._num_clients_per_replica = clients
    dataset._partition_offset = (
        tf.experimental.dtensor.client_id() % clients * per_client
    )
    iterator = original(dataset)
    length = int(dataset._batched_dataset.cardinality())
    if length >= 0:
        length //= dataset.num_global_replicas
    iterator._num_batches_left = length
    return iterator


def get_next(original: Callable[[Any], Any], iterator: Any) -> Any:
    """Returns the next batch; the devices are never asked for one too many.

    Raises:
      StopIteration: There is no further batch.
      RuntimeError: The same, where the number of batches was not known.
    """
    left = getattr(iterator, "_num_batches_left", None)
    if left is None or not tf.executing_eagerly():
        # A function may take any number of batches.
        iterator._num_batches_left = None
        return original(iterator)
    if left == 0:
        raise StopIteration
    try:
        batch = original(iterator)
    except (StopIteration, tf.errors.CancelledError) as error:
        # Which of the two comes depends on which device is asked first.
        if left > 0 and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(
            "The data of a DTensorDataset of unknown length ended, after "
            "which TensorFlow runs nothing more on these devices. State the "
            "length, before the DTensorDataset is made, with dataset.apply("
            "tf.data.experimental.assert_cardinality(n)), or take no more "
            "steps than there are batches (`steps_per_epoch`, `epochs=1`)."
        ) from None
    if left > 0:
        iterator._num_batches_left = left - 1
    return batch
