"""The models of the examples reach the metric of stock Keras.

Each test trains the model of an example twice on the same samples: with the
tables of the example, and with stock `Embedding` layers that the optimizer of
the model trains.
"""

import keras
import numpy as np
import pytest
from clicks import criteo, generating, scores
from clicks import model as clicks_model
from clicks.settings import Settings
from two_tower_data import generate

two_tower_model = pytest.importorskip("two_tower_model")


def stock_layer(rows, dim, *, num_shards, name, optimizer):
    """Returns a stock layer for the arguments of a `ShardedEmbedding`."""
    del num_shards, optimizer
    return keras.layers.Embedding(rows, dim, name=name)


def stock_tables(features, optimizer, *, name, vocabularies):
    """Returns stock layers for the arguments of a layer `TPUEmbedding`."""
    del optimizer, name
    assert vocabularies is None
    layers = {
        feature: keras.layers.Embedding(
            config.table.vocabulary_size,
            config.table.dim,
            embeddings_initializer=config.table.initializer,
        )
        for feature, config in features.items()
    }
    return lambda ids: {name: layers[name](ids[name]) for name in layers}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("model", ["ranking", "retrieval"])
def test_two_towers_reach_the_metric_of_stock_layers(model, monkeypatch):
    shop = generate(num_users=1500, num_items=300, views_per_user=8, seed=7)
    viewed = shop.held_out
    features = two_tower_model.features_of(shop, shop.training)

    def metric():
        keras.utils.set_random_seed(1)
        options = dict(steps=200, batch_size=256, seed=1)
        if model == "ranking":
            built = two_tower_model.build_ranking(shop, num_shards=2)
            labels = shop.training.purchases
            two_tower_model.train(built, features, labels, **options)
            found = two_tower_model.ranking_scores(
                shop, built, viewed.users, viewed.items
            )
            return scores.auc(viewed.purchases, found)
        counts = two_tower_model.item_counts(shop)[shop.training.items]
        shares = {"log_share": np.log(counts / counts.sum()).astype("f")}
        built, *towers = two_tower_model.build_retrieval(shop, num_shards=2)
        two_tower_model.train(built, features | shares, None, **options)
        best = two_tower_model.retrieve(shop, *towers, viewed.users, 20)
        return two_tower_model.recall(best, viewed.items, at=20)

    found = metric()
    monkeypatch.setattr(
        two_tower_model.tlm.layers, "ShardedEmbedding", stock_layer
    )
    assert found > metric() - 0.01


@pytest.mark.slow
@pytest.mark.exhaustive
def test_dlrm_reaches_the_metric_of_stock_layers(monkeypatch, tmp_path):
    path = tmp_path / "clicks.tsv"
    generating.generate(path, 8000, seed=3)
    clicks = criteo.look_through(path, 8000)
    settings = Settings(batch_size=128, dim=8)
    rows = clicks.table_rows(settings.max_rows)
    batches = criteo.training_batches(
        clicks, rows, settings.batch_size, first_epoch=0, epochs=2, seed=1
    )
    held_out = criteo.held_out_batches(clicks, rows, settings.batch_size)
    labels = np.concatenate([one for _, one in held_out.as_numpy_iterator()])

    def metric():
        keras.utils.set_random_seed(1)
        model = clicks_model.build_model(rows, settings)
        model.fit(batches, verbose=0)
        found = clicks_model.predict_probabilities(model, held_out)
        return scores.auc(labels[:, 0] if labels.ndim > 1 else labels, found)

    found = metric()
    monkeypatch.setattr(clicks_model, "TPUEmbedding", stock_tables)
    assert found > metric() - 0.01
