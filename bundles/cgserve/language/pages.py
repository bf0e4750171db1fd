"""Who has which page of the cache, and which slot: numbers that requests take and give back.  The standard library alone."""

from __future__ import annotations


class Pool:
    """The numbers 1 to `count` - 1, each with one owner at most; 0 is nobody's and is never given out."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Numbers that nobody has."""
        return len(self._free)

    @property
    def taken(self) -> int:
        """Numbers that somebody has."""
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        """`count` numbers.  Raises ValueError where fewer are free, and takes none then."""
        if count > len(self._free):
            raise ValueError(f"{count} numbers asked for, {len(self._free)} are free")
        found = [self._free.pop() for _ in range(count)]
        self._taken.update(found)
        return found

    def give_back(self, numbers: list[int]) -> None:
        """Frees numbers.  Raises ValueError for one that nobody has."""
        for number in numbers:
            if number not in self._taken:
                raise ValueError(f"{number} is nobody's")
            self._taken.remove(number)
            self._free.append(number)


def pages_for(tokens: int, page: int) -> int:
    """How many pages of `page` tokens hold `tokens`."""
    return -(-tokens // page)
