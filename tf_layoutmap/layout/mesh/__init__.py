"""Tensors on a DTensor mesh: layouts, transfer, batches. Knows no Keras."""
