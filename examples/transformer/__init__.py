"""Modules of the program `examples/sharded_transformer.py`."""
