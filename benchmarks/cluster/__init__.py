"""Benchmarks of training on parameter servers: speed and network traffic."""
