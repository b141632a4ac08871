"""Keras 3 models on a mesh."""
