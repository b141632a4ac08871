"""Tests a delta writer of embeddings with equal table names and shapes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.deltas import cases
from tf_layoutmap.deltas import watched
from tf_layoutmap.deltas.served import chain

CLASSES = {
    "keras3": (keras, tlm.layers.ShardedEmbedding),
    "tf_keras": (tf_keras, tlm.layers.tf_keras.ShardedEmbedding),
}


def two_layers(library="keras3"):
    """Returns a model and its two layers with equal vocabularies."""
    which, layer = CLASSES[library]
    layers = [
        layer(
            tlm.vocabulary.OpenVocabulary(64), 2, optimizer="adagrad", name=name
        )
        for name in ("words", "authors")
    ]
    ids = which.Input([2], dtype="int64")
    found = which.layers.Concatenate()(
        [layers[0](ids[:, :1]), layers[1](ids[:, 1:])]
    )
    model = which.Model(
        ids, which.layers.Dense(1)(which.layers.Flatten()(found))
    )
    model.compile("sgd", "mse")
    return model, layers


def fit(model, first):
    """Trains three steps; one layer receives more keys than it has rows."""
    ids = np.stack(
        [
            np.arange(first, first + 24),
            np.arange(first, first + 24) // 3 + 1000,
        ],
        axis=1,
    )
    model.fit(ids, np.ones([24, 1]), batch_size=8, verbose=0)


def check(checkpoint, layers, base, directory, tmp_path):
    """Checks that base and deltas equal a checkpoint of both layers."""
    wanted = cases.tensors(checkpoint.save(str(tmp_path / "wanted")))
    full = tlm.deltas.apply(base, directory, tmp_path / "full")
    found = cases.tensors(full)
    assert found.keys() == wanted.keys()
    own = [name for name in wanted if "/_variables/embeddings/" in name]
    assert len(own) == 2 * len(layers[0].embedding._variables["embeddings"])
    for name in own:
        assert found[name] == wanted[name], name
    return full


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", CLASSES)
def test_both_layers_are_in_each_delta(library, tmp_path):
    model, layers = two_layers(library)
    fit(model, 0)
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(
        layers, tmp_path / "deltas", base=base, root=checkpoint
    )
    for first in (24, 48, 72):
        fit(model, first)
        found = writer.write().meta
        assert {
            name: (one["num_rows"], one["table"])
            for name, one in found.tables.items()
        } == {"words": (24, "embeddings"), "authors": (8, "embeddings")}
        check(checkpoint, layers, base, tmp_path / "deltas", tmp_path)
    assert layers[0].vocabulary.stats()["num_evicted"] > 0
    assert layers[1].vocabulary.stats()["num_evicted"] == 0
    # The restarted process passes its layers in reverse order.
    again, others = two_layers(library)
    copy = tf.train.Checkpoint(model=again)
    copy.restore(tlm.deltas.apply(base, tmp_path / "deltas"))
    writer = tlm.deltas.DeltaWriter(
        others[::-1], tmp_path / "deltas", base=base, root=copy
    )
    fit(again, 96)
    assert (
        sum(one["num_rows"] for one in writer.write().meta.tables.values())
        == 32
    )
    check(copy, others, base, tmp_path / "deltas", tmp_path)


def test_deltas_of_one_of_two_layers_require_root(tmp_path):
    model, layers = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    with pytest.raises(ValueError, match="several times; .* argument `root`"):
        tlm.deltas.DeltaWriter(layers[0], tmp_path / "one", base=base)
    with pytest.raises(ValueError, match="do not belong to `root`"):
        tlm.deltas.DeltaWriter(
            layers[0],
            tmp_path / "one",
            base=base,
            root=tf.train.Checkpoint(model=two_layers()[0]),
        )
    with pytest.warns(UserWarning, match="do not contain 2 weights.*/bias"):
        writer = tlm.deltas.DeltaWriter(
            layers[1],
            tmp_path / "one",
            base=base,
            root=checkpoint,
            weights="tables",
        )
    fit(model, 0)
    assert writer.write().meta.tables["authors"]["num_rows"] == 8
    before = cases.tensors(base)
    wanted = cases.tensors(checkpoint.save(str(tmp_path / "wanted")))
    found = cases.tensors(
        tlm.deltas.apply(base, tmp_path / "one", tmp_path / "full")
    )
    assert found != before
    prefix = writer.deltas[0].meta.prefix
    for name, value in found.items():
        is_own = name.startswith(prefix + "_variables/")
        assert value == (wanted if is_own else before)[name], name


def test_tables_of_a_model_have_the_names_of_their_layers(tmp_path):
    model, layers = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(
        model, tmp_path / "deltas", base=base, root=checkpoint
    )
    fit(model, 0)
    found = writer.write().meta
    assert {name: one["num_rows"] for name, one in found.tables.items()} == {
        "words": 24,
        "authors": 8,
    }
    assert [found.in_base(name)[1] for name in found.tables] == [
        "embeddings"
    ] * 2
    check(checkpoint, layers, base, tmp_path / "deltas", tmp_path)


def test_a_restart_with_other_layer_names_keeps_the_names_of_tables(tmp_path):
    model, layers = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    tlm.deltas.DeltaWriter(
        layers, tmp_path / "deltas", base=base, root=checkpoint
    ).write()
    for layer, name in zip(layers, ("a", "b")):
        layer._name = name
    writer = tlm.deltas.DeltaWriter(
        layers, tmp_path / "deltas", base=base, root=checkpoint
    )
    fit(model, 0)
    assert writer.write().meta.tables.keys() == {"words", "authors"}
    check(checkpoint, layers, base, tmp_path / "deltas", tmp_path)


def test_deltas_of_another_table_with_the_same_name_raise(tmp_path):
    model, layers = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    tlm.deltas.DeltaWriter(
        layers[0],
        tmp_path / "deltas",
        base=base,
        root=checkpoint,
        weights="tables",
    ).write()
    layers[1]._name = "words"
    with pytest.raises(ValueError, match="must be of the same tables"):
        tlm.deltas.DeltaWriter(
            layers[1],
            tmp_path / "deltas",
            base=base,
            root=checkpoint,
            weights="tables",
        )


def test_equal_table_names_are_distinguished():
    words = {"words": ("words", "")}
    assert watched.labels_of(
        ["a/", "b/", "c/"],
        [{**words, "kinds": ("kinds", "")}, words, {"words": ("words", "x")}],
        None,
    ) == {
        ("a/", "words"): "a/words",
        ("a/", "kinds"): "kinds",
        ("b/", "words"): "b/words",
        ("c/", "words"): "x/words",
    }
    # The layer of the second table is named like the prefix of the first one.
    assert set(
        watched.labels_of(
            ["a/", "b/", "c/"],
            [words, {"words": ("words", "a")}, {"a/words": ("a/words", "")}],
            None,
        ).values()
    ) == {"a/words", "b/words", "c/a/words"}


def test_escaped_names_in_a_base_are_resolved(tmp_path):
    model, layers = two_layers()
    holder = tf.train.Checkpoint()
    holder.a = tf.train.Checkpoint()
    tables = {"x/y": layers[0].embedding, "a.S": layers[1].embedding}
    holder.a.tables = tables
    base = holder.save(str(tmp_path / "base"))
    del model
    prefixes = []
    for name, one in tables.items():
        writer = tlm.deltas.DeltaWriter(
            one, tmp_path / name.replace("/", "_"), base=base, root=holder
        )
        prefixes.append(writer.write().meta.prefix)
    assert prefixes == ["a/tables/x.Sy/", "a/tables/a..S/"]


def test_invalid_lists_of_embeddings_raise(tmp_path):
    model, layers = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    with pytest.raises(ValueError, match="a list without duplicates"):
        tlm.deltas.DeltaWriter(
            [layers[0], layers[0].embedding], tmp_path, base=base
        )
    with pytest.raises(ValueError, match="at least one embedding"):
        tlm.deltas.DeltaWriter([], tmp_path, base=base)
    with pytest.raises(TypeError, match="or a list of these objects"):
        tlm.deltas.DeltaWriter(
            [layers[0], model.layers[-1]], tmp_path, base=base
        )
    tlm.deltas.DeltaWriter(layers, tmp_path, base=base, root=checkpoint).write()
    with pytest.raises(ValueError, match="must be of the same tables"):
        tlm.deltas.DeltaWriter(layers[0], tmp_path, base=base, root=checkpoint)


def test_rows_of_a_partly_failed_delta_are_in_the_next(tmp_path, monkeypatch):
    model, layers = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    base = checkpoint.save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(
        layers, tmp_path / "deltas", base=base, root=checkpoint
    )
    fit(model, 0)
    with monkeypatch.context() as patched:

        def fail(also):
            raise RuntimeError("not now")

        patched.setattr(writer._watched._parts[1][1], "take", fail)
        with pytest.raises(RuntimeError, match="not now"):
            writer.write()
    found = writer.write().meta
    assert [one["num_rows"] for one in found.tables.values()] == [24, 8]
    check(checkpoint, layers, base, tmp_path / "deltas", tmp_path)


def test_a_delta_of_several_embeddings_has_the_name_of_each_table():
    table = {"num_rows": 0, "variables": []}
    one = chain.Meta(1, "", "x/", "", {"words": table}, {})
    several = chain.Meta(
        1,
        "",
        "",
        "",
        {"x/words": {**table, "table": "words", "prefix": "x/"}},
        {},
    )
    assert one.in_base("words") == several.in_base("x/words") == ("x/", "words")
    assert chain.meta_from_json(several.to_json(), "") == several
