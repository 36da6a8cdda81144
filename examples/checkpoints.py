"""Saving a run as it goes, going on with a saved one, and a run that is killed on the way.

A checkpoint holds the tables wherever their rows are, the dense model, both optimizers, and the number of steps that have
trained. It is written in the background: only what changed since the last one, and a whole one when that no longer pays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import embcache as ec

if TYPE_CHECKING:
    from runs import Setting

__all__ = ["Checkpoints", "train_until_killed"]

KEPT = 3


@dataclass
class Checkpoints:
    """Where a run is saved and how often, and where it comes from.

    Attributes
    ----------
    save_to, resume_from : path, optional
    every : int
        Steps from one save to the next.
    kill_at : int, optional
        After this step the process kills itself with SIGKILL, which nothing can catch or clean up after.
    saving : embcache.Saving, optional
        The save that is being written. What it has failed with is raised before the next one begins, and by `finish`.
    """

    save_to: Path | None = None
    resume_from: Path | None = None
    every: int = 25
    kill_at: int | None = None
    saving: ec.Saving | None = None

    def resume(self, model: torch.nn.Module, dense: torch.optim.Optimizer, setting: Setting) -> int:
        """Restore model and optimizers if there is a run to go on with; returns the number of steps that have trained."""
        if self.resume_from is None:
            return 0
        report = ec.restore(model, self.resume_from)
        if report.state["setting"] != asdict(setting):
            raise SystemExit(f"{self.resume_from} holds a run with other options: {report.state['setting']}")
        dense.load_state_dict(report.state["dense"])
        print(f"generation {report.generation} of {self.resume_from}: {report.state['steps']} steps have trained")
        return int(report.state["steps"])

    def after_step(self, step: int, model: torch.nn.Module, dense: torch.optim.Optimizer, setting: Setting) -> None:
        """Save if it is time to, and die if it is."""
        if self.save_to is not None and step % self.every == 0:
            state = {"steps": step, "dense": dense.state_dict(), "setting": asdict(setting)}
            self.finish()
            self.saving = ec.save(model, self.save_to, delta=True, background=True, state=state, keep=KEPT)
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        """Wait for the save that is being written; raises what it has failed with: a run that is not saved should say so."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()


def train_until_killed(arguments: Sequence[str], folder: str, step: int) -> None:
    """Run the demo with these arguments in a process of its own, which saves into `folder` and is killed after `step`."""
    script = str(Path(__file__).with_name("flights.py"))
    command = [sys.executable, script, *arguments, "--save", folder, "--kill-at", str(step)]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # it finds its neighbours
    ran = subprocess.run(command, env=own, stdout=subprocess.DEVNULL, check=False)
    if ran.returncode != -signal.SIGKILL:
        raise SystemExit(f"the process that was to be killed after step {step} ended with {ran.returncode}")
