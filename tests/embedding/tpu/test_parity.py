"""Our graphs under TPUStrategy are those of TensorFlow's class.

Names aside, operation by operation: attributes, devices, what each reads and
what it waits for. One thing is tolerated:

* `id_checks`: outside of strategy.run our `enqueue` waits for a check of the
  ids on the host. TensorFlow's leaves a bad id to the TPU, which does not say
  what it does with it.

What TensorFlow's class takes and ours refuses, or the other way, is in
test_refusals.py.
"""

import dataclasses

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import covering
from tests.embedding.tpu import canonical, cases, programs
from tf_layoutmap.embedding.tpu import batches

tpu = tf.tpu.experimental.embedding
CASES = list(dict.fromkeys([*cases.named_cases(), *cases.drawn_cases(40)]))


def test_there_are_many_cases():
    assert len(CASES) >= 100


def settings_of(case):
    """Returns the settings whose pairs must occur in `make test`."""
    settings = dataclasses.asdict(case)
    settings["inputs"] = case.inputs[0]
    settings["num_rows"] = case.num_rows == cases.Case().num_rows
    for name in ("combiners", "optimizers"):
        settings[f"first of {name}"], _ = settings.pop(name)
    return list(settings.values())


def marked_cases():
    pairwise = covering.covering([settings_of(case) for case in CASES], 2)
    for index, case in enumerate(CASES):
        is_selected = index in pairwise
        yield pytest.param(
            case, marks=[] if is_selected else [pytest.mark.exhaustive]
        )


@pytest.mark.parametrize("case", list(marked_cases()), ids=str)
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
