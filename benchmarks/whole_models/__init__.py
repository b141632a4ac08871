"""Benchmarks of complete models and of large tables."""
