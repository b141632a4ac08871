"""Parts of the program `examples/dlrm.py`."""
