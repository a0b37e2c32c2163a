"""Where every byte of a shard file lies, known before one of them is written."""
