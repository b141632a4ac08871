"""Modules of the program `examples/next_identifier.py`."""
