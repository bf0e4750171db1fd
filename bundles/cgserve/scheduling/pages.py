"""Allocates pages and slots of the cache: numbers that requests take and give back.  Uses only the standard library.

Texts with equal beginnings share pages.  A page's contents are identified by its tokens and the page before it.  A page without
users keeps its contents until another text needs it.  The least recently used text is evicted first, beginning at its last page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Known = tuple[int, tuple[int, ...]]
"""Identifies the contents of a page: the number of the beginning before it, and its tokens.  So pages of texts with different
beginnings differ.  For the first page of a text the number is 0 or less, different for every adapter."""


class Pool:
    """The numbers 1 to `count` - 1, each with at most one owner; 0 is never allocated."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        """Returns `count` numbers.  Raises ValueError if fewer are free, and then takes none."""
        if count > len(self._free):
            raise ValueError(f"{count} numbers asked for, {len(self._free)} are free")
        numbers = [self._free.pop() for _ in range(count)]
        self._taken.update(numbers)
        return numbers

    def give_back(self, numbers: Iterable[int]) -> None:
        """Frees numbers.  Raises ValueError for one that is not allocated."""
        for number in numbers:
            if number not in self._taken:
                raise ValueError(f"{number} is not allocated")
            self._taken.remove(number)
            self._free.append(number)


@dataclass(slots=True, eq=False)
class Beginning:
    """The beginning of a text, up to the end of `page`.  `number`: unique, never reused.  `written`: whether the page already
    contains its tokens; else a running call writes them."""

    number: int
    known: Known
    page: int
    written: bool = False


class Pages:
    """The pages 1 to `count` - 1, each with any number of users; 0 is never allocated.  Users of a shared page do not write to
    it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._users: dict[int, int] = {}
        self._beginnings: dict[Known, Beginning] = {}
        self._written: dict[int, Beginning] = {}  # by page
        self._unused: dict[int, None] = {}  # pages with a beginning but without users, least recently used first
        self._last = 0

    @property
    def free(self) -> int:
        """The count of pages without users."""
        return len(self._free) + len(self._unused)

    @property
    def taken(self) -> int:
        """The count of pages with users."""
        return len(self._users)

    def take(self, count: int) -> list[int]:
        """Returns `count` pages for one user, who may write to them.  Raises ValueError if fewer are free, and then takes none."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} are free")
        pages = [self._free.pop() if self._free else self._evicted() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a user to pages that contain beginnings."""
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self._unused.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """Removes a user from the pages of a text, given in its order.  Raises ValueError for a page without users."""
        for page in reversed(pages):
            users = self._users.get(page, 0)
            if users == 0:
                raise ValueError(f"page {page} is not allocated")
            if users > 1:
                self._users[page] = users - 1
                continue
            del self._users[page]
            if page in self._written:
                self._unused[page] = None
            else:
                self._free.append(page)

    def beginnings(self, front: int, tokens: Sequence[int], page: int) -> list[Beginning]:
        """Returns the known beginnings of a text after the beginning with number `front`: one for every `page` tokens of `tokens`,
        up to the first unknown one."""
        chain: list[Beginning] = []
        for start in range(0, len(tokens) - page + 1, page):
            known = self._beginnings.get((front, tuple(tokens[start : start + page])))
            if known is None:
                break
            chain.append(known)
            front = known.number
        return chain

    def begin(self, front: int, tokens: Sequence[int], page: int) -> tuple[int, Beginning | None]:
        """Registers that a call will write `tokens` to a page.  Returns the number of the beginning, and the `Beginning` to pass to
        `written` or `forget`, or None if another page contains it."""
        known = front, tuple(tokens)
        if known in self._beginnings:
            return self._beginnings[known].number, None
        self._last += 1
        fresh = self._beginnings[known] = Beginning(self._last, known, page)
        return fresh.number, fresh

    def written(self, beginning: Beginning) -> None:
        """Marks the page as written.  Its user must have kept it since `begin`."""
        beginning.written = True
        self._written[beginning.page] = beginning

    def forget(self, beginning: Beginning) -> None:
        """Removes the page's contents from the known beginnings."""
        del self._beginnings[beginning.known]

    def _evicted(self) -> int:
        page = next(iter(self._unused))
        del self._unused[page]
        self.forget(self._written.pop(page))
        return page


def pages_for(tokens: int, page: int) -> int:
    """Returns how many pages of `page` tokens hold `tokens`."""
    return -(-tokens // page)
