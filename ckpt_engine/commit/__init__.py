"""How a save becomes a checkpoint: agreement between ranks, the records on disk, and the directory that holds them."""
