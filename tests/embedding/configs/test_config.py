"""Tests tf_layoutmap.embedding.configs.config: frozen specs of configs."""

import pytest
import tensorflow as tf

from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.configs import config

tpu = tf.tpu.experimental.embedding


def read(feature_config, optimizer=None):
    return config.read_feature_config(
        inputs.flatten_with_paths(feature_config), optimizer
    )


def table(name=None, **settings):
    return tpu.TableConfig(10, 4, name=name, **settings)


def test_tables_are_ordered_by_their_first_feature():
    ads, words = table("ads"), table("words")
    spec, configs = read(
        {
            "c": tpu.FeatureConfig(ads),
            "a": tpu.FeatureConfig(words),
            "b": tpu.FeatureConfig(ads),
        }
    )
    # tf.nest flattens a dict by sorted key.
    assert [one.name for one in spec.features] == ["a", "b", "c"]
    assert [one.name for one in spec.tables] == ["words", "ads"]
    assert [one.table for one in spec.features] == [0, 1, 1]
    assert configs == [words, ads]


def test_unnamed_tables_are_named_by_their_index():
    spec, _ = read(
        [
            tpu.FeatureConfig(table()),
            tpu.FeatureConfig(table("x")),
            tpu.FeatureConfig(table()),
        ]
    )
    assert [one.name for one in spec.tables] == ["table_0", "x", "table_2"]


def test_features_are_named_by_their_path():
    one = tpu.FeatureConfig(table("t"), name="own")
    spec, _ = read({"ads": [one, (one,)]})
    assert [f.name for f in spec.features] == ["ads/0", "ads/1/0"]
    assert read(one)[0].features[0].name == "own"
    assert read(tpu.FeatureConfig(table("t")))[0].features[0].name == "feature"


def test_config_objects_are_not_modified():
    nameless = table()
    feature = tpu.FeatureConfig(nameless)
    before = dict(vars(nameless)), dict(vars(feature))
    first, _ = read(feature, tpu.SGD(0.5))
    second, _ = read(feature, tpu.Adagrad(0.5))
    assert (vars(nameless), vars(feature)) == before
    assert first.tables[0].optimizer.name == "sgd"
    assert second.tables[0].optimizer.name == "adagrad"


def test_optimizer_of_a_table_overrides_the_default():
    spec, _ = read(
        [
            tpu.FeatureConfig(table(optimizer=tpu.SGD(0.5))),
            tpu.FeatureConfig(table()),
        ],
        tpu.Adagrad(0.25),
    )
    assert [one.optimizer.name for one in spec.tables] == ["sgd", "adagrad"]


def test_duplicate_table_names_raise():
    with pytest.raises(ValueError, match="Multiple tables with name 'x'"):
        read([tpu.FeatureConfig(table("x")), tpu.FeatureConfig(table("x"))])


def test_default_name_used_by_another_table_raises():
    with pytest.raises(ValueError, match="Multiple tables with name 'table_0'"):
        read([tpu.FeatureConfig(table()), tpu.FeatureConfig(table("table_0"))])


@pytest.mark.parametrize("empty", [[], {}, (), {"a": []}])
def test_config_without_features_raises(empty):
    with pytest.raises(ValueError, match="at least one FeatureConfig"):
        read(empty)


def test_table_in_place_of_a_feature_raises_with_its_path():
    with pytest.raises(TypeError, match=r"TableConfig.*path 'a/0'"):
        read({"a": [table("x")]})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"layout": "somewhere"}, "layout"),
        ({"dtype": tf.int32}, "float32"),
    ],
)
def test_unsupported_table_settings_raise(setting, words):
    with pytest.raises(ValueError, match=rf"{words}.*\(table 'x'\)"):
        read(tpu.FeatureConfig(table("x", **setting)))


def test_custom_combiner_raises():
    one = table("x")
    one.combiner = object()
    with pytest.raises(ValueError, match="combiner"):
        read(tpu.FeatureConfig(one))


def test_output_shape_overrides_max_sequence_length():
    spec, _ = read(
        tpu.FeatureConfig(
            table("x"),
            output_shape=[None, 3],
            max_sequence_length=5,
            validate_weights_and_indices=False,
        )
    )
    assert spec.features[0] == config.FeatureSpec(
        "feature", 0, 0, (None, 3), False
    )


@pytest.mark.parametrize("shape", [[], [2, None], [2, 0]])
def test_incomplete_output_shape_raises(shape):
    with pytest.raises(ValueError, match="output_shape"):
        read(tpu.FeatureConfig(table("x"), output_shape=shape))


def test_quantization_is_read():
    spec, _ = read(
        tpu.FeatureConfig(
            table("x", quantization_config=tpu.QuantizationConfig(4, -1, 0.5))
        )
    )
    assert spec.tables[0].quantization == config.QuantizationSpec(-1.0, 0.5, 4)


@pytest.mark.parametrize(
    "settings",
    [
        (4, 1.0, 1.0),
        (4, 0.0, float("inf")),
        (4, "0", 1.0),
        (2**24, 0.0, 1.0),
        (2.5, 0.0, 1.0),
        (256, 0.0, 1e-37),
    ],
)
def test_invalid_quantization_raises(settings):
    with pytest.raises(ValueError, match=r"QuantizationConfig.*'x'"):
        read(
            tpu.FeatureConfig(
                table(
                    "x", quantization_config=tpu.QuantizationConfig(*settings)
                )
            )
        )
