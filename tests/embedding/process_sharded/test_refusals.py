"""Unsupported options of sharded tables raise errors immediately."""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.process_sharded import backend

tpu = tf.tpu.experimental.embedding


def create_backend(**changed):
    feature = tpu.FeatureConfig(tpu.TableConfig(8, 2, name="words"))
    spec, _ = config.read_feature_config([("word", feature)], tpu.SGD(0.1))
    return backend.ProcessShardedBackend(
        [feature],
        changed.pop("spec", spec),
        None,
        **{
            "partitioner": None,
            "is_pipelined": False,
            "out_of_range": "error",
            "rounding_seed": 0,
            "gradient_aggregation": "exact",
            **changed,
        },
    )


@pytest.mark.parametrize(
    "changed, kind, message",
    [
        (
            {"partitioner": tlm.partitioners.FixedShardsPartitioner(2)},
            ValueError,
            "`partitioner` must be None.*one shard of a table",
        ),
    ],
)
def test_unsupported_arguments_raise(changed, kind, message):
    with pytest.raises(kind, match=message):
        create_backend(**changed)
