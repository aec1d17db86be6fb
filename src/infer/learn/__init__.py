"""Exercises for docs/learn: a student writes one part of an engine, and the real engine runs it.

    infer learn                      lists the twelve lessons
    infer learn start 4 blocks.py    writes a file to begin with
    infer learn check 4 blocks.py    explains the first fault in it

Each lesson is a module with TITLE, STARTER (the file to begin with) and `check`, which raises `Wrong`. If the
part can be plugged into the engine (a policy, an allocator, a proposer), the engine serves requests with it;
otherwise it is compared with what the engine computes.
"""
