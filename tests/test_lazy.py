"""The package's public names appear when they are asked for."""

import subprocess
import sys

import pytest

import tf_layoutmap


def test_the_pure_floor_works_without_importing_tensorflow():
    subprocess.run(
        [sys.executable, "-c",
         "import sys, tf_layoutmap, tf_layoutmap.partition\n"
         "assert tf_layoutmap.partitioners.FixedShardsPartitioner(2)(\n"
         "    (4,), 'int8') == [2]\n"
         "assert 'tensorflow' not in sys.modules"], check=True)


def test_every_public_name_is_there():
    for name in tf_layoutmap.__all__:
        assert getattr(tf_layoutmap, name) is not None
        assert name in dir(tf_layoutmap)


def test_a_name_that_is_not_there_is_an_attribute_error_with_the_others():
    with pytest.raises(AttributeError, match="'Shard'.*ShardedVariable"):
        tf_layoutmap.Shard  # noqa: B018
