"""Makes the tables that the tests of this folder use."""

import numpy as np
import tensorflow as tf

from tf_layoutmap.sharded import ShardedVariable


def make_table(values, sizes, name="emb", **options):
    """A table of `values` cut into shards of `sizes` rows."""
    offsets = np.cumsum([0, *sizes])
    return ShardedVariable(
        [tf.Variable(values[start:stop], **options)
         for start, stop in zip(offsets, offsets[1:])], name=name)
