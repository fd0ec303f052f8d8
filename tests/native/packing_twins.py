"""Slow, simple twins of the packing kernels, in plain Python integers.

A plan is a list of ``(packs, {size: times})``; a list of packs is a list of lists of indices.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, floor

MASK = 2**64 - 1
ITEMS, PACKS, PATTERNS, ORDER = 1, 2, 3, 4


class Random:
    """SplitMix64."""

    def __init__(self, seed, stream):
        self.state = mix(seed) ^ mix(~stream & MASK)

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return mix(self.state)

    def below(self, bound):
        return self.next() * bound >> 64


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def shuffle(values, random):
    """Fisher-Yates from the end, two positions for each number."""
    i = len(values)
    while i > 2:
        bits = random.next()
        for j, half in ((i, bits >> 32), (i - 1, bits & 0xFFFFFFFF)):
            k = half * j >> 32
            values[j - 1], values[k] = values[k], values[j - 1]
        i -= 2
    if i == 2:
        k = random.below(2)
        values[1], values[k] = values[k], values[1]
    return values


def histogram(lengths, multiple):
    counts = Counter(-(-length // multiple) for length in lengths)
    sizes = sorted(counts)
    return sizes, [counts[s] for s in sizes], sum(lengths)


def lower_bound(sizes, counts, capacity, most):
    """Return the lower bounds, computed from their definitions as fractions of a pack."""

    def identity(x):
        return x

    def u(k):
        return lambda x: x if ((k + 1) * x).denominator == 1 else Fraction(floor((k + 1) * x), k)

    def cut(f, eps):
        return lambda x: 1 if x > 1 - eps else 0 if x < eps else f(x)

    def phi(eps):
        steps = floor(1 / eps)
        return lambda x: (
            1 - Fraction(floor((1 - x) / eps), steps) if x > Fraction(1, 2) else Fraction(int(x >= eps), steps)
        )

    def packs(f):
        values = ((f(Fraction(size, capacity)), count) for size, count in zip(sizes, counts, strict=True))
        return ceil(sum(value * count for value, count in values))

    functions = [identity, *(u(k) for k in range(1, 21))]
    best = max([ceil(Fraction(sum(counts), most)), *map(packs, functions)])
    for size in sizes:
        if 2 * size <= capacity:
            best = max([best, *(packs(cut(f, Fraction(size, capacity))) for f in functions)])
    for q in range(2, min(21, capacity)):
        best = max(best, packs(phi(Fraction(capacity // (q + 1) + 1, capacity))))
    return best


def fit_decreasing(sizes, counts, capacity, most, best):
    """Pack item by item, largest first, into the fullest pack with room, or into the first opened one.

    Best fit may choose any pack of equal free space: without a cap, this does not change the number of packs.
    """
    free, held = [], []
    for size, count in sorted(zip(sizes, counts, strict=True), reverse=True):
        for _ in range(count):
            fitting = [p for p in range(len(free)) if free[p] >= size and len(held[p]) < most]
            if fitting:
                p = min(fitting, key=lambda p: free[p]) if best else fitting[0]
            else:
                p = len(free)
                free.append(capacity)
                held.append([])
            free[p] -= size
            held[p].append(size)
    return held


def exact_fill(sizes, counts, capacity, most, *, average, seed):
    """Return patterns in the order in which they are found: (packs, sizes descending)."""
    left = dict(zip(sizes, counts, strict=True))
    random = Random(seed, PATTERNS)
    few_classes = len(sizes) < 1000
    plan = []
    while any(left.values()):
        pattern = _Pattern(left, capacity, most, random)
        pattern.fill(average)
        used = Counter(pattern.picked)
        packs = min(left[s] // times for s, times in used.items())
        if few_classes:
            packs = (packs + 1) // 2
        for s, times in used.items():
            left[s] -= times * packs
        plan.append((packs, sorted(pattern.picked, reverse=True)))
    return plan


class _Pattern:
    """One unfinished pack. ``left`` does not change meanwhile."""

    def __init__(self, left, capacity, most, random):
        self.left, self.capacity, self.most, self.random = left, capacity, most, random
        there = [s for s, count in left.items() if count > 0]
        self.smallest, self.largest = min(there), max(there)
        self.picked = [self.largest]

    @property
    def room(self):
        return self.capacity - sum(self.picked)

    @property
    def seats(self):
        return self.most - len(self.picked)

    def available(self, size):
        return self.left.get(size, 0) - self.picked.count(size)

    def fill(self, average):
        if self.room < self.smallest or self.seats == 0:
            return
        sequences = sum(self.left.values())
        volume = sum(s * count for s, count in self.left.items())
        count_for_average = max(1, min(sequences * self.capacity * 31 // 32 // volume, self.most) - 1)
        fewest = max(1, -(-self.room // self.largest))
        counts = [fewest, fewest + 1, fewest + 2, fewest + 3]
        if average:
            count = max(count_for_average, fewest)
            others = [c for c in (count - 1, count + 1, count + 2) if c >= fewest]
            counts = [count] * 4 + others + counts
        if not any(self.try_exact(count) for count in counts):
            self.fill_nearly(count_for_average)

    def try_exact(self, count):
        before = list(self.picked)
        if count == 1:
            if self.available(self.room) > 0 and self.seats >= 1:
                self.picked.append(self.room)
                return True
            return False
        if self.draw_all_but_two(count) and self.finish(self.room, self.pair_start()):
            return True
        self.picked = before
        return False

    def draw_all_but_two(self, count):
        behind = count - 1
        while behind >= 2 or self.room > 2 * self.largest:
            if self.seats <= 2:
                return False
            size = self.draw(self.room - max(behind, 2) * self.smallest)
            if size is None:
                return False
            self.picked.append(size)
            behind -= 1
        return True

    def draw(self, limit):
        eligible = [(s, count) for s, count in sorted(self.left.items()) if s <= limit]
        total = sum(count for _, count in eligible)
        if total == 0:
            return None
        at = self.random.below(total)
        for s, count in eligible:
            if at < count:
                return s if self.available(s) > 0 else None
            at -= count
        raise AssertionError

    def pair_start(self):
        size = self.draw(self.room - self.smallest)
        return 1 if size is None else min(size, self.room - size)

    def finish(self, room, start):
        if self.seats < 2:
            return False
        for low in [*range(start, room // 2 + 1), *range(1, start)]:
            high = room - low
            needed = 2 if low == high else 1
            if self.available(low) >= needed and self.available(high) >= needed:
                self.picked += [high, low]
                return True
        return False

    def fill_nearly(self, average):
        before = list(self.picked)
        while self.seats > 0 and (fitting := [s for s in self.left if s <= self.room and self.available(s) > 0]):
            self.picked.append(max(fitting))
        greedy, spare = self.picked, self.room
        for count in (average, 2):
            self.picked = list(before)
            if self.draw_all_but_two(count):
                start = self.pair_start()
                for gap in range(1, min(spare, 24)):
                    if self.finish(self.room - gap, min(start, max(1, (self.room - gap) // 2))):
                        return
        self.picked = greedy


def hand_out(lengths, multiple, plan, seed):
    """Return packs as lists of indices, for a plan of (packs, [(size, times), ...])."""
    classes = {}
    for i, length in enumerate(lengths):
        classes.setdefault(-(-length // multiple), []).append(i)
    random = Random(seed, ITEMS)
    dealt = {size: iter(shuffle(classes[size], random)) for size in sorted(classes)}
    order = shuffle([p for p, (packs, _) in enumerate(plan) for _ in range(packs)], Random(seed, PACKS))
    return [[next(dealt[size]) for size, times in plan[p][1] for _ in range(times)] for p in order]


def first_fit_shuffle(lengths, capacity, multiple, most, seed):
    units = capacity // multiple
    free, held = [], []
    for i in shuffle(list(range(len(lengths))), Random(seed, ITEMS)):
        size = -(-lengths[i] // multiple)
        p = next((p for p in range(len(free)) if free[p] >= size and len(held[p]) < most), len(free))
        if p == len(free):
            free.append(units)
            held.append([])
        free[p] -= size
        held[p].append(i)
    place = shuffle(list(range(len(held))), Random(seed, PACKS))
    packs = [[] for _ in held]
    for p, indices in enumerate(held):
        packs[place[p]] = indices
    return packs


def sequential(lengths, capacity, multiple, most):
    packs, used = [], 0
    for i, length in enumerate(lengths):
        size = -(-length // multiple) * multiple
        if not packs or used + size > capacity // multiple * multiple or len(packs[-1]) == most:
            packs.append([])
            used = 0
        packs[-1].append(i)
        used += size
    return packs
