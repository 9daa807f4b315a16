"""A process of the bench: one contender (or one rank of it) with its own model, driven by a Gang.

Standard output belongs to the replies: whatever else prints there goes to standard error, which
the parent keeps as this worker's log.
"""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import everstep
from benchmarks.contenders import (
    KINDS,
    Directory,
    Finish,
    Finished,
    checkpointer_of,
    digest,
    state_bytes,
    sync_directory,
)
from benchmarks.machine import evict, filled_buffer, plain_read, touch_memory
from everstep.cli import workload

RUN_STEPS = 1000
SMALL = workload.Shape(4, heads=4, width=128, sequence=32, batch=4, learning_rate=1e-3)
"""The size "small", beside those of the demo."""
TEXT_BYTES = 1 << 20
RESTORE_MEMORY = 10
"""Of the parameters' bytes: more than any restore takes at once."""
SMALL_FLOATS = 256
"""Of each tensor where it is their number that is measured."""
TENSORS_PER_PARAMETER = 4  # itself, two moments, a step counter


@dataclass(slots=True)
class Call:
    """One call after an update. Times are of `time.perf_counter`."""

    step: int
    due: bool
    began: float
    returned: float
    finish: Finish | None

    def wait(self) -> Finished:
        """Block until the save is finished."""
        return self.finish() if self.finish else Finished(self.returned)


