"""The command ``ckpt-engine``: one module per subcommand, each with ``add_parser`` and ``run``; see :mod:`.main`."""
