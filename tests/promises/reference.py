"""A trainer in plain Python and NumPy float32: one dict a table, no device, no slots, no plans.

It follows DESIGN.md (section 3: filter, optimizers) literally and shares no code with the product but the initial
values of rows, which promise I8 tests by themselves. Sums run in batch order, as the product's do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import embcache as ec
from models.filter_model import Sketch, as_count, as_score, decayed, drawn, share

INT64_MIN = -(2**63)


@dataclass
class Counter:
    """Occurrences of a key and the largest of their timestamps; or a score, as a count, and the sweeps up to it."""

    count: int = 0
    last: int = INT64_MIN
    clicks: int = 0  # of the batch that is being counted


@dataclass
class ReferenceTable:
    """One table and its filter."""

    config: ec.TableConfig
    optimizer: ec.OptimizerSpec
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    state: dict[int, np.ndarray] = field(default_factory=dict)
    counters: dict[int, Counter] = field(default_factory=dict)
    newest: int | None = None
    cutoff: int = INT64_MIN
    epoch: int = 0  # sweeps by score so far
    swept: list[int] = field(default_factory=list)
    evicted: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        config = self.config
        rule = config.admit_and_evict
        self.sketch = Sketch(rule) if rule is not None and rule.sketch_bytes else None
        self._initial = ec.EmbTable(config.name, config.embedding_dim, initializer=config.initializer, seed=config.seed)

    def initial(self, key: int) -> np.ndarray:
        """The weights of a new row."""
        return self._initial.lookup(np.array([key], dtype=np.int64), insert=False)[0]

    def new_state(self) -> np.ndarray:
        """The optimizer state of a new row."""
        widths = self.optimizer.state_widths(self.config.embedding_dim)
        values = self.optimizer.initial_state()
        return np.concatenate(
            [np.zeros(0, np.float32)]
            + [np.full(width, value, np.float32) for width, value in zip(widths, values, strict=True)]
        )

    def read(self, key: int) -> np.ndarray:
        """What evaluation reads."""
        if key in self.rows:
            return self.rows[key]
        rule = self.config.admit_and_evict
        if rule is not None and rule.admits:
            return np.full(self.config.embedding_dim, rule.not_admitted_default_value, np.float32)
        return self.initial(key)

    def admit(
        self, keys: np.ndarray, timestamps: np.ndarray | None, step: int, clicks: np.ndarray | None = None
    ) -> dict[int, bool]:
        """Count, sweep, admit; unique key -> whether it has a row in this batch. `swept` are the keys of its sweep."""
        rule, self.swept = self.config.admit_and_evict, []
        admitted = dict.fromkeys(keys.tolist(), True)
        if rule is not None:
            known = set(self.counters)
            shown = self.count(rule, keys, timestamps, step, clicks)
            if rule.evict_step_interval > 0 and step % rule.evict_step_interval == 0:
                self.swept = self.lowest(rule, known) if rule.needs_labels else self.oldest(rule)
            for key in self.swept:
                del self.counters[key]
                self.evicted += self.rows.pop(key, None) is not None
                self.state.pop(key, None)
                if key in admitted:
                    admitted[key] = False
            for key in admitted:
                if admitted[key] and key not in self.rows and not self.earns(rule, key, shown[key], step):
                    admitted[key] = False
                    if self.sketch or rule.admit_threshold <= (0 if rule.needs_labels else 1):
                        del self.counters[key]  # keys that wait have none of their own
        for key, is_in in admitted.items():
            self.rejected += not is_in
            if is_in and key not in self.rows:
                self.rows[key], self.state[key] = self.initial(key).copy(), self.new_state()
        return admitted

    def count(
        self,
        rule: ec.AdmitAndEvictConfig,
        keys: np.ndarray,
        timestamps: np.ndarray | None,
        step: int,
        clicks: np.ndarray | None,
    ) -> dict[int, int]:
        """Add the batch to the counters; unique key -> its occurrences."""
        stamps = np.full(len(keys), step) if rule.time_source == "step" else timestamps
        shown: dict[int, int] = {}
        if self.sketch:
            self.sketch.turn(self.cutoff, INT64_MIN if self.newest is None else self.newest)
        for i, key in enumerate(keys.tolist()):
            shown[key] = shown.get(key, 0) + 1
            counter = self.counters.setdefault(key, Counter())
            if rule.needs_labels:
                counter.clicks += int(clicks[i]) if clicks is not None else 0
            elif stamps is not None:
                counter.last = max(counter.last, int(stamps[i]))
                self.newest = int(stamps[i]) if self.newest is None else max(self.newest, int(stamps[i]))
        for key, times in shown.items():
            counter = self.counters[key]
            if rule.show_click is not None:
                more = rule.show_click.alpha * float(times) + rule.show_click.beta * float(counter.clicks)
                counter.count, counter.last, counter.clicks = as_count(self.score(key) + more), self.epoch, 0
            elif self.sketch and key not in self.rows:
                counter.count = self.sketch.add(key, times)
            else:
                counter.count += times
        return shown

    def score(self, key: int) -> float:
        """The show/click score as of the last sweep."""
        rule, counter = self.config.admit_and_evict, self.counters[key]
        if counter.count == 0:
            return 0.0
        return decayed(as_score(counter.count), rule.show_click.score_decay, self.epoch - counter.last)

    def lowest(self, rule: ec.AdmitAndEvictConfig, known: set[int]) -> list[int]:
        """A sweep by score: decay, then the share of rows, and of keys that waited before the batch, that goes."""
        self.epoch += 1
        part, found = rule.show_click.evict_percentage, []
        for keys, most in (
            (self.rows.keys(), len(self.rows) - rule.evict_keep_min),
            (known - self.rows.keys(), len(self.counters)),
        ):
            ranked = sorted((self.score(key), key) for key in keys)
            found += [key for _, key in ranked[: max(0, min(share(part, len(ranked)), most))]]
        return found

    def oldest(self, rule: ec.AdmitAndEvictConfig) -> list[int]:
        """A sweep by time: keys below the cut-off, of those with rows only such as the floor lets go."""
        if self.newest is None:
            return []
        cutoff = self.newest - rule.evict_threshold
        self.cutoff = max(self.cutoff, cutoff)
        lasts = sorted((self.counters[key].last for key in self.rows), reverse=True)
        if rule.evict_keep_min >= len(lasts):
            floor = INT64_MIN
        else:
            floor = cutoff if rule.evict_keep_min == 0 else min(cutoff, lasts[rule.evict_keep_min - 1])
        return [key for key, c in self.counters.items() if c.last < (floor if key in self.rows else cutoff)]

    def earns(self, rule: ec.AdmitAndEvictConfig, key: int, times: int, step: int) -> bool:
        """Whether a key without a row gets one: it has occurred enough, and one of the occurrences since is drawn."""
        if rule.needs_labels:
            return self.score(key) >= rule.admit_threshold and drawn(rule, key, step, times)
        count = self.counters[key].count
        since = min(times, count - rule.admit_threshold + 1) if rule.admit_threshold > 1 else times
        return count >= rule.admit_threshold and drawn(rule, key, step, since)

    def visible(self, key: int) -> tuple[float, int]:
        """Frequency and timestamp as a view shows them."""
        rule, counter = self.config.admit_and_evict, self.counters[key]
        return (self.score(key) if rule is not None and rule.needs_labels else counter.count), counter.last

    def admit_batch(self, batch: ec.JaggedFeatures, step: int) -> dict[int, bool]:
        """`admit` on this table's part of a batch."""
        size, names, stamps, labels = batch.batch_size, batch.keys(), batch.timestamps_or_none(), batch.labels_or_none()
        counts = [int(batch.lengths()[f * size : (f + 1) * size].sum()) for f in range(len(names))]
        edges = np.cumsum([0, *counts]).tolist()
        places = [names.index(name) for name in self.config.feature_names]
        pieces = [slice(edges[f], edges[f + 1]) for f in places]
        keys = np.concatenate([batch.values().numpy()[piece] for piece in pieces])
        times = None if stamps is None else np.concatenate([stamps.numpy()[piece] for piece in pieces])
        clicks = None
        if labels is not None:
            lengths = batch.lengths().numpy()
            clicks = np.concatenate([np.repeat(labels.numpy() > 0, lengths[f * size : (f + 1) * size]) for f in places])
        return self.admit(keys, times, step, clicks)

    def update(self, key: int, gradient: np.ndarray) -> None:
        """One optimizer step of one row."""
        lr = np.float32(self.optimizer.lr)
        weights, state = self.rows[key], self.state[key]
        gradient = gradient + np.float32(self.optimizer.weight_decay) * weights
        if isinstance(self.optimizer, ec.RowWiseAdagrad):
            state += np.mean(gradient * gradient, dtype=np.float32)
            weights -= lr * gradient / (np.sqrt(state) + np.float32(self.optimizer.eps))
        elif isinstance(self.optimizer, ec.Adagrad):
            state += gradient * gradient
            weights -= lr * gradient / (np.sqrt(state) + np.float32(self.optimizer.eps))
        else:
            weights -= lr * gradient


