"""`shard_embeddings` and `sharded_embeddings`: faster stock `Embedding`s."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tf_layoutmap.layers.base.embedding_report import EmbeddingReport
from tf_layoutmap.layers.base.stock_embeddings import Replacer, Settings


def _replacer(model, settings):
    from tf_layoutmap.layers.keras3.stock_embedding import Keras3Replacer
    return Keras3Replacer(settings)

def shard_embeddings(model, *, min_rows=50_000, optimizer="adagrad", num_shards=1, rules_by_row=False, is_dry_run=False):
    s = Settings(min_rows, optimizer, num_shards, rules_by_row)
    return _replacer(model, s).replace(model, is_dry_run=is_dry_run)
