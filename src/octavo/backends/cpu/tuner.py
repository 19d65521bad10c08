"""Measures which tiles are fastest, in the plan itself: whole steps run, and every layer tries another candidate.

That way the weights are as cold and the activations as warm as while serving, and candidates take turns within one
step, so that what else the machine does meanwhile falls on all of them alike. The native library takes the times.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo._native import Plan
from octavo.backends.cpu.tiles import BUCKETS, Bucket, LinearShape, Tile, shapes_of

__all__ = ["Choice", "StepTime", "Tuner"]

# Rows measured of each bucket; a choice has to be good at all of them.
POINTS: dict[Bucket, tuple[int, ...]] = dict(
    zip(BUCKETS, ((1,), (2, 4, 8), (12, 20, 32), (40, 64, 96), (128, 256), (320, 512, 1024)), strict=True)
)
MOST_ROWS = 1024

_ROW_TILES = (96, 72, 48, 36, 24, 12)
_COLUMN_TILES = (32, 64, 96, 128, 192, 256, 384, 512)  # and even shares of a thread
_SEQUENCE = 256  # tokens of a sequence of a measured step at the most: products are measured, not attention
_WORTH = 0.98  # of the built-in time; less of a gain is within what two measurements of one thing differ by
_NO_LOSS = 1.02  # at any of the measured rows
_LEAST_SAMPLES = 3
# Shares of a bucket's time: all candidates, the better ones, the best against the built-in tiles, whole steps.
_PHASES = (0.35, 0.25, 0.3, 0.1)

_Time = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found for a shape and a bucket. `tile` is None where the built-in one is as good.

    `built_in` is what the built-in choice comes to at the most rows measured; `ratio` its time over the chosen one's.
    """

    shape: LinearShape
    names: tuple[str, ...]
    bucket: Bucket
    built_in: Tile
    tile: Tile | None
    ratio: float
    candidates: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a whole step of so many rows, with built-in tiles and with the chosen ones."""

    rows: int
    built_in: float
    chosen: float

    @property
    def ratio(self) -> float:
        return self.built_in / self.chosen


class _Contest:
    """The candidates of one shape in one bucket: None is the built-in choice. Collects their times by rows."""

    def __init__(self, linears: list[int], rows: tuple[int, ...], tiles: Sequence[Tile]) -> None:
        self.linears = linears
        self.rows = rows
        self.running: list[Tile | None] = [None, *tiles]
        self.times: dict[tuple[Tile | None, int], list[float]] = defaultdict(list)
        self._queues: dict[int, list[Tile | None]] = defaultdict(list)

    def next(self, rows: int, chance: random.Random) -> Tile | None:
        """Whose turn it is at these rows: each gets as many as any other, in an order that keeps changing."""
        queue = self._queues[rows]
        if not queue:
            queue.extend(self.running)
            chance.shuffle(queue)
        return queue.pop()

    def ratio(self, tile: Tile | None) -> float:
        """Time over that of the built-in choice, over all rows; infinite when there is too little to tell."""
        ratios = self.ratios(tile)
        return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)) if ratios else math.inf

    def ratios(self, tile: Tile | None) -> list[float]:
        """The same at each of the rows, or nothing."""
        found = []
        for rows in self.rows:
            own, base = self.times[tile, rows], self.times[None, rows]
            if min(len(own), len(base)) < _LEAST_SAMPLES:
                return []
            found.append(statistics.median(own) / statistics.median(base))
        return found

    def keep(self, count: int) -> None:
        """Go on with the best `count` and the built-in choice, from fresh times: the best of many was also lucky."""
        tiles = [tile for tile in self.running if tile is not None and self.ratio(tile) < math.inf]
        self.running = [None, *sorted(tiles, key=self.ratio)[:count]]
        self.times.clear()
        self._queues.clear()

    def winner(self) -> tuple[Tile | None, float]:
        """The candidate that is faster than the built-in choice and nowhere slower, and its ratio; else None and 1."""
        tiles = [tile for tile in self.running if tile is not None]
        for tile in sorted(tiles, key=self.ratio):
            if self.ratio(tile) <= _WORTH and max(self.ratios(tile)) <= _NO_LOSS:
                return tile, self.ratio(tile)
        return None, 1.0


class Tuner:
    """Finds the tiles of a plan that has its KV pool; whoever runs the plan meanwhile must not.

    ``max_model_len`` and ``num_blocks`` are those of the plan. The tiles the plan had are lost, those found not set.
    """

    def __init__(
        self, plan: Plan, *, max_model_len: int, num_blocks: int, seed: int = 0, clock: _Time = time.perf_counter
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._chance = random.Random(seed)
        self._shapes = shapes_of(plan)
        self._length = min(_SEQUENCE, max_model_len)
        blocks = -(-self._length // 16)
        sequences = min(len(plan.starts), num_blocks // blocks)
        self._most_rows = min(MOST_ROWS, len(plan.tokens), sequences * self._length)
        for i in range(sequences):
            plan.block_tables[i, :blocks] = np.arange(i * blocks, (i + 1) * blocks)

    def buckets(self) -> list[Bucket]:
        """The buckets whose rows the plan can run."""
        return [bucket for bucket, rows in POINTS.items() if rows[0] <= self._most_rows]

    def measure(self, bucket: Bucket, seconds: float) -> tuple[list[Choice], list[StepTime]]:
        """Choose for every shape that can have the rows of `bucket`, in about so many seconds."""
        points = [rows for rows in POINTS[bucket] if rows <= self._most_rows]
        contests = self._contests(bucket, points)
        sizes = {shape: len(contest.running) - 1 for shape, contest in contests.items()}
        plan = self._plan
        plan.set_profiling(True)
        try:
            for rows in points:  # the first steps bring memory in
                self._step(rows)
            for phase, share in enumerate(_PHASES[:3]):
                if phase:
                    for contest in contests.values():
                        contest.keep(max(4, len(contest.running) // 4) if phase == 1 else 1)
                end = self._clock() + seconds * share
                self._rounds(contests, points, bucket, end)
        finally:
            plan.set_profiling(False)
            plan.clear_tiles()
        choices, chosen = [], {}
        for shape, contest in contests.items():
            tile, ratio = contest.winner()
            chosen[shape] = tile
            names = tuple(dict.fromkeys(self._shapes[index][1] for index in contest.linears))
            built_in = Tile(*plan.tile_of(contest.linears[0], contest.rows[-1]))
            choices.append(Choice(shape, names, bucket, built_in, tile, 1 / ratio, sizes[shape]))
        return choices, self._whole_steps(contests, chosen, points, bucket, seconds * _PHASES[3])

    def _contests(self, bucket: Bucket, points: Sequence[int]) -> dict[LinearShape, _Contest]:
        """One for every shape whose linears the first of the rows can reach.

        Those that never have more than the sampled rows go without a turn where others have all rows.
        """
        linears: dict[LinearShape, list[int]] = defaultdict(list)
        for index, (shape, _, _) in enumerate(self._shapes):
            linears[shape].append(index)
        contests = {}
        for shape, indices in linears.items():
            most = max(self._shapes[index][2] for index in indices)
            rows = tuple(point for point in points if point <= most)
            if rows:
                linears_of_all = [index for index in indices if self._shapes[index][2] == most]
                contests[shape] = _Contest(linears_of_all, rows, self._candidates(linears_of_all[0], bucket, rows))
        return contests

    def _candidates(self, linear: int, bucket: Bucket, rows: Iterable[int]) -> list[Tile]:
        """Tiles that cut the rows in different ways, none of them as the built-in choice does."""
        plan, rows = self._plan, tuple(rows)
        columns = self._shapes[linear][0].columns
        shares = {-(-columns // (32 * count * plan.threads)) * 32 for count in (1, 2, 3, 4)}
        widths = sorted(width for width in {*_COLUMN_TILES, *shares} if width <= min(columns, _COLUMN_TILES[-1]))
        plan.clear_tiles()
        seen = {tuple(plan.tile_of(linear, count) for count in rows)}
        found = []
        for row_tile in _ROW_TILES:
            for column_tile in widths:
                for regions in {1, plan.threads}:
                    try:
                        plan.set_tile(linear, *bucket, row_tile, column_tile, regions)
                    except ValueError:  # a group of quantised outputs needs wider tiles
                        continue
                    cut = tuple(plan.tile_of(linear, count) for count in rows)
                    plan.clear_tiles()
                    if cut not in seen:
                        seen.add(cut)
                        found.append(Tile(row_tile, column_tile, regions))
        return found

    def _rounds(self, contests: dict[LinearShape, _Contest], points: Sequence[int], bucket: Bucket, end: float) -> None:
        """Steps until the time is over, the rows in turn."""
        while True:
            for rows in points:
                self._step(rows, contests.values(), bucket)
                if self._clock() >= end:
                    return

    def _step(self, rows: int, contests: Iterable[_Contest] = (), bucket: Bucket = BUCKETS[0]) -> None:
        """One step of the plan, each linear of each contest with the next of its candidates."""
        plan = self._plan
        plan.clear_tiles()
        tried: list[tuple[_Contest, int, Tile | None]] = []
        for contest in contests:
            if rows not in contest.rows:
                continue
            for linear in contest.linears:
                tile = contest.next(rows, self._chance)
                if tile is not None:
                    plan.set_tile(linear, *bucket, tile.rows, tile.columns, tile.regions)
                tried.append((contest, linear, tile))
        self._run(rows)
        times = plan.linear_times()
        for contest, linear, tile in tried:
            computed, seconds = times[linear]
            if computed == rows:  # a plan may run its last layers on the sampled rows only
                contest.times[tile, rows].append(seconds)

    def _run(self, rows: int) -> None:
        plan = self._plan
        plan.tokens[:rows] = 0
        sequences = 0
        for start in range(0, rows, self._length):
            plan.starts[sequences], plan.counts[sequences] = 0, min(self._length, rows - start)
            sequences += 1
        # Logits of every row, as in a step of decodes, as far as the head does them in one go.
        head_rows = min(most for _, _, most in self._shapes)
        wanted = rows if rows <= head_rows else 1
        plan.logit_rows[:wanted] = np.arange(rows - wanted, rows)
        plan.run(sequences, wanted)

    def _whole_steps(
        self,
        contests: dict[LinearShape, _Contest],
        chosen: dict[LinearShape, Tile | None],
        points: Sequence[int],
        bucket: Bucket,
        seconds: float,
    ) -> list[StepTime]:
        """Whole steps with the built-in tiles and with the chosen ones in turn; none where nothing was chosen."""
        plan = self._plan
        if not any(chosen.values()):
            return []
        times: dict[tuple[int, bool], list[float]] = defaultdict(list)
        end = self._clock() + seconds
        while True:
            for rows in points:
                for tuned in (False, True):
                    plan.clear_tiles()
                    for shape, tile in chosen.items():
                        for linear in contests[shape].linears if tuned and tile is not None else ():
                            assert tile is not None
                            plan.set_tile(linear, *bucket, tile.rows, tile.columns, tile.regions)
                    began = self._clock()
                    self._run(rows)
                    times[rows, tuned].append(self._clock() - began)
            if self._clock() >= end:
                break
        plan.clear_tiles()
        return [
            StepTime(rows, statistics.median(times[rows, False]), statistics.median(times[rows, True]))
            for rows in points
        ]
