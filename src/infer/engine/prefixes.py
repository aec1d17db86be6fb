"""The public view of an engine's prefix cache: hashes of the prefixes that it holds.

Each replica's engine reports additions to its prefix tree and evictions from it (`take_prefix_news`), so the
router knows which prefixes each replica has cached.
"""

from __future__ import annotations

from collections.abc import Mapping

from infer.cache.prefix_tree import chain_hashes
from infer.scheduling.request import Request


def prefix_hashes(request: Request, block_size: int, max_blocks: int) -> list[int]:
    """Return the hashes of a prompt's first whole blocks, the shortest first; each includes salt and adapter.

    Prefixes of an adapter match in no engine, where each load has a random salt (adapters.py).
    """
    salt = f"{request.adapter}\0{request.cache_salt}" if request.adapter else request.cache_salt
    return list(chain_hashes(request.prompt[: max_blocks * block_size], block_size, salt))


def update_prefixes(known: set[int], news: Mapping[int, bool]) -> None:
    """Apply the news of `take_prefix_news` to a set of cached prefixes."""
    for prefix, is_there in news.items():
        if is_there:
            known.add(prefix)
        else:
            known.discard(prefix)
