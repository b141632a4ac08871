"""Readers of the data, and the input features of the model."""
