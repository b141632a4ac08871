"""Delta checkpoints: files with the table rows that changed since a checkpoint.

`writer.py` defines `DeltaWriter`, `apply.py` defines `apply_deltas`, and
`merge.py` defines `merge_deltas` and `prune_deltas`. `base.py` reads the
checkpoint on which the deltas are based. `served/chain.py` reads and
checks the deltas in a directory.
"""
