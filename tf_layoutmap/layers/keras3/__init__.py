"""Layers of `tlm.layers` for Keras 3."""
