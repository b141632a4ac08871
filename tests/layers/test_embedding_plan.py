"""`shard_embeddings` with a memory budget plans which layers are replaced."""

import keras
import pytest
import tf_keras

import tf_layoutmap as tlm
from tf_layoutmap.planning import search

# `make test` does not run each case with each version of Keras.
pytestmark = pytest.mark.covering(1)

VERSIONS = {"keras": keras, "tf_keras": tf_keras}


def model_of(version, small=1000):
    ids = version.Input([2], dtype="int64")
    outputs = [
        version.layers.Embedding(rows, 4, name=name)(ids)
        for name, rows in {"words": 200_000, "users": small}.items()
    ]
    return version.Model(ids, outputs)


@pytest.fixture(params=VERSIONS)
def version(request):
    return VERSIONS[request.param]


def sharded(model):
    return [
        name
        for name in ("words", "users")
        if hasattr(model.get_layer(name), "num_shards")
    ]


def test_only_layers_that_become_faster_are_replaced(version):
    model = model_of(version)
    model.compile("adam", "mse")
    report = tlm.layers.shard_embeddings(model, memory="1GiB", ids_per_step=8)
    assert report.plan.choices == {"words": "sharded", "users": "stock"}
    assert sharded(model) == ["words"]
    (kept,) = report.not_replaced
    assert "the plan keeps the stock layer" in kept.reason
    assert "'sharded', which takes" in report.plan.explain("users")


def test_layers_are_replaced_if_the_slot_variables_would_not_fit(version):
    # With Adam, the stock layers need 9.6 MB and 48 kB. With one slot
    # variable, they need 6.4 MB and 32 kB.
    model = model_of(version)
    model.compile("adam", "mse")
    options = {"optimizer": "adagrad", "ids_per_step": 8}
    report = tlm.layers.shard_embeddings(model, memory=6_432_000, **options)
    assert sharded(model) == ["words", "users"]
    assert report.plan.bytes_per_device == [6_432_000]
    model = model_of(version)
    model.compile("adam", "mse")
    with pytest.raises(search.PlanDoesNotFitError, match="1 bytes are missing"):
        tlm.layers.shard_embeddings(model, memory=6_431_999, **options)
    assert sharded(model) == []


def test_pins_select_layers(version):
    model = model_of(version)
    report = tlm.layers.shard_embeddings(
        model, memory="1GiB", pins={"words": "stock", "users": "sharded"}
    )
    assert sharded(model) == ["users"]
    assert report.plan.choices == {"words": "stock", "users": "sharded"}


def test_a_report_has_a_plan_without_a_budget(version):
    model = model_of(version, small=10)
    report = tlm.layers.shard_embeddings(model)
    assert report.plan.choices == {"words": "sharded", "users": "stock"}
    assert "fewer than min_rows" in report.plan.explain("users")
    assert report.plan.html()


def test_pins_require_memory(version):
    with pytest.raises(
        ValueError, match="`pins` must be None without `memory`"
    ):
        tlm.layers.shard_embeddings(model_of(version), pins={"words": "stock"})
