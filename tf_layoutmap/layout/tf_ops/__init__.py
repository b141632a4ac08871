"""Operations that DTensor gets wrong, corrected where TensorFlow makes them."""
