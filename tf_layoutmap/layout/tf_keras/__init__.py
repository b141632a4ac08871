"""tf_keras models on a mesh; imported when tf_keras is."""
