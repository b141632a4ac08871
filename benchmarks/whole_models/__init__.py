"""Training steps of whole models."""
