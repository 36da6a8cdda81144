"""TrainPipeline: Ctrl-C, forks, the end of the interpreter, workers of a DataLoader."""

from __future__ import annotations

import _thread
import os
import random
import signal
import subprocess
import threading
from typing import Any

import pytest
import torch
from pairs import Deadly, Pairs
from pipelines import SOAK, Model, batches, run_child, same, script, serial, sgd, threads_end, train

import embcache as ec
from embcache.timeline import WAITS, Timeline

_threads_end = pytest.fixture(autouse=True)(threads_end)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hits a finalizer is lost
def test_interrupts_anywhere_leave_a_pipeline_that_goes_on() -> None:
    """KeyboardInterrupt at arbitrary moments of the caller's thread."""
    model = Model(rows=24)
    source = (batch for _ in range(10**6) for batch in batches(100))
    armed, stop = [False], threading.Event()

    def handle(number: int, frame: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    def interrupt() -> None:
        pause = 1e-4
        while not stop.wait(pause):
            pause = pause * 1.3 % 0.01 + 1e-4
            _thread.interrupt_main()

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=interrupt)
    try:
        with ec.TrainPipeline(model, sgd(model), depth=4) as pipe:
            thread.start()
            interrupted = 0
            while interrupted < 200 * SOAK:
                try:
                    armed[0] = True
                    for _ in range(5):
                        pipe.progress(source)
                    armed[0] = False
                except KeyboardInterrupt:
                    interrupted += 1
            armed[0] = False
            done = pipe.batches_done
            for _ in range(5):
                pipe.progress(source)
            assert pipe.batches_done == done + 5
        for _ in range(20):  # interrupts while it starts and closes
            pipe = ec.TrainPipeline(model, sgd(model), depth=4)
            closed = False
            while not closed:
                try:
                    armed[0] = True
                    pipe.progress(source)
                    pipe.close()
                    armed[0] = False
                    closed = True
                except (KeyboardInterrupt, ec.ClosedError):
                    armed[0] = False
                    pipe.close()
                    closed = True
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert model.rows.manager.stats()["pinned"] == 0 and model.rows.manager.outstanding == 0
    model.rows.manager.planner.check()


def test_a_forked_child_is_refused_and_harms_nobody() -> None:
    model = Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        source = batches(20)
        train(pipe, source, 3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pipe.progress(source)
            except ec.ForkError:
                pipe.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(train(pipe, source)) == 17


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "del model",
        "pipe._flow.ready[0].started = True",
        "import atexit; atexit.register(lambda: pipe.close())",
    ],
)
def test_the_interpreter_ends_with_threads_alive(end: str) -> None:
    """CASES.md 43: no crash, no hang, whatever the threads were doing."""
    body = f"model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); source = batches(10**6)\ntrain(pipe, source, 5)\n{end}"
    ran = run_child(body)
    assert ran.returncode == 0 and ran.stderr == "", ran


def test_the_interpreter_ends_while_the_iterator_is_stuck() -> None:
    body = (
        "import itertools\ndef stuck():\n    yield from batches(2)\n    time.sleep(3600)\n"
        "model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); train(pipe, stuck(), 2)"
    )
    ran = run_child(body)
    assert ran.returncode == 0, ran


LIVES = """
import os, random, shutil, signal, tempfile

torch.set_num_threads(1)
serial(Model(), batches(2))  # what a first use imports is here before the children are
gc.freeze()  # else most of a child's end is the interpreter's search through torch's modules

def life(seed, told, folder):
    global model, pipe, source  # alive to the very end, with the threads
    draw = random.Random(seed)

    def leave(*_):
        os.write(told, b"%.6f " % time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # again, where a finalizer has swallowed it
        sys.exit(0)

    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 0.15))
    try:
        while True:
            model = Model(rows=draw.choice([16, 40, None]))
            pipe = ec.TrainPipeline(model, sgd(model), depth=draw.randint(1, 6), lookahead=draw.choice([0, 3]))
            for _ in range(2):
                source = batches(draw.randint(1, 30), keys=40)
                train(pipe, source)
                model.eval()
                pipe.progress(batches(1))
                model.train()
                if draw.random() < 0.5:
                    ec.save(model, f"{folder}/{id(model)}", background=True)
            if draw.random() < 0.7:
                pipe.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

for seed in range(FIRST, FIRST + COUNT):
    heard, told = os.pipe()
    folder = tempfile.mkdtemp()
    child = os.fork()
    if child == 0:
        life(seed, told, folder)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended = time.monotonic()
    shutil.rmtree(folder)
    os.close(told)
    began = float(os.read(heard, 4096).split()[0])
    os.close(heard)
    print(seed, status, "%.3f" % (ended - began), flush=True)
"""


