"""Graphs under TPUStrategy match the graphs of TensorFlow's class.

Operations are compared by attributes, devices, inputs and control inputs; names
are ignored. Only one difference is allowed:

* `id_checks`: outside of strategy.run, `enqueue` checks the ids on the host
  first. TensorFlow's class passes an out-of-range id to the TPU, whose
  behavior is not documented.

test_refusals.py covers calls that only one of the two classes supports.
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
    """Returns the settings of a case; `make test` covers each pair."""
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


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("case", list(marked_cases()), ids=str)
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
