"""A program with nine mistakes that a type checker must find.

Each line with a mistake ends with a comment that gives its kind. The program is
only read by pyright, see `test_types`. It must not be run.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
words = tpu.TableConfig(100, 8, name="words", combiner="sum")
features = {"title": tpu.FeatureConfig(words)}
mesh = tf.experimental.dtensor.create_mesh([("model", 2)])


def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.range(context.num_input_pipelines).repeat()


layout_map = tlm.LayoutMap(mesh=mesh)
layout_map["dense.*kernel"] = (None, "model")
with tlm.layout_map_scope(layout_map, batch_dim=0):  # Mistake: axis
    model = keras.Sequential([keras.layers.Dense(2)])
with layout_map.scope(batch_dim=None):
    model = keras.Sequential([keras.layers.Dense(2)])
explanation = layout_map.explain(model)
print(explanation.ok, explanation.bytes_per_device, explanation.problems())
print(explanation.bytes_per_devices)  # Mistake: attribute

halves = tlm.partitioners.FixedShardsPartitioner(num_shards=2)
small = tlm.partitioners.MaxSizePartitioner()  # Mistake: missing argument
table = tlm.ShardedVariable.create(np.zeros([4, 2]), num_shards=2)
table = tlm.ShardedVariable.create(tf.ones, [4, 2], partitioner=halves)
table = tlm.ShardedVariable.create(tf.ones, [4], num_shards="2")  # Mistake: int
rows = table.gather_rows([1, 2]) + table.assign_add(tf.ones([4, 2])).value()

embedding = tlm.TPUEmbedding(features, tpu.Adagrad(0.1), engine="host")
embedding = tlm.TPUEmbedding(features, "adagrad")  # Mistake: optimizer
embedding.enqueue({"title": tf.constant([1, 2])}, training=False)
loss = tf.reduce_sum(embedding.dequeue()["title"])

title = keras.Input([1], dtype="int64", name="title")
layer = tlm.layers.TPUEmbedding(features, tpu.SGD(0.1), out_of_range="drop")
layer = tlm.layers.TPUEmbedding(features, tabel_dtypes=None)  # Mistake: keyword
outputs = keras.layers.Flatten()(layer({"title": title})["title"])
lookup = tlm.layers.ShardedEmbedding(100, 8, optimizer="sgd", name="words")
lookup = tlm.layers.ShardedEmbedding(100, 8, masks_zero=1)  # Mistake: keyword
vectors = lookup(tf.constant([1, 2])).numpy()

report = tlm.export(embedding, "/tmp/m", row_format={"words": "int8"})
report = tlm.export(embedding, "/tmp/m", row_format="int2")  # Mistake: literal
strategy = tlm.ps.connect(timeout_seconds="2min")
run = tlm.ps.Run(strategy, print, dataset_fn, "/tmp/run", objects={"t": table})
run = tlm.ps.Run(strategy, print, dataset_fn, "/tmp/run")  # Mistake: objects
print(run.steps(10), report.path, vectors.shape, outputs, loss, rows)
