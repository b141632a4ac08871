"""Errors for tables that differ from the tables of a checkpoint."""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.ps import checkpoints

config = tf.tpu.experimental.embedding


def objects(rows=20, optimizer=None, name="words", is_open=False):
    table = config.TableConfig(
        rows, 4, name=name, optimizer=optimizer or config.Adagrad(0.1)
    )
    embedding = tlm.TPUEmbedding(
        config.FeatureConfig(table),
        None,
        vocabularies={name: tlm.vocabulary.OpenVocabulary(rows)}
        if is_open
        else None,
    )
    embedding.build()
    return tf.train.Checkpoint(embedding=embedding)


@pytest.mark.parametrize(
    ("saved", "changes", "words"),
    [
        (
            {},
            {"rows": 30},
            r"'embedding/words/parameters' has shape \[30, 4\], and \[20, 4\]",
        ),
        (
            {},
            {"optimizer": config.SGD(0.1)},
            r"completely or in part \('embedding/words/accumulators'\)",
        ),
        ({}, {"name": "other"}, "'embedding/words/parameters'"),
        (
            {"is_open": True},
            {"rows": 200},
            "'embedding/words/vocabulary_keys' has shape",
        ),
    ],
)
def test_differences_are_named(saved, changes, words, tmp_path):
    prefix = objects(**saved).write(str(tmp_path / "variables"))
    with pytest.raises(ValueError, match=words) as raised:
        checkpoints.check_objects(
            prefix, objects(**{**saved, **changes}), False
        )
    assert "tlm.vocabulary.convert" in str(raised.value)


def test_variables_that_the_checkpoint_lacks_are_named(tmp_path):
    saved = objects(optimizer=config.SGD(0.1))
    prefix = saved.write(str(tmp_path / "variables"))
    found = checkpoints.not_restored(prefix, objects())
    assert (
        "the checkpoint lacks 'embedding/words/accumulators'. Tables" in found
    )
    assert checkpoints.not_restored(prefix, saved) == ""
