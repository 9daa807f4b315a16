"""One rank of a gang: gets calls, makes a process group for each, answers what came of it."""

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

STACKS_SIGNAL = signal.SIGUSR2
MAIN_THREAD = "in _answer"
"""It is in the main thread's stack, which faulthandler writes last."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call, and the world to call it in."""

    function: bytes
    """A pickle of the function, by reference, and its arguments."""

    size: int
    name: str
    timeout_s: float
    environ: dict[str, str]
    folder: str
    path: list[str]


def main(rank: int, test: int, port: int, parent: Connection, printed: str, stacks: str) -> None:
    """Call what `parent`, of the process `test`, says, until it says None."""
    threading.Thread(target=_end_with, args=(test,), name="end with the test", daemon=True).start()
    output = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    dump = open(stacks, "w")  # noqa: SIM115  open as long as the process is
    faulthandler.register(STACKS_SIGNAL, file=dump, all_threads=True)
    torch.set_num_threads(1)
    unseen = _Unseen()
    store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=30))
    while (received := pickle.loads(parent.recv_bytes())) is not None:  # noqa: S301
        parent.send_bytes(pickle.dumps(_answer(rank, store, received, unseen)))


def _end_with(process: int) -> None:
    """A rank that hangs must not outlive a test that was killed."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(rank: int, store: dist.Store, call: Call, unseen: "_Unseen") -> tuple[str, object]:
    try:
        with _world(rank, store, call):
            function, args, keywords = pickle.loads(call.function)  # noqa: S301
            content = pickle.dumps(function(*args, **keywords))
            del function, args, keywords
            gc.collect()
    except BaseException:  # noqa: BLE001  a rank answers, whatever happens
        return "raised", "\n".join([traceback.format_exc(), *unseen.texts])
    if unseen.texts:
        return "raised", "\n".join(["where nobody looked:", *unseen.texts])
    return "returned", content


@contextlib.contextmanager
def _world(rank: int, store: dist.Store, call: Call):
    """A process group of its own, and everything else as in a process that has just started."""
    sys.path[:] = call.path
    os.chdir(call.folder)
    os.environ.clear()
    os.environ.update(call.environ, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(call.size), LOCAL_WORLD_SIZE=str(call.size))
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(call.name, store),
        rank=rank,
        world_size=call.size,
        timeout=datetime.timedelta(seconds=call.timeout_s),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        warnings.filterwarnings("error", module=r"everstep(\.|$)")
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


class _Unseen:
    """Exceptions that would only be printed: of threads, and where Python cannot raise."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        threading.excepthook = self._of_thread
        sys.unraisablehook = self._unraisable

    def _of_thread(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "?"
        self._note(f"thread {name}", args.exc_type, args.exc_value, args.exc_traceback)

    def _unraisable(self, args: "sys.UnraisableHookArgs") -> None:
        self._note(repr(args.object), args.exc_type, args.exc_value, args.exc_traceback)

    def _note(self, where: str, *exception: object) -> None:
        self.texts.append(f"in {where}:\n{''.join(traceback.format_exception(*exception))}")
