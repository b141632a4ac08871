"""Benchmarks of the C++ core on table rows, without TensorFlow."""
