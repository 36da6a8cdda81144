"""The policies in plain Python, and the best that any could do: written to be read, not to be fast.

A policy is told of a use of a key (`use`: the first one lets it in), of keys that leave, and chooses victims that are not
pinned. `ordered` lists its keys; `ranks`, `uses` and `ghosts` are what else its choices depend on.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Lru:
    """The least recently used goes first."""

    only_order = False  # whether the numbers that `ranks` gives mean nothing but their order

    def __init__(self, capacity: int) -> None:
        self.keys: OrderedDict[int, int] = OrderedDict()

    def grow(self, capacity: int) -> None:
        pass

    def use(self, key: int) -> None:
        self.keys[key] = 0
        self.keys.move_to_end(key)

    def leave(self, key: int) -> None:
        del self.keys[key]

    def choose(self, pinned: set[int]) -> int:
        victim = next(key for key in self.keys if key not in pinned)
        self.leave(victim)
        return victim

    def back(self, key: int) -> None:
        """A key that has no slot gets one, victims having left."""

    def ordered(self) -> list[int]:
        return list(self.keys)

    def ranks(self) -> list[int]:
        return [0] * len(self.keys)

    def uses(self) -> list[int]:
        return [0] * len(self.keys)

    def ghosts(self) -> list[int]:
        return []


class Lfu(Lru):
    """The lowest priority goes first: uses while resident, 63 at most, plus the age at the last use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)  # in order of use; the values are uses
        self.age = 0
        self.priority: dict[int, int] = {}

    def use(self, key: int) -> None:
        self.keys[key] = min(self.keys.get(key, 0) + 1, 63)
        self.keys.move_to_end(key)
        self.priority[key] = self.age + self.keys[key]

    def leave(self, key: int) -> None:
        super().leave(key)
        del self.priority[key]

    def choose(self, pinned: set[int]) -> int:
        self.age = min(self.priority.values())
        victim = next(key for key in self.ordered() if key not in pinned)
        self.leave(victim)
        return victim

    def ordered(self) -> list[int]:
        return sorted(self.keys, key=self.priority.__getitem__)  # stable: ties in order of use

    def ranks(self) -> list[int]:
        return [self.priority[key] for key in self.ordered()]

    def uses(self) -> list[int]:
        return [self.keys[key] for key in self.ordered()]


