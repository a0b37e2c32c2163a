"""The engine against the other ways to save the same state: ``python -m benchmarks.save --help``."""
