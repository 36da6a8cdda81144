"""Ranks: the processes that train one model together, and how they talk.

Everything goes through ``torch.distributed``; this file owns the process groups and knows what happens when one of the others is gone.
A group is used by one thread at a time, so each kind of thread has its own, a `Channel`; they are made once, in one order, for
all collections of a process group: ``load`` (a pipeline's loader), ``plan`` (who plans), ``train`` (who computes) and ``save`` (who writes).

Failure. A rank that dies closes its connections, and who waits for it hears of that at once. A rank that lives and cannot go on
leaves a note in the store of the process group (`Ranks.fail`): whoever waits looks for one every `LOOK_S` seconds. What neither
shows (a rank that hangs) ends with the groups' time limit. All three raise `RankError`, in every call from then on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..errors import ConfigError, RankError, RankRefusedError, shown

__all__ = ["LOOK_S", "Channel", "Ranks"]

LOOK_S = 1.0
NOTE = "embcache/failed"
CHANNELS = ("load", "plan", "train", "save")
DEVICES = {"nccl": "cuda", "hccl": "npu"}
POLL_S = 1e-4


class Channel:
    """One process group, for one thread at a time.

    Parameters
    ----------
    ranks : Ranks
    name : str
    group : ProcessGroup
    """

    def __init__(self, ranks: Ranks, name: str, group: Any) -> None:
        self.ranks, self.name, self.group = ranks, name, group
        self.bytes_sent = 0  # to other ranks; what is kept here does not travel
        self._busy = threading.Lock()

    def _wait(self, what: str, start: Any, on_device: bool = False) -> None:
        """Start a collective and wait for it; `RankError` where it cannot end."""
        ranks = self.ranks
        ranks.check()
        with self._busy:
            began = time.monotonic()
            try:
                work = start()
                while True:
                    try:
                        if on_device:  # there a wait that times out aborts the communicator
                            ends = time.monotonic() + LOOK_S
                            while not work.is_completed() and time.monotonic() < ends:
                                time.sleep(POLL_S)
                            if work.is_completed():
                                work.wait()
                                return
                        else:
                            work.wait(timedelta(seconds=LOOK_S))
                            return
                    except RuntimeError:
                        if work.is_completed():
                            work.wait()  # raises what it has failed with; else it has ended just after the time was up
                            return
                    ranks.look(what)
                    if time.monotonic() - began > ranks.timeout_s:
                        raise RankError(
                            f"rank {ranks.rank}: the others have not come to {what} for {ranks.timeout_s:g} s; one of them hangs, or they "
                            "train another number of batches: see their logs, and start all from the last generation"
                        )
            except RankError as error:
                ranks.fail(error)
                raise
            except RuntimeError as error:
                failure = RankError(
                    f"rank {ranks.rank}: {what} has failed, since another rank is gone ({str(error).splitlines()[0]}); start all ranks "
                    "again from the last generation"
                )
                ranks.fail(failure)
                raise failure from error

    def all_to_all(self, what: str, data: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send ``data[...]``, cut by `sent` along dimension 0, to the ranks in order; returns what they have sent here, likewise."""
        if self.ranks.world == 1:
            return data
        out = torch.empty((sum(received), *data.shape[1:]), dtype=data.dtype, device=data.device)
        row_bytes = data.element_size() * (data[0].numel() if data.dim() > 1 and len(data) else 1)
        self.bytes_sent += (sum(sent) - sent[self.ranks.rank]) * row_bytes
        self._wait(
            what,
            lambda: dist.all_to_all_single(
                out, data.contiguous(), list(received), list(sent), group=self.group, async_op=True
            ),
            on_device=not data.is_cpu,
        )
        return out

    def gather(self, what: str, values: Sequence[int]) -> list[list[int]]:
        """The `values` of each rank, as many on each."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        if self.ranks.world == 1:
            return [mine.tolist()]
        # To all at once, as few numbers are late, not many: an all-gather goes round from rank to rank.
        everywhere = mine.repeat(self.ranks.world, 1)
        out = torch.empty_like(everywhere)
        self.bytes_sent += mine.numel() * 8 * (self.ranks.world - 1)
        self._wait(what, lambda: dist.all_to_all_single(out, everywhere, group=self.group, async_op=True))
        numbers: list[list[int]] = out.tolist()
        return numbers

    def sum(self, what: str, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        total = values.clone()
        if self.ranks.world > 1:
            self.bytes_sent += total.numel() * total.element_size() * (self.ranks.world - 1)
            self._wait(what, lambda: dist.all_reduce(total, group=self.group, async_op=True))
        return total

    def gather_bytes(self, what: str, content: bytes) -> list[bytes]:
        """The `content` of each rank."""
        sizes = [size for (size,) in self.gather(what, [len(content)])]
        most = max(sizes)
        mine = torch.zeros(most, dtype=torch.uint8)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else mine[:0]
        if self.ranks.world == 1:
            return [content]
        theirs = [torch.empty_like(mine) for _ in range(self.ranks.world)]
        self._wait(what, lambda: dist.all_gather(theirs, mine, group=self.group, async_op=True))
        return [bytes(one[:size].tolist()) for one, size in zip(theirs, sizes, strict=True)]


class Ranks:
    """The ranks of a process group.

    Get it by `Ranks.of`: all collections of a process group share one.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        Default: that of all ranks. Without ``torch.distributed`` this process is the only rank.
    timeout_s : float
        How long a rank may keep the others waiting, at most; of several for one process group the shortest counts.

    Attributes
    ----------
    rank, world : int
    load, plan, train, save : Channel
    """

    load: Channel
    plan: Channel
    train: Channel
    save: Channel

    _known: ClassVar[list[tuple[Any, Ranks]]] = []

    def __init__(self, process_group: Any = None, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._failure: RankError | None = None
        self._store: Any = None
        self.collections = 0
        if not dist.is_available() or not dist.is_initialized():
            if process_group is not None:
                raise ConfigError("process_group is given, but torch.distributed is not initialized")
            self.rank, self.world = 0, 1
            for name in CHANNELS:
                setattr(self, name, Channel(self, name, None))
            return
        self.rank, self.world = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise ConfigError("this process is not in process_group; make the collection in its members only")
        members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.backend = dist.get_backend(process_group)
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            self._store = dist.distributed_c10d._get_default_store()
        self._note = NOTE
        # Only members make the groups of a part of the ranks; torch names such a group by how many each of them has made before.
        part = len(members) < dist.get_world_size()
        for name in CHANNELS:  # in this order, on all ranks
            group = None
            if self.world > 1:
                group = dist.new_group(
                    members,
                    timeout=timedelta(seconds=timeout_s),
                    backend=_for_training(self.backend) if name == "train" else "gloo",
                    use_local_synchronization=part,
                )
            setattr(self, name, Channel(self, name, group))
        # A store may outlive a process group: a note of its last life is not for this one.
        life = self.load.gather("the making of its groups", [time.time_ns()])[0][0]
        self._note = f"{NOTE}/{life}-{members[0]}-{len(members)}"

    @classmethod
    def of(cls, process_group: Any = None, timeout_s: float = 600.0) -> Ranks:
        """The ranks of `process_group`, with the groups that were made for it; made when first asked for, by all members."""
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 2**31:
            raise ConfigError(f"timeout_s = {shown(timeout_s)}; give a number of seconds > 0")
        if not dist.is_available() or not dist.is_initialized():
            cls._known.clear()
            return cls(process_group, timeout_s)
        key = process_group if process_group is not None else dist.group.WORLD
        cls._known[:] = [(group, ranks) for group, ranks in cls._known if _exists(group)]
        for group, ranks in cls._known:
            if group is key:
                ranks.timeout_s = min(ranks.timeout_s, timeout_s)
                return ranks
        made = cls(process_group, timeout_s)
        cls._known.append((key, made))
        return made

    def turn(self, thread: str, state: int, *more: int) -> list[list[int]]:
        """Tell the others a state, and as many numbers more on each, on the channel ``"load"`` or ``"plan"``; returns those of all ranks."""
        channel: Channel = getattr(self, thread)
        return channel.gather("the next batch", [state, *more])

    def settle(self, thread: str, what: str, error: BaseException | None) -> None:
        """Agree that all have done a thing; else raise `error`, or `RankRefusedError` for that of another rank.

        Parameters
        ----------
        thread : str
            Channel of the calling thread.
        what : str
        error : BaseException, optional
            What this rank has failed with.
        """
        if isinstance(error, RankError) and not isinstance(error, RankRefusedError):
            raise error
        channel: Channel = getattr(self, thread)
        states = channel.gather(what, [int(error is not None)])
        failed = [rank for rank, (state,) in enumerate(states) if state]
        if failed:
            self.refuse(thread, what, error, failed[0])

    def refuse(self, thread: str, what: str, error: BaseException | None, first: int) -> None:
        """All know that rank `first`, at least, has failed: raise `error`, or say what that one has failed with."""
        channel: Channel = getattr(self, thread)
        said = channel.gather_bytes(what, b"" if error is None else f"{type(error).__name__}: {error}".encode()[:1000])
        if error is not None:
            raise error
        raise RankRefusedError(
            f"{what}: rank {first} has failed with {said[first].decode('utf-8', 'replace')}; so rank {self.rank} has not done it either"
        )

    def next_number(self) -> int:
        """Number of a collection among those of these ranks, made in the same order on each."""
        self.collections += 1
        return self.collections

    # --------------------------------------------------------------------------------------------------------- failure

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: have the others know, who may be waiting for it. Again is no harm."""
        if self._failure is not None:
            return
        message = (
            str(error)
            if isinstance(error, RankError)
            else f"rank {self.rank} has failed with {type(error).__name__}: {error}"
        )
        remedy = "; start all ranks again from the last generation"
        self._failure = error if isinstance(error, RankError) else RankError(message + remedy)
        message = message.removesuffix(remedy)
        if self._store is not None and self.world > 1:
            with contextlib.suppress(RuntimeError):  # who holds the store may be gone
                self._store.set(self._note, message[:2000])

    def look(self, what: str) -> None:
        """`RankError` where another rank has left a note."""
        if self._store is None:
            return
        try:
            if not self._store.check([self._note]):
                return
            note = self._store.get(self._note).decode("utf-8", "replace")
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} waits for {what}, and the store of the process group, which rank 0 holds, is gone; start all ranks again "
                "from the last generation"
            ) from error
        # Kept here and not passed on: the others find the note of who has failed first.
        self._failure = self._failure or RankError(f"{note}; start all ranks again from the last generation")
        raise RankError(f"rank {self.rank} waits for {what} in vain: {self._failure}")

    def check(self) -> None:
        """`RankError` once a rank has failed."""
        if self._failure is not None:
            raise RankError(str(self._failure)) from self._failure

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world={self.world})"


def _exists(group: Any) -> bool:
    """Whether a process group has not been destroyed."""
    try:
        return len(dist.get_process_group_ranks(group)) > 0
    except (KeyError, ValueError, RuntimeError):
        return False


def _for_training(backend: str) -> str:
    """The backend of who computes: rows on a device by its own, and what is in host memory (headers, evaluation's keys) by gloo."""
    return f"cpu:gloo,{DEVICES[backend]}:{backend}" if backend in DEVICES else backend
