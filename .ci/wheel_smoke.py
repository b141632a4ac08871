"""Checks that an installed wheel works. Run the script outside the checkout.

The script checks that the wheel contains all files, and that its libraries can
be loaded on this machine. It is short, because the tests check that the code is
correct.
"""

import importlib.metadata
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap._core import ops, requirements


def check_installed() -> None:
    package = pathlib.Path(tlm.__file__).parent
    assert package.parent.name == "site-packages", package
    strays = {"tests", "examples", "benchmarks", "cc"}
    top_level = {path.name for path in package.parent.iterdir()}
    assert not strays & top_level, strays & top_level
    # Type checkers use the annotations of a package only if the file py.typed
    # exists.
    assert (package / "py.typed").exists()
    end = requirements.local_version(requirements.minor(tf.__version__))
    assert importlib.metadata.version("tf_layoutmap") == tlm.__version__ + end


def check_one_op() -> None:
    ids = np.array([7, 0, 4, 0, 9])
    offsets = np.array([0, 4, 7, 10])
    shards, local_rows = ops.assign_partition(
        ids=ids, offsets=offsets, placement="div"
    )
    expected = np.searchsorted(offsets, ids, side="right") - 1
    np.testing.assert_array_equal(shards, expected)
    np.testing.assert_array_equal(local_rows, ids - offsets[expected])


def check_sharded_variable() -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    table = tlm.ShardedVariable([tf.Variable(rows[:3]), tf.Variable(rows[3:])])
    ids = np.array([4, 0, 4])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, ids), rows[ids])


def check_embedding_step() -> None:
    tpu = tf.tpu.experimental.embedding
    words = tpu.TableConfig(
        vocabulary_size=4,
        dim=2,
        initializer=tf.ones,
        combiner="sum",
        name="words",
    )
    embedding = tlm.TPUEmbedding(
        {"title": tpu.FeatureConfig(words)}, tpu.SGD(learning_rate=0.5)
    )
    embedding.enqueue({"title": tf.ragged.constant([[0, 2], [2]])})
    np.testing.assert_array_equal(
        embedding.dequeue()["title"], [[2, 2], [1, 1]]
    )
    embedding.apply_gradients({"title": tf.ones([2, 2])})
    # Row 2 occurs twice in the batch, so the update applies two gradients to
    # it.
    np.testing.assert_array_equal(
        embedding.embedding_tables[words], [[0.5, 0.5], [1, 1], [0, 0], [1, 1]]
    )


def check_emulation() -> None:
    """Checks the emulation library with TensorFlow's TPUEmbedding."""
    tpu = tf.tpu.experimental.embedding
    words = tpu.TableConfig(
        vocabulary_size=4,
        dim=2,
        initializer=tf.ones_initializer(),
        combiner="sum",
        name="words",
    )
    with tlm.emulation.enabled(num_cores=1) as strategy:
        with strategy.scope():
            embedding = tpu.TPUEmbedding(
                {"title": tpu.FeatureConfig(words)}, tpu.SGD(0.5)
            )

        @tf.function
        def look_up(ids):
            embedding.enqueue({"title": ids}, training=False)
            return strategy.run(embedding.dequeue)["title"]

        np.testing.assert_array_equal(
            look_up(tf.constant([0, 2])), [[1, 1], [1, 1]]
        )


def check_no_emulation() -> None:
    """Checks that tensorflow-tpu keeps its own kernels."""
    try:
        tlm.emulation.enable(num_cores=1)
    except RuntimeError as error:
        assert "a process with a TPU runtime" in str(error), error
    else:
        raise AssertionError("The emulation must raise an error.")


def main() -> None:
    check_installed()
    check_one_op()
    check_sharded_variable()
    check_embedding_step()
    if requirements.installed_version("tensorflow-tpu") is None:
        check_emulation()
    else:
        check_no_emulation()
    print(
        f"The wheel of tf_layoutmap {tlm.__version__} passed: TensorFlow "
        f"{tf.__version__}, Python {sys.version.split()[0]}."
    )


if __name__ == "__main__":
    main()
