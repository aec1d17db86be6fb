"""Exercises for docs/learn: a student writes one part of an engine, and the real one runs it.

    infer learn                      the twelve lessons
    infer learn start 4 blocks.py    a file to begin with
    infer learn check 4 blocks.py    what is wrong with it first, in words

Each lesson is a module with TITLE, STARTER (the file to begin with) and `check`, which raises `Wrong`. Where
the engine has a place for the part (a policy, an allocator, a proposer), it is put there and the engine
serves requests with it; elsewhere it is compared with what the engine computes.
"""
