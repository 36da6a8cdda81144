"""Train a DLRM-style click model whose embedding tables do not fit in HBM, and show that nothing was lost.

    python examples/flights.py                        # the flights that left New York in 2013
    python examples/flights.py --criteo train.txt     # Criteo's format
    python examples/flights.py --synthetic 1000000 --zipf 1.1

Three runs start from the same values and see the same batches: HBM slots for a tenth of the rows; all rows resident;
plain ``nn.EmbeddingBag(sparse=True)``. The first two must end in bit-identical rows, or the exit status is 1; so it is
if plain PyTorch's test AUC is further away than 0.002.

In the end a process of its own trains the first run again, saves checkpoints as it goes, and is killed with SIGKILL in the middle
of an epoch. What the newest checkpoint holds is restored and trained to the end, and must be bit-identical too.

    python examples/flights.py --save DIR             # save the first run in the background
    python examples/flights.py --resume DIR           # and go on with it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import embcache as ec
from checkpoints import Checkpoints, train_until_killed
from clicks import Clicks
from comparison import first_difference, print_report
from criteo import load_criteo
from nycflights import load_flights
from runs import Setting, run_embcache, run_stock
from scores import auc
from synthetic import make_clicks

TRAIN_SHARE = 0.8
DIM = 16
DEFAULT_BATCH_SIZE = 1024
# (sparse, dense) learning rates of each optimizer.
LEARNING_RATES = {"adagrad": (0.05, 0.005), "adam": (0.001, 0.001), "sgd": (0.1, 0.05)}
AUC_TOLERANCE = 0.002
LEAST_STEPS_TO_KILL = 10  # before that many there may be no checkpoint yet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if both checks held."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    torch.use_deterministic_algorithms(True)
    # The dense model is small: a second thread would mostly wait, and on a busy machine wait long.
    torch.set_num_threads(1)
    # Plain PyTorch's sparse gradients would otherwise warn that they are not checked.
    torch.sparse.check_sparse_tensor_invariants.disable()

    train, test = load(options).split(TRAIN_SHARE)
    distinct = train.distinct()
    slots = split_slots(int(options.hbm_fraction * sum(distinct)), distinct)
    batch_size = fitting_batch_size(train, slots, options.batch_size)
    sparse_lr, dense_lr = LEARNING_RATES[options.optimizer]
    setting = Setting(DIM, batch_size, options.epochs, options.seed, options.optimizer, sparse_lr, dense_lr)
    print(
        f"{len(train):,} examples to train, {len(test):,} later ones to test, {len(train.features)} features; "
        f"{sum(distinct):,} rows of {DIM} floats and {options.optimizer} state; "
        f"{sum(slots):,} HBM slots, batches of {batch_size}\n",
        flush=True,
    )

    tables = [
        ec.TableConfig(name, DIM, initializer=ec.Uniform(-0.05, 0.05), seed=options.seed) for name in train.features
    ]
    small = [replace(table, hbm_rows=rows) for table, rows in zip(tables, slots, strict=True)]
    steps = options.epochs * -(-len(train) // batch_size)
    every = options.save_every or max(steps // 10, 1)
    checkpoints = Checkpoints(options.save, options.resume, every, options.kill_at)
    cached = run_embcache(f"{options.hbm_fraction:.0%} in HBM", small, train, test, setting, checkpoints)
    resident = run_embcache("all in HBM", tables, train, test, setting)
    stock = run_stock("nn.Embedding", tables, train, test, setting)
    runs = [cached, resident, stock]
    dies = not options.no_kill and options.resume is None and steps >= LEAST_STEPS_TO_KILL
    if dies:
        with tempfile.TemporaryDirectory() as folder:
            print(f"a process of its own trains {steps * 2 // 3} of {steps} steps and is killed")
            train_until_killed(given, folder, steps * 2 // 3)
            runs.append(
                run_embcache("killed, resumed", small, train, test, setting, Checkpoints(resume_from=Path(folder)))
            )
    print_report(runs)

    problems = []
    if dies and (difference := first_difference(cached, runs[-1])):
        problems.append(f"the run that was killed and resumed differs from {cached.name!r}: {difference}")
    if difference := first_difference(cached, resident):
        problems.append(f"rows differ between {cached.name!r} and {resident.name!r}: {difference}")
    if cached.swap_out_rows == 0 and options.hbm_fraction < 1:
        problems.append("no row was swapped out, so this run proves nothing; lower --hbm-fraction")
    gap = abs(cached.auc - stock.auc)
    if not gap <= AUC_TOLERANCE:
        problems.append(f"test AUC is {gap:.5f} away from plain PyTorch's; at most {AUC_TOLERANCE} is expected")
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        rows = sum(len(keys) for keys, _, _ in cached.rows.values())
        print(
            f"all {rows:,} rows (weights and state) and the dense model are bit-identical with {options.hbm_fraction:.0%} "
            f"and with all of the rows in HBM; plain PyTorch's AUC is {gap:.5f} away"
        )
        if dies:
            print("so are those of the run that was killed and resumed from its newest checkpoint")
    return 1 if problems else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--criteo", type=Path, metavar="FILE", help="train on a file in Criteo's format")
    source.add_argument("--synthetic", type=int, metavar="N", help="train on N made-up clicks")
    parser.add_argument("--zipf", type=float, default=1.1, metavar="A", help="skew of the made-up keys (default 1.1)")
    parser.add_argument("--batch-size", type=int, help=f"default {DEFAULT_BATCH_SIZE}, or less where HBM is small")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--hbm-fraction", type=float, default=0.1, help="share of the rows that HBM holds (default 0.1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=sorted(LEARNING_RATES), default="adagrad")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save checkpoints of the first run in DIR")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="default a tenth of all steps")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the newest checkpoint in DIR")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill this process with SIGKILL after a step")
    parser.add_argument("--no-kill", action="store_true", help="leave out the run that is killed and resumed")
    options = parser.parse_args(arguments)
    if options.synthetic is not None and options.synthetic < 10:
        parser.error(f"--synthetic {options.synthetic}: give 10 or more")
    if not 0 <= options.zipf <= 10:
        parser.error(f"--zipf {options.zipf}: give 0 (uniform) to 10")
    if options.batch_size is not None and options.batch_size < 1:
        parser.error(f"--batch-size {options.batch_size}: give 1 or more")
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: give 1 or more")
    if not 0 < options.hbm_fraction <= 1:
        parser.error(f"--hbm-fraction {options.hbm_fraction}: give more than 0 and at most 1")
    if options.save_every is not None and options.save_every < 1:
        parser.error(f"--save-every {options.save_every}: give 1 or more")
    return options


def load(options: argparse.Namespace) -> Clicks:
    """The data set that the options name."""
    if options.criteo:
        return load_criteo(options.criteo, TRAIN_SHARE)
    if options.synthetic:
        data, logits = make_clicks(options.synthetic, options.zipf, options.seed)
        cut = int(len(data) * TRAIN_SHARE)
        print(f"the model that made these clicks has a test AUC of {auc(data.labels[cut:], logits[cut:]):.4f}")
        return data
    return load_flights(TRAIN_SHARE)


def split_slots(budget: int, distinct: Sequence[int]) -> list[int]:
    """Share `budget` slots among tables: equal parts, but to none more than its rows nor less than one."""
    slots = [0] * len(distinct)
    left = budget
    for position, table in enumerate(sorted(range(len(distinct)), key=lambda table: distinct[table])):
        slots[table] = max(min(distinct[table], left // (len(distinct) - position)), 1)
        left -= slots[table]
    return slots


def fitting_batch_size(train: Clicks, slots: Sequence[int], asked: int | None) -> int:
    """`asked`, or the default halved until the rows of every batch fit in the slots."""
    size = min(asked or DEFAULT_BATCH_SIZE, len(train))
    while True:
        need = train.most_in_a_batch(size)
        tight = [name for name, rows, have in zip(train.features, need, slots, strict=True) if rows > have]
        if not tight:
            return size
        if asked is not None:
            raise SystemExit(
                f"batches of {asked} need more HBM slots than tables {', '.join(tight)} have; lower --batch-size"
            )
        size //= 2


if __name__ == "__main__":
    sys.exit(main())
