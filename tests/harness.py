"""Runs of a trainer that are killed at random and resumed, compared with one that nothing disturbs.

    def trains(store, trace):  # of a module; imports the trainer's library itself
        ...  # `store`: a directory for everstep, which resumes; None: a run without everstep
        trace.resumed(step)  # the step that was restored, 0 for none
        for step in ...:
            trace.note("loss", step, loss)  # after each update; a number, or anything digest takes
            trace.note("evaluation", step, value)  # whatever must come in no resumed run otherwise
        trace.end(model=model, optimizer=optimizer, counters={"epoch": 3, ...})

    def test_trainer(tmp_path):
        check_resumes(trains, tmp_path, steps=24, epoch=8, kills=3, seed=random_seed())

Each life is a process of its own (`Forked`), which appends to a file. A life is killed by SIGKILL
from within: up to `late` step times after it noted the loss of a chosen step, so that all moments
of a step, of an evaluation and of an epoch's end are met. One of the kills is at an epoch's end,
the others anywhere. Losses are counted by updates from 1 on; other things under any number.

What is compared: every note of every life with that of the undisturbed run (a step that was lost is
trained again, to the same loss), that none is missing, what end() was given (by digests of its
bytes), and that each life went on where the one before it had come.
"""

import ctypes
import hashlib
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forked
from stores import end_keeper

_DIES_WITH_ITS_PARENT = 1  # PR_SET_PDEATHSIG
LIBRARIES = [
    "torchdata.stateful_dataloader", "accelerate", "lightning.pytorch", "peft", "prodigyopt",
    "schedulefree", "transformers.models.gpt2.modeling_gpt2", "transformers.trainer",
]  # fmt: skip
Trains = Callable[[Path | None, "Trace"], None]


def random_seed() -> int:
    """Another one each time, or that of EVERSTEP_SEED."""
    return int(os.environ.get("EVERSTEP_SEED") or random.SystemRandom().randrange(1 << 32))


def digest(value: Any) -> str:
    """The same for equal bytes, and only for them: of numbers, tensors, containers, and of what has
    a state_dict()."""
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point():
        value = value.double().item()
    if isinstance(value, float):
        return value.hex()
    return _digest_of(value) if _is_large(value) else repr(value)


class Trace:
    """What one life tells, a line each: what, number, digest."""

    def __init__(self, path: Path, kill_at: int | None = None, late: float = 0.0) -> None:
        """`kill_at`: the step after whose loss the process is killed, by `late` step times."""
        self.path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  # as long as the process
        self._kill_at, self._late = kill_at, late
        self._last_loss_s = time.monotonic()
        self._killer: threading.Thread | None = None

    def resumed(self, step: int) -> None:
        """The life goes on from there."""
        self.note("resumed", step, None)

    def note(self, what: str, step: int, value: Any) -> None:
        """Say what was found at `step`."""
        print(what, step, digest(value), sep="\t", file=self._file)
        if what == "loss":
            now = time.monotonic()
            step_s, self._last_loss_s = now - self._last_loss_s, now
            if self._kill_at is not None and step >= self._kill_at and self._killer is None:
                self._kill_after(step_s * self._late)  # it may have come farther before it died

    def end(self, **state: Any) -> None:
        """The run is complete, with this state. Does not return where a kill is still to come."""
        if self._killer:
            self._killer.join()
        for name, value in state.items():
            self.note(f"end {name}", 0, value)

    def _kill_after(self, seconds: float) -> None:
        def kill() -> None:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

        if not seconds:
            os.kill(os.getpid(), signal.SIGKILL)
        self._killer = threading.Thread(target=kill, name="killer", daemon=True)
        self._killer.start()


class _OtherTrace(Trace):
    """What another rank tells, beside the first one."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank

    def resumed(self, step: int) -> None:
        """The first one says so."""

    def note(self, what: str, step: int, value: Any) -> None:
        """The same under a name of its own."""
        super().note(f"{what} of rank {self._rank}", step, value)


def trains_on_ranks(count: int, trains: Trains, store: Path | None, trace: Trace) -> None:
    """`trains` as torchrun would call it, in this process and in others that end with it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= address | sizes | {"GLOO_SOCKET_IFNAME": "lo"}
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    others = [
        multiprocessing.Process(target=_other_rank, args=(rank, trains, store, trace.path))
        for rank in range(1, count)
    ]
    for other in others:
        other.start()
    _rank(0, trains, store, trace)
    for other in others:
        other.join()
    assert not any(other.exitcode for other in others), "another rank failed"


def trains_on_two_ranks(trains: Trains, store: Path | None, trace: Trace) -> None:
    """The same on two."""
    trains_on_ranks(2, trains, store, trace)


def _other_rank(rank: int, trains: Trains, store: Path | None, path: Path) -> None:
    ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
    _rank(rank, trains, store, _OtherTrace(path, rank))


