"""Calls of layers that become steps of an engine."""
