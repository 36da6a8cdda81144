"""What a call costs when there is almost nothing to do, and what importing the torch-free half costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import embcache as ec
from embcache._core.plan import Plan
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from peers.tables import KhashTable
from peers.torch_bags import TorchBags
from plans import finish
from race import MICROSECONDS, MILLISECONDS, Contender, Race
from samples import dense_table, keys_of
from steps import EPS, LR, same

CALLS = 300
ROWS = 1000


def same_array(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("size", [0, 1])
def test_find_of_little(race: Race, size: int) -> None:
    keys = keys_of(np.arange(ROWS))
    query = keys[:size]
    table, khash = ec.EmbTable("overhead", 1), KhashTable(keys)
    table.insert(keys)
    ours = Contender("embcache", lambda _i: table.find(query))
    peer = Contender(khash.name, lambda _i: khash.find(query), same_array)
    race("overhead", f"find of {size} keys", ours, [peer], work=1, unit=MICROSECONDS, repeat=CALLS, rounds=9)
    table.close()


def test_plan_of_little(race: Race) -> None:
    keys, offsets = keys_of(np.arange(16)), np.array([0, 16])
    tensor = torch.from_numpy(keys)
    with SwapManager([Table("overhead", 1)], [ROWS]) as manager:
        after = finish(manager)

        def plan_and_finish(_i: int) -> Plan:
            plan = manager.plan(keys, offsets)
            after(plan)
            return plan

        def check(plan: Plan, theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
            assert np.array_equal(np.sort(plan.unique_keys), theirs[0].numpy())

        peer = Contender("torch.unique(return_inverse)", lambda _i: torch.unique(tensor, return_inverse=True), check)
        ours = Contender("embcache", plan_and_finish)
        race(
            "overhead", "plan of 16 keys, with finish", ours, [peer], work=1, unit=MICROSECONDS, repeat=CALLS, rounds=9
        )


def test_step_of_little(race: Race) -> None:
    ids = np.arange(4)
    features = ec.JaggedFeatures(["f"], torch.from_numpy(keys_of(ids)), torch.ones(4, dtype=torch.int64))
    offsets, gradient = torch.arange(5), torch.from_numpy(dense_table(4, 16))
    collection = ec.EmbeddingBagCollection([ec.TableConfig("f", 16, hbm_rows=ROWS)], optimizer=ec.SGD(lr=LR))
    collection(features)
    collection.optimizer.step()
    bags = TorchBags([collection.manager.table("f").lookup(keys_of(ids), insert=False)], "SGD", LR, EPS)
    tensor = torch.from_numpy(ids)

    def step(_i: int) -> torch.Tensor:
        out = collection(features).values()
        out.backward(gradient)
        return out.detach()

    peer = Contender("nn.EmbeddingBag(sparse) + SGD", lambda _i: bags.step(tensor, offsets, gradient), same)
    race(
        "overhead",
        "forward + backward of 4 bags",
        Contender("embcache", step),
        [peer],
        work=1,
        unit=MICROSECONDS,
        repeat=CALLS,
        rounds=9,
    )
    collection.close()


def import_seconds(before: str, module: str, bytecode: Path) -> float:
    """CPU seconds that importing `module` takes in a new interpreter that has imported `before`.

    As where the package is installed: the compiled sources are kept, here in `bytecode`, from the first import on.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    kept["PYTHONPYCACHEPREFIX"] = str(bytecode)
    statement = (
        f"import time, {before}; began = time.process_time(); import {module}; print(time.process_time() - began)"
    )
    command = [sys.executable, "-c", statement]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout)


def test_import(race: Race, tmp_path: Path) -> None:
    def check(ours: float, theirs: float) -> None:
        assert ours > 0 and theirs > 0

    ours = Contender("embcache", lambda _i: import_seconds("numpy", "embcache.table", tmp_path), seconds_of=float)
    peers = [Contender("import numpy", lambda _i: import_seconds("sys", "numpy", tmp_path), check, seconds_of=float)]
    race("overhead", "import embcache.table, beyond numpy", ours, peers, work=1, unit=MILLISECONDS, rounds=9)