class Reference:
    """The tables of one collection. One forward and one update a batch.

    Parameters
    ----------
    tables : list of TableConfig
    optimizer : SGD, Adagrad or RowWiseAdagrad
    """

    def __init__(self, tables: list[ec.TableConfig], optimizer: ec.OptimizerSpec) -> None:
        self.tables = {config.name: ReferenceTable(config, optimizer) for config in tables}
        self.step = 0

    def train(self, batch: ec.JaggedFeatures, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Train on a batch; `gradients` has the gradient of each (feature of a table), by output name.

        Returns the pooled outputs before the update, (batch size, dim) float32.
        """
        self.step += 1
        out: dict[str, np.ndarray] = {}
        for table in self.tables.values():
            config = table.config
            parts = [(name, self.output_name(name, config), batch[name]) for name in config.feature_names]
            admitted = table.admit_batch(batch, self.step)
            sums: dict[int, np.ndarray] = {key: np.zeros(config.embedding_dim, np.float32) for key in admitted}
            for _, output, part in parts:
                out[output] = self.pool(table, part, admitted, gradients[output], sums)
            for key, is_in in admitted.items():
                if is_in:
                    table.update(key, sums[key])
        return out

    def pool(
        self,
        table: ReferenceTable,
        part: ec.JaggedTensor,
        admitted: dict[int, bool],
        gradient: np.ndarray,
        sums: dict[int, np.ndarray],
    ) -> np.ndarray:
        """Pool one feature, and add its gradient to `sums` of the rows."""
        config, lengths = table.config, part.lengths().tolist()
        rule = config.admit_and_evict
        default = np.float32(0.0 if rule is None else rule.not_admitted_default_value)
        weights = part.weights_or_none()
        out = np.zeros((len(lengths), config.embedding_dim), np.float32)
        place = 0
        for b, length in enumerate(lengths):
            divisor = np.float32(length if config.pooling == "mean" else 1)
            for _ in range(length):
                key = int(part.values()[place])
                weight = np.float32(1.0) if weights is None else weights.numpy()[place]
                row = table.rows[key] if admitted[key] else np.full(config.embedding_dim, default, np.float32)
                out[b] += weight * row
                sums[key] += gradient[b] * (weight / divisor)
                place += 1
            if length:
                out[b] /= divisor
        return out

    def output_name(self, feature: str, config: ec.TableConfig) -> str:
        """A feature of several tables is called feature@table."""
        users = sum(feature in table.config.feature_names for table in self.tables.values())
        return f"{feature}@{config.name}" if users > 1 else feature
