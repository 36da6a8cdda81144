"""A state machine of the table against a dict and NumPy rows, bit for bit, over many partition splits.

Every rule mirrors one call; every step ends with the table's own check of its invariants. Batches have 0 to 4096 keys
from a small hostile pool, from a dense range, or from all of int64, and repeat keys. Two tables run side by side at
different thread counts and bucket seeds: their row indexes must agree (promise I4).
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from embcache._core.table import Table

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
HOSTILE = np.array([INT64_MIN, INT64_MIN + 1, -2, -1, 0, 1, 2, 2**31, 2**32, 2**63 - 2, INT64_MAX], dtype=np.int64)
F32 = np.float32

batches = st.tuples(
    st.sampled_from(["hostile", "dense", "wide"]), st.sampled_from([0, 1, 2, 30, 300, 4096]), st.integers(0, 2**32 - 1)
)


def draw(batch: tuple[str, int, int]) -> np.ndarray:
    kind, n, seed = batch
    rng = np.random.default_rng(seed)
    if kind == "hostile":
        return rng.choice(HOSTILE, n)
    if kind == "dense":
        return rng.integers(-600, 600, n)
    return rng.integers(INT64_MIN, INT64_MAX, n, endpoint=True)


class TableMachine(RuleBasedStateMachine):
    limbo: Bundle[tuple[int, int]] = Bundle("limbo")

    @initialize(
        dim=st.sampled_from([1, 4, 7, 16]),
        state_dim=st.sampled_from([0, 1, 2, 4, 7]),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        split_above=st.sampled_from([8, 100, 65536]),
    )
    def start(self, dim: int, state_dim: int, dtype: str, split_above: int) -> None:
        def make(threads: int, index_seed: int) -> Table:
            return Table(
                "machine",
                dim,
                state_dim=state_dim,
                dtype=dtype,
                num_threads=threads,
                split_above=split_above,
                index_seed=index_seed,
                with_filter=True,
            )

        self.table, self.twin = make(1, 0), make(3, 99)
        self.fresh = Table("machine", dim, state_dim=state_dim, dtype=dtype)
        self.dim, self.state_dim, self.dtype = dim, state_dim, dtype
        self.model: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.rows: dict[int, int] = {}
        self.detached: dict[int, tuple[int, tuple[np.ndarray, np.ndarray]]] = {}
        self.count = 0

    def initial(self, keys: np.ndarray) -> np.ndarray:
        out = np.empty((len(keys), self.dim), dtype=F32)
        if len(keys):
            self.fresh.init_rows(np.ascontiguousarray(keys), out)
        return out

    def values(self, n: int, width: int) -> np.ndarray:
        """Distinct bit patterns, NaNs among them."""
        out = np.arange(self.count, self.count + n * width, dtype=np.uint32) * np.uint32(2654435761)
        self.count += n * width
        return out.view(F32).reshape(n, width)

    def weights(self, n: int) -> np.ndarray:
        """As `values`, but numbers that the table's type has, so that they come back bit by bit."""
        values = self.values(n, self.dim)
        if self.dtype == "float32":
            return values
        bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if self.dtype == "bfloat16":
            bits[(bits & 0x7FFF) > 0x7F80] |= 0x40  # a quiet NaN
            return (bits.astype(np.uint32) << np.uint32(16)).view(F32)
        bits[(bits & 0x7FFF) > 0x7C00] |= 0x200
        # Not torch: it widens one NaN alone to another NaN than one among many.
        return bits.view(np.float16).astype(F32)

    def born(self, keys: np.ndarray, rows: np.ndarray) -> None:
        absent = [int(key) for key in dict.fromkeys(keys.tolist()) if int(key) not in self.model]
        for key, weights in zip(absent, self.initial(np.array(absent, dtype=np.int64)), strict=True):
            self.model[key] = (weights, np.zeros(self.state_dim, dtype=F32))
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            assert self.rows.setdefault(key, row) == row

    @rule(batch=batches)
    def insert(self, batch: tuple[str, int, int]) -> None:
        keys = draw(batch)
        expected: set[int] = set()
        marks = []
        for key in keys.tolist():
            marks.append(int(key not in self.model and key not in expected))
            expected.add(key)
        rows, born = self.table.insert_born(keys)
        assert born.tolist() == marks
        assert np.array_equal(rows, self.twin.insert(keys))
        self.born(keys, rows)

    @rule(batch=batches, insert=st.booleans())
    def lookup(self, batch: tuple[str, int, int], insert: bool) -> None:
        keys = draw(batch)
        out = np.empty((len(keys), self.dim), dtype=F32)
        initial = self.initial(keys)
        expected = np.array(
            [self.model[key][0] if key in self.model else initial[i] for i, key in enumerate(keys.tolist())], dtype=F32
        )
        for table in (self.table, self.twin):
            out[:] = 77
            table.lookup(keys, out, insert)
            assert np.array_equal(out.view(np.uint32), expected.reshape(out.shape).view(np.uint32))
        if insert:
            self.born(keys, self.table.find(keys))

    @rule(batch=batches, with_state=st.booleans())
    def assign(self, batch: tuple[str, int, int], with_state: bool) -> None:
        keys = draw(batch)
        weights = self.weights(len(keys))
        state = self.values(len(keys), self.state_dim) if with_state else None
        for table in (self.table, self.twin):
            table.assign(keys, weights, state)
        self.born(keys, self.table.find(keys))
        for i, key in enumerate(keys.tolist()):
            self.model[key] = (weights[i], np.zeros(self.state_dim, dtype=F32) if state is None else state[i])

    @rule(batch=batches)
    def erase(self, batch: tuple[str, int, int]) -> None:
        keys = draw(batch)
        gone = set(keys.tolist()) & self.model.keys()
        assert self.table.erase(keys) == self.twin.erase(keys) == len(gone)
        for key in gone:
            del self.model[key], self.rows[key]

    @rule(part=st.integers(2, 5), seed=st.integers(0, 2**32 - 1))
    def erase_many(self, part: int, seed: int) -> None:
        """Churn: most splits and most free lists come from here."""
        keys = np.random.default_rng(seed).permutation(np.array(sorted(self.model), dtype=np.int64))[::part].copy()
        assert self.table.erase(keys) == self.twin.erase(keys) == len(keys)
        for key in keys.tolist():
            del self.model[key], self.rows[key]

    @rule(target=limbo, batch=batches)
    def detach(self, batch: tuple[str, int, int]) -> object:
        keys = draw(batch)[:40]
        rows = self.table.detach(keys)
        assert np.array_equal(rows, self.twin.detach(keys))
        handles = []
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            if key not in self.model:
                assert row == -1
                continue
            assert row == self.rows.pop(key)
            self.detached[row] = (key, self.model.pop(key))
            handles.append((key, row))
        return multiple(*handles)

    @rule(handle=limbo, back=st.booleans())
    def end_limbo(self, handle: tuple[int, int], back: bool) -> None:
        key, row = handle
        if row not in self.detached or self.detached[row][0] != key:
            return
        if back and key in self.model:
            return
        keys, rows = np.array([key]), np.array([row])
        for table in (self.table, self.twin):
            (table.attach if back else table.free)(keys, rows)
        content = self.detached.pop(row)[1]
        if back:
            self.model[key], self.rows[key] = content, row

    @rule(batch=batches, more=batches, erased=st.integers(0, 50))
    def undo_of_inserts(self, batch: tuple[str, int, int], more: tuple[str, int, int], erased: int) -> None:
        """Two inserts, undone newest first: nothing is left of them, and repeated they give the same rows.

        Splits are not taken back: where the second insert split what the first had filled, the rows are only required to
        be right, which what follows checks.
        """
        victims = np.array(list(self.model)[:erased], dtype=np.int64)
        for table in (self.table, self.twin):
            table.erase(victims)
        for key in victims.tolist():
            del self.model[key], self.rows[key]
        first, second = draw(batch), draw(more)
        traces, split = [], []
        for table in (self.table, self.twin, self.table):
            rows, born = table.insert_born(first)
            partitions = table.stats()["partitions"]
            rows_more, born_more = table.insert_born(second)
            traces.append((rows, rows_more))
            split.append(table.stats()["partitions"] > partitions)
            table.check()
            table.unborn(second[born_more == 1])
            table.unborn(first[born == 1])
            assert len(table) == len(self.model)
        (rows, rows_more), (other, other_more), (again, again_more) = traces
        assert np.array_equal(rows, other)  # at any number of threads and with any hash seed
        assert np.array_equal(rows_more, other_more)
        if not split[0]:
            assert np.array_equal(rows, again)
            assert np.array_equal(rows_more, again_more)

    @rule(seed=st.integers(0, 2**32 - 1))
    @precondition(lambda self: self.rows)
    def move_rows(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        keys = rng.permutation(np.array(sorted(self.rows), dtype=np.int64))[:200].copy()
        rows = np.array([self.rows[key] for key in keys.tolist()])
        places = rng.permutation(300)[: len(keys)]
        weights, state = self.weights(300), self.values(300, self.state_dim)
        states = [state] if self.state_dim else []
        for table in (self.table, self.twin):
            table.write_from(rows, weights, places, states)
            back, back_state = np.zeros_like(weights), np.zeros_like(state)
            table.read_into(rows, back, places, [back_state] if self.state_dim else [])
            assert np.array_equal(back[places].view(np.uint32), weights[places].view(np.uint32))
            assert np.array_equal(back_state[places].view(np.uint32), state[places].view(np.uint32))
        for key, place in zip(keys.tolist(), places.tolist(), strict=True):
            self.model[key] = (weights[place], state[place])

    @rule()
    def compare_everything(self) -> None:
        keys = np.array(list(self.model), dtype=np.int64)
        for table in (self.table, self.twin):
            weights, state = table.lookup_rows(keys)
            for i, key in enumerate(keys.tolist()):
                assert np.array_equal(weights[i].view(np.uint32), self.model[key][0].view(np.uint32))
                assert np.array_equal(state[i].view(np.uint32), self.model[key][1].view(np.uint32))
            assert table.find(keys).tolist() == [self.rows[key] for key in keys.tolist()]
            rows, cursor = [], 0
            while True:
                found, cursor = table.scan(cursor, 1000)
                if len(found) == 0:
                    break
                rows += found.tolist()
            assert rows == sorted(self.rows.values())
            found_keys = table.columns(np.array(rows, dtype=np.int64))[0]
            assert [self.rows[key] for key in found_keys.tolist()] == rows

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "table"):
            return
        for table in (self.table, self.twin):
            table.check()
            assert len(table) == len(self.model)
            assert table.stats()["limbo_rows"] == len(self.detached)
        assert self.table.stats()["partitions"] == self.twin.stats()["partitions"]
        probe = np.concatenate([HOSTILE, np.array(list(self.model)[:20], dtype=np.int64)])
        assert self.table.find(probe).tolist() == [self.rows.get(key, -1) for key in probe.tolist()]

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.compare_everything()
            for table in (self.table, self.twin, self.fresh):
                table.close()


TestTableMachine = TableMachine.TestCase
# Fewer where the profile says so: under the sanitizers everything is many times slower.
TestTableMachine.settings = settings(
    max_examples=min(60, settings().max_examples), stateful_step_count=min(40, settings().stateful_step_count)
)
