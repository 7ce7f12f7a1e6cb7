"""Pools of earlier texts, one for each client key, with which a key's next rows begin."""

from collections import OrderedDict

from decoding.interfaces import Pool, PoolKeeper

MOST_KEYS = 64  # pools that are kept; the one that was used the longest ago is dropped


class Pools:
    """The pools of a drafter. No key ever sees the pool of another one."""

    def __init__(self, drafter: PoolKeeper, most_tokens: int) -> None:
        """Start without pools. most_tokens: what a pool remembers at most."""
        self._drafter, self._most = drafter, most_tokens
        self._pool_of: OrderedDict[str, Pool] = OrderedDict()

    def of(self, key: str) -> Pool:
        """Return the pool of a key."""
        pool = self._pool_of.get(key)
        if pool is None:
            pool = self._pool_of[key] = self._drafter.new_pool(self._most)
        self._pool_of.move_to_end(key)
        if len(self._pool_of) > MOST_KEYS:
            self._pool_of.popitem(last=False)
        return pool
