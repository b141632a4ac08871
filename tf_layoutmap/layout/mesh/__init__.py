"""Tensors on a DTensor mesh: layouts, transfer, variables. Knows no Keras."""
