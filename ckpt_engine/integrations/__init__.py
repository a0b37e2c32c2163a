"""Adapters to frameworks. Each imports its framework when it is used, not when ``ckpt_engine`` is imported."""
