"""Checkpoints whose tables are stacked for SparseCores.

TensorFlow's `TPUEmbeddingV2` saves tables in stacked variables. `layouts.py`
finds the rows of a table in a stacked variable, and `saved_tables.py` reads the
tables of a checkpoint. `conversion.py` writes checkpoints with other layouts,
and `restoring.py` restores such a checkpoint directly.
"""
