"""Datasets whose iterators end at once: without tf.data's autotuning.

An iterator of tf.data that autotunes waits at its end for a thread of its own,
in one of twenty cases for as long as it was used, at most for a minute: the
thread is woken before it can see that it was cancelled (TensorFlow 2.21). In a
process of a cluster all that comes from the coordinator waits with it.
"""

import warnings
from typing import Any

import tensorflow as tf


def without_autotuning(dataset: Any) -> Any:
    """Returns a `tf.data.Dataset` whose iterators end at once.

    What a strategy has distributed stays as it is, and so does a dataset whose
    options say whether it autotunes. `tf.data.AUTOTUNE` is then what it starts
    with: 16 calls at a time, or as many as there are cores if these are fewer.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    with warnings.catch_warnings():
        # While a function is traced TensorFlow warns that options may differ.
        warnings.filterwarnings("ignore", "To make it possible to preserve")
        is_set = dataset.options().autotune.enabled is not None
    if is_set:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
