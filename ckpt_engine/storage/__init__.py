"""Bytes to disk: checksums, durable file-system steps, shard files, and the threads that write them.

Knows nothing of tensors, plans or ranks. Errors of the operating system leave ``fs`` as they are, and ``shard_file`` as
:class:`ckpt_engine.errors.StorageError`.
"""
