"""Our graphs under TPUStrategy are those of TensorFlow's class.

Names aside, operation by operation: attributes, devices, what each reads and
what it waits for. One thing is tolerated:

* `id_checks`: outside of strategy.run our `enqueue` waits for a check of the
  ids on the host. TensorFlow's leaves a bad id to the TPU, which does not say
  what it does with it.

What TensorFlow's class takes and ours refuses, or the other way, is in
test_refusals.py.
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
def test_graph_and_config_are_those_of_tensorflow(case):
    stock = programs.trace(case, tpu.TPUEmbedding)
    ours = programs.trace(case, tlm.TPUEmbedding)
    assert ours.embedding._state.backend.config_proto == (
        stock.embedding._config_proto.SerializeToString()
    )
    expected = canonical.operations(stock.graph)
    found = canonical.operations(ours.graph, batches.ID_CHECK_SCOPE)
    assert any("EnqueueTPU" in kind for kind, _ in expected) or (
        case.flow in ("loop", "cond")
    )
    assert found == expected
