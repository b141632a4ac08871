"""Readers of the data, and the features that the model gets."""
