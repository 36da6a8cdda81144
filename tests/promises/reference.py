"""A trainer in plain Python and NumPy float32: one dict a table, no device, no slots, no plans.

It follows DESIGN.md (section 3: filter, optimizers) literally and shares no code with the product but the initial
values of rows, which promise I8 tests by themselves. Sums run in batch order, as the product's do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import embcache as ec

INT64_MIN = -(2**63)


@dataclass
class Counter:
    """Occurrences of a key and the largest of their timestamps."""

    count: int = 0
    last: int = INT64_MIN


@dataclass
class ReferenceTable:
    """One table and its filter."""

    config: ec.TableConfig
    optimizer: ec.OptimizerSpec
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    state: dict[int, np.ndarray] = field(default_factory=dict)
    counters: dict[int, Counter] = field(default_factory=dict)
    newest: int | None = None
    swept: list[int] = field(default_factory=list)
    evicted: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        config = self.config
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

    def admit(self, keys: np.ndarray, timestamps: np.ndarray | None, step: int) -> dict[int, bool]:
        """Count, sweep, admit; unique key -> whether it has a row in this batch. `swept` are the keys of its sweep."""
        rule, self.swept = self.config.admit_and_evict, []
        admitted = dict.fromkeys(keys.tolist(), True)
        if rule is not None:
            stamps = np.full(len(keys), step) if rule.time_source == "step" or timestamps is None else timestamps
            for key, stamp in zip(keys.tolist(), stamps.tolist(), strict=True):
                counter = self.counters.setdefault(key, Counter())
                counter.count += 1
                if rule.time_source == "step" or timestamps is not None:
                    counter.last = max(counter.last, stamp)
                    self.newest = stamp if self.newest is None else max(self.newest, stamp)
            if rule.evicts and step % rule.evict_step_interval == 0 and self.newest is not None:
                self.swept = [k for k, c in self.counters.items() if c.last < self.newest - rule.evict_threshold]
                for key in self.swept:
                    del self.counters[key]
                    self.evicted += self.rows.pop(key, None) is not None
                    self.state.pop(key, None)
                    if key in admitted:
                        admitted[key] = False
            for key in admitted:
                if key in self.counters and key not in self.rows:
                    admitted[key] = admitted[key] and self.counters[key].count >= rule.admit_threshold
        for key, is_in in admitted.items():
            self.rejected += not is_in
            if is_in and key not in self.rows:
                self.rows[key], self.state[key] = self.initial(key).copy(), self.new_state()
        return admitted

    def admit_batch(self, batch: ec.JaggedFeatures, step: int) -> dict[int, bool]:
        """`admit` on this table's part of a batch."""
        size, names, stamps = batch.batch_size, batch.keys(), batch.timestamps_or_none()
        counts = [int(batch.lengths()[f * size : (f + 1) * size].sum()) for f in range(len(names))]
        edges = np.cumsum([0, *counts]).tolist()
        pieces = [slice(edges[f], edges[f + 1]) for f in (names.index(name) for name in self.config.feature_names)]
        keys = np.concatenate([batch.values().numpy()[piece] for piece in pieces])
        times = None if stamps is None else np.concatenate([stamps.numpy()[piece] for piece in pieces])
        return self.admit(keys, times, step)

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
