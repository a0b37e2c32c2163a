"""Soak: a real trainer saves again and again where memory is short, and everything that could grow is looked at from outside.

    python -m tests.soak                      1,000 saves in a memory group, 300 under RLIMIT_AS, 200 under Ray, and the peers
    python -m tests.soak --short              the same, smaller, in two minutes
    python -m tests.soak --campaign cgroup --saves 200 --out DIR

===========  =========================================================================================================
campaign     the limit
===========  =========================================================================================================
``cgroup``   a memory group (v1 or v2) of model + budget + 10 %, shared with a neighbour that grows, shrinks and reads
``rlimit``   ``RLIMIT_AS`` of what is mapped + budget + 10 %; here the trainer itself maps and unmaps
``ray``      an actor in a container-like memory group, with the threshold of Ray's memory monitor where the limit was
``peers``    stock savers in the group of the first campaign, one after the other, for the table
===========  =========================================================================================================

The harness stays outside every limit and every group that it makes, ends only what it has started, and removes the groups.
Where root, control groups or a package are missing, a campaign is skipped, and says why.
"""
