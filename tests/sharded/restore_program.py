"""Restores a table and prints the peak extra memory in MiB.

The program `python -m tests.sharded.restore_program CHECKPOINT OPTIONS` runs in
a separate process, because the reuse of memory that a process has freed before
is not measured.
"""

import json
import sys

import tensorflow as tf

from benchmarks import peak_memory
from tf_layoutmap.sharded import ShardedVariable

SHAPE = (1 << 17, 128)  # 64 MiB.


def make(value, **options):
    """Returns a table filled with `value`, created shard by shard."""
    return ShardedVariable.create(
        tf.constant_initializer(value), SHAPE, **options
    )


def main():
    path, options = sys.argv[1], json.loads(sys.argv[2])
    # A small restore initializes TensorFlow before the measurement.
    small = ShardedVariable.create(tf.ones([8, 4]), **options)
    tf.train.Checkpoint(table=small).read(
        tf.train.Checkpoint(table=small).write(path + "_small")
    )
    table = make(1.0, **options)
    extra = peak_memory.extra_bytes(
        lambda: tf.train.Checkpoint(table=table).read(path).assert_consumed()
    )
    for shard in table.variables:
        tf.debugging.assert_equal(shard, 3.0)
    print(extra / 2**20)


if __name__ == "__main__":
    main()
