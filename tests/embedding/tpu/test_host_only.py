"""Host-engine options raise an error that names them under TPUStrategy."""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.tpu import traced_tpu

tpu = tf.tpu.experimental.embedding


def embedding_of(optimizer, **options):
    with traced_tpu.strategy_of(1).scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(tpu.TableConfig(4, 2, name="words")),
            optimizer,
            **options,
        )


@pytest.mark.parametrize("kind", ["RowwiseAdagrad", "LAMB"])
def test_an_optimizer_of_the_host_engine_raises(kind):
    with pytest.raises(ValueError, match=f"{kind} is an optimizer of the host"):
        embedding_of(getattr(tlm.optimizers, kind)(0.1))


def test_16_bit_tables_raise():
    with pytest.raises(ValueError, match="float32 under TPUStrategy.*'words'"):
        embedding_of(tpu.SGD(0.1), table_dtypes="bfloat16")
