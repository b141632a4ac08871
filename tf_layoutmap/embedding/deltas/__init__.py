"""Delta checkpoints: files with the table rows that changed since a checkpoint.

`writer.py` defines `DeltaWriter`, and `apply.py` defines `apply_deltas`.
`chain.py` reads and checks the deltas in a directory. `base.py` reads the
checkpoint on which the deltas are based.
"""