class S3Fifo:
    """A small queue for newcomers, a main queue for keys that proved themselves, and the keys that left the small one."""

    only_order = False

    def __init__(self, capacity: int) -> None:
        self.small: OrderedDict[int, int] = OrderedDict()  # key -> uses since it came, 3 at most
        self.main: OrderedDict[int, int] = OrderedDict()
        self.gone: list[int | None] = []  # who left the small queue, in order; None: is back
        self.known: set[int] = set()  # keys that a batch lets in straight to the main queue
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        self.share = max(1, capacity // 10)
        self.span = max(1, capacity - self.share)

    def use(self, key: int) -> None:
        for queue in (self.small, self.main):
            if key in queue:
                queue[key] = min(queue[key] + 1, 3)
                return
        (self.main if key in self.known else self.small)[key] = 0
        self.known.discard(key)

    def leave(self, key: int) -> None:
        (self.small if key in self.small else self.main).pop(key)

    def choose(self, pinned: set[int]) -> int:
        while True:
            small = [key for key in self.small if key not in pinned]
            main = [key for key in self.main if key not in pinned]
            if small and (len(self.small) >= self.share or not main):
                if self.small.pop(small[0]) >= 2:
                    self.main[small[0]] = 0
                else:
                    self.gone = [*self.gone, small[0]][-self.span :]
                    return small[0]
            else:
                uses = self.main.pop(main[0])
                if uses == 0:
                    return main[0]
                self.main[main[0]] = uses - 1

    def back(self, key: int) -> None:
        if key in self.gone:
            self.gone[self.gone.index(key)] = None
            self.known.add(key)

    def ordered(self) -> list[int]:
        return [*self.small, *self.main]

    def ranks(self) -> list[int]:
        return [0] * len(self.small) + [1] * len(self.main)

    def uses(self) -> list[int]:
        return [*self.small.values(), *self.main.values()]

    def ghosts(self) -> list[int]:
        return [key for key in self.gone if key is not None]


class LookAhead(Lru):
    """Who is not used in any batch to come goes first, in order of use; then who is used last of all."""

    only_order = True  # they count notices, and the planner has those of unfinished plans among them

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.notices: dict[int, list[int]] = {}  # number, rising -> distinct keys of a batch to come

    def notice(self, number: int, keys: Iterable[int]) -> None:
        self.notices[number] = list(dict.fromkeys(keys))

    def spend(self, number: int) -> None:
        """The batch is here, or will not come."""
        del self.notices[number]

    def next(self, key: int) -> tuple[int, int] | None:
        """Number of the first batch that uses the key, and the key's place there."""
        for number in sorted(self.notices):
            if key in self.notices[number]:
                return number, self.notices[number].index(key)
        return None

    def choose(self, pinned: set[int]) -> int:
        free = [key for key in self.keys if key not in pinned]
        unseen = [key for key in free if self.next(key) is None]
        victim = unseen[0] if unseen else max(free, key=self.next)  # type: ignore[arg-type]
        self.leave(victim)
        return victim

    def rank(self, key: int) -> int:
        use = self.next(key)
        if use is None:
            return 0
        after = sum(number > use[0] for number in self.notices)
        return (after + 1 << 32) - use[1]

    def ordered(self) -> list[int]:
        ranks = {key: self.rank(key) for key in self.keys}
        return sorted(self.keys, key=ranks.__getitem__)

    def ranks(self) -> list[int]:
        return [self.rank(key) for key in self.ordered()]


POLICIES = {"lru": Lru, "lfu": Lfu, "s3fifo": S3Fifo, "lookahead": LookAhead}


def hits_of(policy: str, keys: Iterable[int], capacity: int) -> int:
    """Hits of a trace, one access at a time."""
    model = POLICIES[policy](capacity)
    resident: set[int] = set()
    hits = 0
    for key in keys:
        if key in resident:
            hits += 1
        else:
            if len(resident) == capacity:
                resident.remove(model.choose(set()))
            model.back(key)
            resident.add(key)
        model.use(key)
    return hits


def hits_of_belady(keys: Sequence[int], capacity: int, window: int | None = None) -> int:
    """Hits of a cache that knows the next `window` accesses (None: all): who is used last of all goes first.

    Keys that are not used in the window are all as far; of those the least recently used goes first.
    """
    ahead: list[float] = [float("inf")] * len(keys)
    seen: dict[int, int] = {}
    for i in range(len(keys) - 1, -1, -1):
        ahead[i] = seen.get(keys[i], float("inf"))
        seen[keys[i]] = i
    resident: OrderedDict[int, float] = OrderedDict()  # key -> next use; in order of use
    hits = 0
    if window is None:  # next uses do not change with time: a heap finds the farthest
        heap: list[tuple[float, int]] = []
        for i, key in enumerate(keys):
            if key in resident:
                hits += 1
            elif len(resident) == capacity:
                while resident.get(heap[0][1]) != -heap[0][0]:  # that key was used since, or is gone
                    heapq.heappop(heap)
                del resident[heapq.heappop(heap)[1]]
            resident[key] = ahead[i]
            heapq.heappush(heap, (-ahead[i], key))
        return hits
    for i, key in enumerate(keys):
        if key in resident:
            hits += 1
        elif len(resident) == capacity:
            unseen = [k for k, at in resident.items() if at > i + window]
            del resident[unseen[0] if unseen else max(resident, key=resident.__getitem__)]
        resident[key] = ahead[i]
        resident.move_to_end(key)
    return hits
