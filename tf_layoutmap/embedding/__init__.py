"""The Cloud TPU embedding API, with an engine of its own off the TPU."""
