"""Reading checkpoints: opening a directory, filling tensors from it, and checking every byte of it."""