def _rank(rank: int, trains: Trains, store: Path | None, trace: Trace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    trains(store, trace)
    torch.distributed.destroy_process_group()


def check_resumes(
    trains: Trains,
    folder: Path,
    *,
    steps: int,
    epoch: int,
    seed: int,
    kills: int = 1,
    late: float = 2.0,
    losses_per_save: int = 1,
    method: str = "forkserver",
) -> None:
    """Asserts that a run of `steps` updates, of which an epoch has `epoch`, is the same when it is
    killed `kills` times. `method`: how its processes are started ("spawn" where they use a GPU)."""
    print(f"EVERSTEP_SEED={seed}")
    chance = random.Random(seed)
    expected = live(trains, None, folder, "undisturbed", method=method)
    moments = _moments(chance, steps, epoch, kills)
    store, last = folder / "store", 0
    found: dict[tuple[str, str], str] = {}
    try:
        for life, moment in enumerate([*moments, None], 1):
            if moment is not None and last >= steps:
                continue  # the last life came to the end before it died
            lateness = chance.choice([0.0, chance.uniform(0, late)])
            print(f"life {life}: killed {lateness:.2f} step times after step {moment}")
            notes = live(trains, store, folder, f"life-{life}", moment, lateness, method)
            resumed = [int(step) for what, step in notes if what == "resumed"]
            assert resumed, f"life {life} does not say trace.resumed(step)"
            lost = last - resumed[0]  # the one that was not saved, and one that was on its way
            assert lost <= 2 * losses_per_save, (
                f"life {life} resumed {resumed[0]}, {last} was reached"
            )
            last = max(_losses(notes), default=resumed[0])
            found |= _checked(life, notes, expected)
    finally:
        end_keeper(store)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    assert max(_losses(expected)) == steps, f"there are not {steps} steps: {_losses(expected)}"


def _moments(chance: random.Random, steps: int, epoch: int, kills: int) -> list[int]:
    """The steps of the kills: one at an epoch's end, where there is room for several."""
    ends = list(range(epoch, steps + 1, epoch))
    others = [step for step in range(2, steps) if step not in ends]
    at_end = chance.sample(ends, 1) if kills > 1 or chance.random() < 0.5 else []
    return sorted(at_end + chance.sample(others, kills - len(at_end)))


def live(
    trains: Trains,
    store: Path | None,
    folder: Path,
    name: str,
    kill_at: int | None = None,
    late: float = 0.0,
    method: str = "forkserver",
) -> dict[tuple[str, str], str]:
    """One life to its end; its notes, by what and number."""
    forked.preload(*LIBRARIES)
    notes, printed = folder / name, folder / f"{name}.printed"
    kind = {"forkserver": _Parent, "spawn": _Spawned}[method]
    with kind(_main, trains, store, notes, printed, kill_at, late) as process:
        returncode = process.wait(timeout=600)
    text = printed.read_text(errors="replace")[-5000:] if printed.exists() else ""
    wanted = 0 if kill_at is None else -signal.SIGKILL
    assert returncode == wanted, f"{name} ended with {returncode}, not {wanted}: {text}"
    return _notes(notes)


class _Parent(forked.Forked):
    """A process that may have processes of its own: loaders' workers."""

    daemon = False


class _Spawned(_Parent):
    """One that is forked from nothing: nobody before it can have touched a GPU."""

    method = "spawn"


def _main(
    trains: Trains, store: Path | None, notes: Path, printed: Path, kill_at: int | None, late: float
) -> None:
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    multiprocessing.set_start_method("fork", force=True)  # loaders' workers, as in any program
    trains(store, Trace(notes, kill_at, late))


def _notes(path: Path) -> dict[tuple[str, str], str]:
    """A step is noted once in a life."""
    rows = [line.split("\t", 2) for line in path.read_text().splitlines()]
    notes = {(what, step): value for what, step, value in rows}
    assert len(notes) == len(rows), f"{path.name} says something twice: {rows}"
    return notes


def _losses(notes: Mapping[tuple[str, str], str]) -> list[int]:
    return [int(step) for what, step in notes if what == "loss"]


def _checked(
    life: int, notes: Mapping[tuple[str, str], str], expected: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], str]:
    """Those notes of a life, but for where it began, that are as in the undisturbed run: all."""
    said = {key: value for key, value in notes.items() if key[0] != "resumed"}
    for key, value in said.items():
        assert key in expected, f"life {life} says {key}, the undisturbed run does not"
        assert value == expected[key], f"life {life} has another {key}: {value}, {expected[key]}"
    return said | {key: expected[key] for key in expected if key[0] == "resumed"}


def _is_large(value: Any) -> bool:
    kinds = (torch.Tensor, np.ndarray, Mapping, list, tuple)
    return isinstance(value, kinds) or hasattr(value, "state_dict")


def _digest_of(value: Any) -> str:
    sums = hashlib.sha256()
    _add(value, sums.update)
    return sums.hexdigest()[:32]


def _add(value: Any, update: Callable[[bytes], None]) -> None:
    if hasattr(value, "state_dict"):
        _add(value.state_dict(), update)
    elif isinstance(value, torch.Tensor):
        shard = value.to_local() if hasattr(value, "to_local") else value
        tensor = shard.detach().cpu().contiguous()
        update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            update(f"{key!r}:".encode())
            _add(value[key], update)
    elif isinstance(value, (list, tuple)):
        update(f"{len(value)}[".encode())
        for item in value:
            _add(item, update)
    else:
        update((value.hex() if isinstance(value, float) else repr(value)).encode() + b";")
