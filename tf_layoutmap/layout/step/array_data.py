"""The data that both Keras make of arrays: on a mesh without autotuning.

An iterator of tf.data that autotunes waits at its end for a thread of its own,
in one of twenty cases for as long as it was used, at most for a minute: the
thread is woken before it can see that it was cancelled (TensorFlow 2.21). What
Keras makes of arrays cuts batches from memory; there is little to tune.
"""

from typing import Any

import tensorflow as tf


def without_autotuning(dataset: Any) -> Any:
    """Returns a `tf.data.Dataset` whose iterators end at once.

    What a strategy has distributed stays as it is.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
