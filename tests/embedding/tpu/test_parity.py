"""Graphs under TPUStrategy match the graphs of TensorFlow's class.

Operations are compared by attributes, devices, inputs and control inputs;
names are ignored. One difference is allowed:

* `id_checks`: outside of strategy.run, `enqueue` checks the ids on the host
  first. TensorFlow's class passes an out-of-range id to the TPU, whose
  behavior is not documented.

test_refusals.py covers calls that only one of the two classes supports.
"""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.tpu import canonical, cases, programs
from tf_layoutmap.embedding.tpu import batches

tpu = tf.tpu.experimental.embedding
CASES = list(dict.fromkeys([*cases.named_cases(), *cases.drawn_cases(40)]))


def test_there_are_many_cases():
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graph_and_config_match_tensorflow(case):
    stock = programs.trace(case, tpu.TPUEmbedding)
    traced = programs.trace(case, tlm.TPUEmbedding)
    assert traced.embedding._state.backend.config_proto == (
        stock.embedding._config_proto.SerializeToString()
    )
    expected = canonical.operations(stock.graph)
    found = canonical.operations(traced.graph, batches.ID_CHECK_SCOPE)
    assert any("EnqueueTPU" in kind for kind, _ in expected) or (
        case.flow in ("loop", "cond")
    )
    assert found == expected
