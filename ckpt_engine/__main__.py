"""``python -m ckpt_engine``: the same as the command ``ckpt-engine``."""

import sys

from ckpt_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
