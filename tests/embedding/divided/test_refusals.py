"""What divided tables cannot do is refused before the processes meet."""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.embedding.divided import backend
from tf_layoutmap.embedding.spec import config, open_tables
from tf_layoutmap.vocabulary import open_vocabulary

tpu = tf.tpu.experimental.embedding


def made(**changed):
    feature = tpu.FeatureConfig(tpu.TableConfig(8, 2, name="words"))
    spec, _ = config.read_feature_config([("word", feature)], tpu.SGD(0.1))
    return backend.DividedBackend(
        [feature],
        changed.pop("spec", spec),
        None,
        **{
            "partitioner": None,
            "is_pipelined": False,
            "out_of_range": "error",
            "rounding_seed": 0,
            "order": "exact",
            **changed,
        },
    )


@pytest.mark.parametrize(
    "changed, kind, said",
    [
        (
            {"is_pipelined": True},
            NotImplementedError,
            "`pipeline_execution_with_tensor_core` must be False.*divided",
        ),
        (
            {"partitioner": tlm.partitioners.FixedShardsPartitioner(2)},
            ValueError,
            "`partitioner` must be None.*one shard of a table",
        ),
    ],
)
def test_arguments(changed, kind, said):
    with pytest.raises(kind, match=said):
        made(**changed)


def test_open_vocabularies():
    feature = tpu.FeatureConfig(tpu.TableConfig(8, 2, name="words"))
    spec, tables = config.read_feature_config([("word", feature)], tpu.SGD(0.1))
    spec = open_tables.with_vocabularies(
        spec,
        tables,
        {"words": tlm.OpenVocabulary(8)},
        open_vocabulary.OpenVocabulary,
        lambda *_, **__: None,
    )
    with pytest.raises(
        NotImplementedError, match=r"`vocabularies` must be None.*\['words'\]"
    ):
        made(spec=spec)
