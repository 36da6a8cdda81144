"""I9 through a pipeline: any depth, delays in any stage, sizes of HBM, policies and threads give the bits of the serial run.

The serial run has everything resident. Windows of a full buffer, swaps and evictions are asserted to have happened.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.piped import train_piped
from promises.strategies import ROW_TYPES, World, examples, filters, table_lists, worlds
from promises.training import check, make_collection, model_state, train

COUNTED = ("hits", "swap_out_rows", "evicted", "rejected", "forgotten")


@st.composite
def slots(draw: st.DrawFn, world: World) -> dict[str, int] | None:
    """The least that holds one window, up to all rows; or a buffer that grows."""
    least, most = world.least_rows(), world.all_rows()
    return draw(
        st.just(least)
        | st.none()
        | st.floats(0, 1).map(lambda share: {n: least[n] + int(share * max(0, most[n] - least[n])) for n in least})
    )


def compare(world: World, data: st.DataObject, seen: Counter[str]) -> None:
    """One serial run against one through a pipeline of drawn shape."""
    resident = make_collection(world, world.all_rows(), num_threads=1)
    outputs, state, count = train(resident, world), model_state(resident.manager), resident.manager.stats()
    resident.close()
    rows = data.draw(slots(world))
    depth = data.draw(st.integers(1, 16))
    policy = data.draw(st.sampled_from(["lru", "lfu", "s3fifo", "lookahead"]))
    lookahead = data.draw(st.sampled_from([0, 1, 7]))
    collection = make_collection(world, rows, num_threads=data.draw(st.sampled_from([1, 2, 5])), policy=policy)
    found, stats = train_piped(
        collection, world, depth, data.draw(st.none() | st.integers(0, 2**32)), lookahead=lookahead
    )
    assert found == outputs, f"depth {depth}, {rows} slots, {policy}"
    assert model_state(collection.manager) == state, f"depth {depth}, {rows} slots, {policy}"
    after = collection.manager.stats()
    for name in ("admitted", "rejected", "evicted", "forgotten", "born", "rows", "step"):
        assert after[name] == count[name], name
    assert (after["pinned"], after["coming_keys"], collection.manager.outstanding) == (0, 0, 0)
    check(collection.manager)
    collection.close()
    seen.update({name: after[name] for name in COUNTED})
    seen.update({"shortened": stats["shortened"], "deep": depth > 1, "joint": world.joint > 1})
    seen.update({"window": world.accumulate > 1, "grown": rows is None})
    seen.update({"ahead": policy == "lookahead" and lookahead > 0})


def test_i9_a_pipeline_gives_the_bits_of_the_serial_run() -> None:
    seen: Counter[str] = Counter()

    @examples(60)
    @given(world=worlds(steps=(6, 30)), data=st.data())
    def run(world: World, data: st.DataObject) -> None:
        compare(world, data, seen)

    run()
    needed = (*COUNTED, "shortened", "deep", "joint", "window", "grown", "ahead")
    assert all(seen[name] > 0 for name in needed), seen


def test_i9_a_pipeline_with_filters_on_every_table() -> None:
    """Keys that one batch in flight admits, another evicts, and a third wants again."""
    seen: Counter[str] = Counter()

    @examples(40)
    @given(
        world=worlds(steps=(16, 40), tables=table_lists(most=2, filtered=filters(), dtypes=ROW_TYPES)), data=st.data()
    )
    def run(world: World, data: st.DataObject) -> None:
        compare(world, data, seen)

    run()
    assert seen["evicted"] > 100 and seen["rejected"] > 100 and seen["swap_out_rows"] > 50 and seen["shortened"], seen


def test_i9_the_torch_backend_through_a_pipeline() -> None:
    """What runs on a CUDA or NPU device: stock operators, staged copies. Here on CPU tensors."""
    from embcache.devices import backend_for

    seen: Counter[str] = Counter()

    @examples(10)
    @given(world=worlds(steps=(6, 20)), depth=st.integers(2, 8), seed=st.integers(0, 2**32))
    def run(world: World, depth: int, seed: int) -> None:
        runs = []
        for rows in (world.all_rows(), world.least_rows()):
            collection = make_collection(world, rows)
            collection.manager.backend = backend_for("cpu", kernels="torch")
            collection.manager.buffer.move(collection.manager.backend)
            if not runs:
                runs.append((train(collection, world), model_state(collection.manager)))
            else:
                runs.append((train_piped(collection, world, depth, seed)[0], model_state(collection.manager)))
            seen.update({name: collection.manager.stats()[name] for name in COUNTED})
            collection.close()
        assert runs[0] == runs[1]

    run()
    assert seen["swap_out_rows"] > 0, seen


def test_i9_windows_of_a_full_buffer_at_every_depth() -> None:
    """A buffer of exactly one batch: the pipeline is serial by itself, whatever depth it was given, and never stuck."""
    batches = [ec.JaggedFeatures(["f"], [step % 7, step % 3 + 10, step % 5 + 20], [3]) for step in range(40)]
    world = World([ec.TableConfig("f", 4)], ec.Adagrad(lr=0.1), True, 1, 1, batches)
    resident = make_collection(world, None)
    outputs, state = train(resident, world), model_state(resident.manager)
    for depth in range(1, 17):
        collection = make_collection(world, {"f": 3})
        found, stats = train_piped(collection, world, depth)
        assert found == outputs and model_state(collection.manager) == state
        assert collection.manager.stats()["swap_out_rows"] > 60
        assert (stats["shortened"] > 0) == (depth > 1)
        collection.close()
