"""Runs a few third-party models and programs; `make real` runs all of them."""

import importlib.util

import pytest

from tests.real import sweep

pytestmark = pytest.mark.slow

FEW = [
    ("keras-hub, its own layout maps", "Gemma"),
    ("recommenders", "deepctr, DCN"),
    ("programs", "two_towers"),
    ("replaced embeddings", "keras.io, collaborative filtering"),
]
MORE = [
    ("keras.applications", "VGG16"),
    ("keras-hub, encoders of text", "XLNet"),
    ("keras-hub, images", "VGG"),
    ("tf_keras, layers", "Embedding"),
    ("recommenders", "tfrs, ranking"),
    ("programs", "vae"),
    ("replaced embeddings", "keras-hub, BERT"),
    ("replaced embeddings", "keras-rs, DLRM"),
    ("replaced embeddings, tf_keras", "deepctr, DCN"),
    ("replaced embeddings, tf_keras", "tfrs, retrieval"),
]

PACKAGES = {
    "tfrs": ["tensorflow_recommenders"],
    "deepctr": ["deepctr"],
    "keras-rs": ["keras_rs"],
    "keras-hub": ["keras_hub"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, name", [*FEW, *MORE])
def test_a_case_trains_on_a_mesh_as_without_a_mesh(kind, name):
    if "hub" in kind and importlib.util.find_spec("keras_hub") is None:
        pytest.skip("keras-hub is not installed; `make real` does that")
    for package in PACKAGES.get(name.partition(",")[0], ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make real` does that")
    result = sweep.run(kind, name, seconds=240)
    assert result.checks
    for check in result.checks:
        assert check.status == "trained", check


@pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None,
    reason="keras-hub is not installed",
)
def test_all_backbones_with_a_layout_map_have_a_case():
    from tests.real.hub import own_maps

    assert own_maps.missing() == []
