"""The public view of an engine's prefix cache: hashes of the prefixes that it holds.

An engine with replicas reports what its prefix tree gains and loses (`take_prefix_news`), so whoever
chooses between the replicas knows what each has, evictions included.
"""

from __future__ import annotations

from collections.abc import Mapping

from infer.cache.prefix_tree import chain_hashes
from infer.scheduling.request import Request


def prefix_hashes(request: Request, block_size: int, max_blocks: int) -> list[int]:
    """The hashes of a prompt's first whole blocks, the shortest first; salt and adapter are part of each.

    Prefixes of an adapter match no engine's: each load has a random salt there (adapters.py).
    """
    salt = f"{request.adapter}\0{request.cache_salt}" if request.adapter else request.cache_salt
    return list(chain_hashes(request.prompt[: max_blocks * block_size], block_size, salt))


def update_prefixes(known: set[int], news: Mapping[int, bool]) -> None:
    """Bring a set of cached prefixes up to date."""
    for prefix, is_there in news.items():
        if is_there:
            known.add(prefix)
        else:
            known.discard(prefix)
