"""Modules of the program `examples/dlrm.py`."""
