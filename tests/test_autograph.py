"""AutoGraph converts user functions, but not the functions of tables."""

import tensorflow as tf
from tensorflow.python.autograph.impl import conversion

import tf_layoutmap as tlm
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore


class Doubled(tlm.ShardedVariable):
    """A table with a method that requires AutoGraph."""

    def nonzero_row(self, row):
        rows = tf.gather(self, [row])
        if tf.reduce_sum(rows) == 0:
            rows = rows + 1.0
        return rows


def test_functions_of_tables_are_called_as_written():
    for one in (
        EmbeddingCore.call,
        tlm.ShardedVariable.scatter_add,
        tlm.TPUEmbedding.apply_gradients,
        tlm.TPUEmbedding,
    ):
        assert conversion.is_allowlisted(one), one


def test_a_method_of_a_subclass_is_converted():
    table = Doubled([tf.Variable([[0.0, 0.0]]), tf.Variable([[2.0, 3.0]])])
    assert not conversion.is_allowlisted(table.nonzero_row)
    read = tf.function(lambda row: table.nonzero_row(row))
    assert read(tf.constant(0)).numpy().tolist() == [[1.0, 1.0]]
    assert read(tf.constant(1)).numpy().tolist() == [[2.0, 3.0]]