def test_a_process_ends_at_any_moment_of_a_pipelines_life() -> None:
    """Made, training, evaluating, saving, ended, closing: each child is told to exit at a drawn moment, and does, without an error."""
    count, first = 8 * SOAK, random.randrange(10**9) if SOAK > 1 else 0
    ran = run_child(LIVES.replace("FIRST", str(first)).replace("COUNT", str(count)), timeout_s=240 + 10 * count)
    assert ran.returncode == 0, ran.stderr
    lives = [line.split() for line in ran.stdout.splitlines()]
    assert len(lives) == count and [seed for seed, status, _ in lives if status != "0"] == [], (lives, ran.stderr)
    assert max(float(seconds) for *_, seconds in lives) < 20, lives  # most of it the interpreter's own end


def test_an_uncaught_error_ends_the_process() -> None:
    body = "model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); train(pipe, batches(10**6), 5)\nraise ZeroDivisionError"
    ran = run_child(body)
    assert ran.returncode == 1 and "ZeroDivisionError" in ran.stderr, ran


def test_sigint_ends_a_training_process() -> None:
    body = (  # a shell that starts the tests in the background has SIGINT ignored, by what it starts and its children
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "model = Model(); pipe = ec.TrainPipeline(model, sgd(model)); source = batches(10**9)\n"
        "train(pipe, source, 5); print('ready', flush=True); train(pipe, source)"
    )
    with subprocess.Popen(script(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        try:
            _, errors = child.communicate(timeout=120)
        finally:
            child.kill()
    assert child.returncode in (1, -signal.SIGINT, 130) and "KeyboardInterrupt" in errors


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_data_loader(method: str, persistent: bool) -> None:
    """CASES.md 61: workers that were forked beside the pipeline's threads, in two epochs."""
    if method == "spawn" and persistent:
        pytest.skip("the other three tell as much")
    one, other = Model(), Model()
    loader = torch.utils.data.DataLoader(
        Pairs(), batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    with ec.TrainPipeline(other, sgd(other)) as pipe:
        found = [train(pipe, iter(loader)) for _ in range(2)]
    plain = [Pairs()[place] for place in range(12)]
    assert found == [serial(one, iter(plain)) for _ in range(2)] and same(one, other)


def test_a_worker_that_is_killed() -> None:
    """The loader's error is the caller's, and neither hangs; the pipeline goes on with another iterator."""
    model = Model()
    loader = torch.utils.data.DataLoader(Deadly(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    with ec.TrainPipeline(model, sgd(model), depth=2) as pipe:
        with pytest.raises((RuntimeError, OSError)):
            train(pipe, iter(loader))
        trained = 0
        for _ in range(
            4
        ):  # torch's handler of the signal may have said so first; the iterator's own error comes in its turn
            try:
                trained = len(train(pipe, batches(10)))
                break
            except (RuntimeError, OSError):
                continue
        assert trained >= 10
    assert (model.rows.manager.outstanding, model.rows.manager.stats()["pinned"]) == (0, 0)
    model.rows.manager.planner.check()


class Interrupting(Timeline):
    """Sends SIGINT to the main thread when a stage begins, or ends, for so many times each so many."""

    def __init__(self, stage: str, seed: int) -> None:
        super().__init__()
        self._stage, self._draw, self.armed = stage, random.Random(seed), False
        self.sent = 0

    def _look(self, stage: str) -> None:
        if stage == self._stage and self.armed and self._draw.random() < 0.4:
            self.armed = False
            self.sent += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def start(self, stage: str, number: int) -> float:
        self._look(stage)
        return super().start(stage, number)

    def stop(self, stage: str, number: int, start: float, *more: Any) -> None:
        super().stop(stage, number, start, *more)
        self._look(stage)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hits a finalizer is lost
@pytest.mark.parametrize("stage", ["load", "prepare", "plan", "compute", *WAITS])
def test_interrupts_while_each_stage_begins_and_ends(stage: str) -> None:
    """Whatever the other threads do at that moment: a batch whose step was interrupted is passed over, no other one is lost."""
    model, listening = Model(rows=16), [False]

    def handle(number: int, frame: Any) -> None:
        if listening[0]:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        interrupt_and_train(model, stage, listening)
    finally:
        listening[0] = False
        signal.signal(signal.SIGINT, before)
    assert (model.rows.manager.outstanding, model.rows.manager.stats()["pinned"]) == (0, 0)
    model.rows.manager.planner.check()


def interrupt_and_train(model: Model, stage: str, listening: list[bool]) -> None:
    with ec.TrainPipeline(model, sgd(model), depth=3) as pipe:
        times = Interrupting(stage, seed=len(stage))
        pipe._flow.timeline = times
        total = 200 * SOAK
        source, interrupted, going = batches(total, keys=40), 0, True
        while going:
            try:
                try:
                    listening[0] = times.armed = True
                    while True:
                        pipe.progress(source)
                except StopIteration:
                    listening[0] = times.armed = going = False
            except KeyboardInterrupt:
                interrupted += 1
        assert interrupted <= times.sent and pipe.batches_done <= total <= pipe.batches_done + times.sent
        assert pipe._flow.pulled == total
