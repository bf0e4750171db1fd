"""Who has which page of the cache, and which slot: numbers that requests take and give back.  The standard library alone.

Pages of texts with equal beginnings are shared.  What a page holds is told by a chain: its tokens, and the page in front of it.  A
page that nobody uses any more keeps its contents until another text needs it; the one that was used least recently goes first, and
of one text the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Known = tuple[int, tuple[int, ...]]
"""What a page holds: the number of the beginning in front of it, and its tokens.  Equal only where all tokens are.  With none in
front the number is 0 or less, another one for every adapter."""


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
        numbers = [self._free.pop() for _ in range(count)]
        self._taken.update(numbers)
        return numbers

    def give_back(self, numbers: Iterable[int]) -> None:
        """Frees numbers.  Raises ValueError for one that nobody has."""
        for number in numbers:
            if number not in self._taken:
                raise ValueError(f"{number} is nobody's")
            self._taken.remove(number)
            self._free.append(number)


@dataclass(slots=True, eq=False)
class Beginning:
    """The beginning of a text, up to the end of `page`.  `number`: of no other beginning, ever.  `written`: whether the page holds
    its tokens already, or a call that is under way writes them."""

    number: int
    known: Known
    page: int
    written: bool = False


class Pages:
    """The pages 1 to `count` - 1, each with any number of users; 0 is nobody's.  Whoever shares a page never writes to it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._users: dict[int, int] = {}
        self._beginnings: dict[Known, Beginning] = {}
        self._written: dict[int, Beginning] = {}  # by page
        self._unused: dict[int, None] = {}  # pages that hold a beginning and have no user, the least recently used first
        self._last = 0

    @property
    def free(self) -> int:
        """Pages that nobody uses, whatever they hold."""
        return len(self._free) + len(self._unused)

    @property
    def taken(self) -> int:
        """Pages that somebody uses."""
        return len(self._users)

    def take(self, count: int) -> list[int]:
        """`count` pages for one user, who may write to them.  Raises ValueError where fewer are free, and takes none then."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} are free")
        pages = [self._free.pop() if self._free else self._evicted() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One user more for pages that hold beginnings."""
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self._unused.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less for the pages of a text, in its order.  Raises ValueError for one that nobody uses."""
        for page in reversed(pages):
            users = self._users.get(page, 0)
            if users == 0:
                raise ValueError(f"page {page} is nobody's")
            if users > 1:
                self._users[page] = users - 1
                continue
            del self._users[page]
            if page in self._written:
                self._unused[page] = None
            else:
                self._free.append(page)

    def beginnings(self, front: int, tokens: Sequence[int], page: int) -> list[Beginning]:
        """What is known of a text behind the beginning of number `front`: one for every `page` tokens of `tokens`, as far as there
        are any."""
        chain: list[Beginning] = []
        for at in range(0, len(tokens) - page + 1, page):
            known = self._beginnings.get((front, tuple(tokens[at : at + page])))
            if known is None:
                break
            chain.append(known)
            front = known.number
        return chain

    def begin(self, front: int, tokens: Sequence[int], page: int) -> tuple[int, Beginning | None]:
        """Tells that a call is about to write `tokens` to a page: the number of the beginning, and the beginning itself, for
        `written` or `forget`, where no other page holds it."""
        known = front, tuple(tokens)
        if known in self._beginnings:
            return self._beginnings[known].number, None
        self._last += 1
        fresh = self._beginnings[known] = Beginning(self._last, known, page)
        return fresh.number, fresh

    def written(self, beginning: Beginning) -> None:
        """The page holds its tokens, and its user has had it all the while."""
        beginning.written = True
        self._written[beginning.page] = beginning

    def forget(self, beginning: Beginning) -> None:
        """Nothing is known of the page any more."""
        del self._beginnings[beginning.known]

    def _evicted(self) -> int:
        page = next(iter(self._unused))
        del self._unused[page]
        self.forget(self._written.pop(page))
        return page


def pages_for(tokens: int, page: int) -> int:
    """How many pages of `page` tokens hold `tokens`."""
    return -(-tokens // page)
