"""Training state as named tensors and objects, and back."""
