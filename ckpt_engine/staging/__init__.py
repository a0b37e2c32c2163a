"""Staging: host memory for snapshots, and how much of it the engine may take."""
