"""Benchmarks of open vocabularies: memory, speed and quality."""
