"""Compares planned bytes with the bytes that a mesh allocates."""

import collections

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tests.planning import models

SIZES = {"batch": 2, "model": 2}


def llama():
    hub = pytest.importorskip("keras_hub", exc_type=ImportError)
    backbone = hub.models.LlamaBackbone(
        vocabulary_size=models.VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
        num_key_value_heads=2,
    )
    return models.with_head(backbone)


# A model, its optimizer, and the budget as a multiple of the smallest possible
# bytes per device. None shards each weight that a step does not gather.
CASES = {
    "encoder": (models.transformer, "adam", None),
    "encoder, small": (models.transformer, "adam", 1.02),
    "decoder": (llama, "lion", None),
    "grouped queries": (
        lambda: models.transformer(kv_heads=2, is_gated=True),
        "adafactor",
        None,
    ),
    "images": (models.images, "rmsprop", None),
    "recurrent": (models.recurrent, "rmsprop", None),
    "experts": (models.mixture, "adamw", 1.02),
    "patches": (models.vision_transformer, "ftrl", None),
    "mixer": (models.Mixer, "adadelta", None),
    "recommender": (models.recommender, "adagrad", None),
    "odd": (models.odd, "nadam", None),
}


def resident_bytes(model):
    """Returns the bytes of all variables on each device of the mesh."""
    found = collections.Counter()
    variables = [*model.variables, *model.optimizer.variables]
    metrics = {id(v) for v in model.metrics_variables}
    for variable in {id(v): v for v in variables}.values():
        if id(variable) in metrics:
            continue
        value = variable.value.read_value()
        for device, shard in enumerate(tf.experimental.dtensor.unpack(value)):
            found[device] += shard.numpy().nbytes
    return [found[device] for device in range(len(found))]


# Compiling the steps of the larger models takes more than two seconds.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_predicted_bytes_are_on_the_mesh(name):
    make, optimizer, factor = CASES[name]
    memory = factor and int(
        models.fewest_bytes(make(), SIZES, optimizer) * factor
    )
    with tlm.layout_map_scope(
        "auto",
        mesh=mesh_of(**SIZES),
        memory=memory,
        optimizer=optimizer,
        batch_size=models.SAMPLES,
    ) as used:
        model = models.compiled(make(), optimizer)
    explanation = used.explain(model)
    assert explanation.ok
    # No axis divides a dimension of the weights of the last model.
    is_sharded = any(any(v.axes) for v in explanation.variables)
    assert is_sharded == (name != "odd")
    models.losses(model)
    planned = used.plan.solution.memory()[0]
    predicted = sum(
        planned.get(part, 0)
        for part in ("weights", "slot variables", "other variables")
    )
    assert resident_bytes(model) == pytest.approx([predicted] * 4, rel=0.01)
