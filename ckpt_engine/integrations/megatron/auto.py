"""Importing this installs the engine into Megatron if the environment says ``CKPT_ENGINE=threads``; otherwise nothing happens.

For worker processes that others start: one line in a module that they import anyway. Settings come from
``CKPT_ENGINE_WRITERS`` and its like (:mod:`.flags`).
"""

from ckpt_engine.integrations.megatron import install_from_environment

install_from_environment()