class Worker:
    """One contender, its run, and the number of the last step. It either saves (`start` first), or
    restores once, or counts calls: as processes of a user's do."""

    def __init__(
        self,
        kind: str,
        root: str,
        params: str,
        every: int,
        rank: int,
        ranks: int,
        port: int,
        parallel: str = "fsdp2",
        **options: Any,
    ) -> None:
        """`options`: what the contender takes beside run, root and `every`."""
        self._kind, self._options = kind, options
        self._root = Path(root)
        self._params, self._every = params, every
        self._rank, self._ranks, self._parallel = rank, ranks, parallel
        self._step = 0
        self._calls: Callable[[int], dict[str, Any]] | None = None
        self._closing = contextlib.ExitStack()
        workload.SHAPES.setdefault("small", SMALL)  # type: ignore[arg-type, call-overload]
        if ranks > 1:
            torch.set_num_threads(1)
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            numbers["LOCAL_WORLD_SIZE"] = ranks
            os.environ.update({name: str(value) for name, value in numbers.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            dist.init_process_group("gloo")

    # Saving

    def start(self, saves: int) -> dict[str, Any]:
        """Build the run; then so many saves off the clock: they fill buffers, start processes,
        build plans."""
        self._run = self._built(seed=1)
        self._run.train_step()
        self._contender = self._made(self._run)
        self._step = self._contender.open()
        for _ in range(saves):
            self._discard([self._save_alone()])
        return {"state_bytes": state_bytes(self._run), "everstep": everstep.__file__}

    def block(self, steps: int, lead: int) -> dict[str, Any]:
        """Train `lead` (at least one) untimed and `steps` timed steps, saving where due; let the
        saves finish."""
        self._contender.begin_block()
        first = self._next_due(lead)
        early = [self._one(number) for number in range(first - lead, first)]
        early[0].wait()
        self._line_up()
        began = time.perf_counter()
        calls = [self._one(number) for number in range(first, first + steps)]
        seconds = time.perf_counter() - began
        self._step = first + steps - 1
        due = [call for call in calls if call.due]
        finished = [(call.began, call.wait()) for call in due]
        self._contender.settle()
        self._discard([call for call in early + calls if call.due])
        return {
            "step_s": [seconds / steps],
            "call_s": [call.returned - call.began for call in due],
            "finished_s": [found.at - began for began, found in finished],
            "held_s": [found.held_at - began for began, found in finished if found.held_at],
            "bytes": _mean([found.bytes for _, found in finished if found.bytes]),
        }

    def alone(self) -> dict[str, Any]:
        """One save while no training goes on: how long until it is finished, and how long to make
        its files durable after that."""
        call = self._save_alone()
        reply = self._measured(call)
        self._discard([call])
        return reply

    def keep(self) -> dict[str, Any]:
        """Save a last time and keep it: its step, and a digest of what must come back."""
        call = self._save_alone()
        return {**self._measured(call), "step": call.step, "expected": self._digest(self._run)}

    # Restoring, in a process that did nothing before

    def restore(self, step: int, expected: str, cold: bool) -> dict[str, Any]:
        """Restore into a fresh run, and compare."""
        run = self._built(seed=2)
        self._contender = self._made(run)
        read = self._contender.reader(run, step)
        touch_memory(RESTORE_MEMORY * sum(tensor.nbytes for tensor in run.model.parameters()))
        if cold:
            evict(self._root)
        self._line_up()
        began = time.perf_counter()
        read()
        seconds = time.perf_counter() - began
        is_equal = self._kind == "plain" or self._digest(run) == expected
        return {"seconds": seconds, "equal": is_equal}

    def write_log(self, records: list[int]) -> dict[str, Any]:
        """Write a base, at step 1, and the records after it: what must come back after so many."""
        run = self._built(seed=1)
        run.clip = everstep.clip_grad_norm_
        expected = {}
        with checkpointer_of(run, self._root, 1, "log") as checkpointer:
            for step in range(1, max(records) + 2):
                run.train_step()
                checkpointer.step(step)
                expected[str(step - 1)] = self._digest(run)
            checkpointer.wait("local")
        store = everstep.Store(self._root)
        sizes = [store.manifest(step).size for step in (1, max(records) + 1)]
        return {"expected": expected, "base_bytes": sizes[0], "record_bytes": sizes[1]}

    def parts_of_log(self, records: int) -> dict[str, Any]:
        """What replaying a log cannot do without, each by itself: a plain read of each record's
        bytes with a digest of them, and an optimizer's update."""
        run = self._built(seed=2)
        self._contender = self._made(run)
        self._contender.reader(run, 1)()
        evict(self._root)
        reads, updates = [], []
        for step in range(2, records + 2):
            files = self._contender.files(step)
            buffer = filled_buffer(max(path.stat().st_size for path in files))
            began = time.perf_counter()
            for path in files:
                size = plain_read(path, buffer)
                with memoryview(buffer) as view:
                    xxhash.xxh3_128_digest(view[:size])
            reads.append(time.perf_counter() - began)
            for parameter in run.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            began = time.perf_counter()
            run.optimizer.step()
            updates.append(time.perf_counter() - began)
        return {"read_s": reads, "update_s": updates}

    # Counting calls

    def calls(self, tensors: int, saves: int, strategy: str) -> dict[str, Any]:
        """Saves of so many small tensors, each waited for: the call, and what of it was spent in
        state_dict() methods of the user's own; and those of torch's, called by themselves."""
        if self._calls is None:
            self._calls = self._calls_of(tensors, strategy)
            self._calls(saves)  # the first builds plans
        return self._calls(saves)

    def _calls_of(self, tensors: int, strategy: str) -> Callable[[int], dict[str, Any]]:
        count = max(1, tensors // TENSORS_PER_PARAMETER)
        model = nn.ParameterList(nn.Parameter(torch.randn(SMALL_FLOATS)) for _ in range(count))
        run = self._built(seed=1)
        run.model, run.optimizer = model, torch.optim.AdamW(model.parameters(), fused=True)
        checkpointer = checkpointer_of(run, self._root, 1, strategy, keep=2)
        self._closing.callback(checkpointer.close)
        step = checkpointer.restore()

        def update() -> None:
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            run.optimizer.step()

        def measure(saves: int) -> dict[str, Any]:
            nonlocal step
            rows = []
            for _ in range(saves):
                update()
                step += 1
                user_s = checkpointer.metrics.user_seconds
                began = time.perf_counter()
                handle = checkpointer.step(step)
                called = time.perf_counter()
                assert handle
                handle.wait("local")
                user_s = checkpointer.metrics.user_seconds - user_s
                waited = time.perf_counter()
                model.state_dict(), run.optimizer.state_dict()
                row = (called - began, user_s, waited - called, time.perf_counter() - waited)
                rows.append(row)
            names = ("call_s", "user_s", "local_s", "state_dict_s")
            return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

        return measure

    def close(self) -> dict[str, Any]:
        """End the contender's processes, on all ranks."""
        self._closing.close()
        if self._ranks > 1:
            dist.barrier()  # the store is rank 0's
            dist.destroy_process_group()
        return {}

    def _built(self, seed: int) -> workload.Run:
        text = workload.load_text()[:TEXT_BYTES]
        shard = _shard if self._ranks > 1 and self._parallel == "fsdp2" else lambda model: None
        run = workload.build(text, seed=seed, steps=RUN_STEPS, size=self._params, shard=shard)  # type: ignore[arg-type]
        if self._ranks > 1 and self._parallel == "ddp":
            run.model = DistributedDataParallel(run.model)
        return run

    def _made(self, run: workload.Run) -> Directory:
        contender = KINDS[self._kind](run, self._root, self._every, **self._options)
        self._closing.callback(contender.close)
        return contender

    def _one(self, number: int) -> Call:
        self._run.train_step()
        return self._call(number, number % self._every == 0)

    def _call(self, number: int, due: bool) -> Call:
        began = time.perf_counter()
        finish = self._contender.step(number, due)
        return Call(number, due, began, time.perf_counter(), finish)

    def _save_alone(self) -> Call:
        self._step = self._next_due(0)
        self._run.train_step()
        self._line_up()
        call = self._call(self._step, due=True)
        call.wait()
        return call

    def _next_due(self, lead: int) -> int:
        """The first step that is due, with `lead` steps between it and the last."""
        return -(-(self._step + lead + 1) // self._every) * self._every

    def _measured(self, call: Call) -> dict[str, Any]:
        finished_s = call.wait().at - call.began
        self._line_up()
        files = self._contender.files(call.step)
        began = time.perf_counter()
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        for directory in {path.parent for path in files} | {self._root}:
            sync_directory(directory)
        sync_s = time.perf_counter() - began
        size = sum(path.stat().st_size for path in files)
        return {"finished_s": finished_s, "sync_s": sync_s, "bytes": size}

    def _discard(self, calls: list[Call]) -> None:
        for call in calls:
            call.wait()
        self._line_up()
        if self._rank == 0:
            self._contender.discard([call.step for call in calls])
        self._line_up()

    def _line_up(self) -> None:
        """Wait for the other ranks, where there are some."""
        if self._ranks > 1:
            dist.barrier()

    def _digest(self, run: workload.Run) -> str:
        return digest(run, with_generators=self._ranks == 1)


def _mean(values: list[int]) -> list[float]:
    return [sum(values) / len(values)] if values else []


def _shard(model: nn.Module) -> None:
    """FSDP2: a group for each block, and one for the rest."""
    assert isinstance(model, workload.GPT)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(**json.loads(sys.argv[1]))
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001  whatever it is, the other contenders go on
            traceback.print_exc()
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
