"""TensorFlow's TPU embedding without a TPU."""
