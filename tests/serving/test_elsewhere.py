"""Exported models can be served in processes without tf_layoutmap."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import forked_process
from tests.serving import served as helpers

ASK = """
import sys
sys.modules["tf_layoutmap"] = None
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["serving_default"](ids=tf.constant([[3, 0], [7, 7]]))
np.save(sys.argv[2], found["output_0"].numpy())
# As TensorFlow Serving restores it: by the operations of the graph.
with tf.compat.v1.Session(graph=tf.Graph()) as session:
    graph = tf.compat.v1.saved_model.load(session, ["serve"], sys.argv[1])
    signature = graph.signature_def["serving_default"]
    np.save(sys.argv[3], session.run(
        signature.outputs["output_0"].name,
        {signature.inputs["ids"].name: [[3, 0], [7, 7]]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int4"])
def test_a_process_without_this_package_returns_the_same_results(
    kind, tmp_path
):
    ids = keras.Input([2], dtype="int32", name="ids")
    rows = tlm.layers.ShardedEmbedding(
        8, 5, num_shards=2, optimizer="adagrad", name="words"
    )(ids)
    model = keras.Model(ids, keras.layers.Dense(3)(rows))
    report, here = helpers.export(model, tmp_path, kind)
    wanted = here.serve(tf.constant([[3, 0], [7, 7]]))
    files = [str(tmp_path / name) for name in ("loaded.npy", "session.npy")]
    forked_process.run_code(ASK, str(report.path), *files)
    for file in files:
        np.testing.assert_array_equal(np.load(file), wanted)
    slack = 5 * report.tables[0].largest_error * 2
    np.testing.assert_allclose(
        wanted, model(np.array([[3, 0], [7, 7]])), atol=1e-6 + slack
    )
