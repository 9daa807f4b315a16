"""python -m everstep.restore.worker STORE STEP-EPOCH: make a step of a log whole, out of the way.

The keeper starts it (keeper/catch_up.py), watches it, and reads the one line of JSON that it
prints. It ends when its standard input does: then its keeper is gone.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path

from everstep.errors import EverstepError
from everstep.store.names import parse_checkpoint
from everstep.tiers.tier import tier_at

PATIENCE_S = 5.0
"""How long it may take to clean up when it is told to end."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


def main(arguments: list[str] | None = None) -> int:
    """Print what was made, or what went wrong; 0, or 1."""
    store, reference = sys.argv[1:] if arguments is None else arguments
    name = parse_checkpoint(reference)
    if name is None:
        raise ValueError(f"not a checkpoint: {reference!r}")
    give_way()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_keeper, daemon=True).start()
    from everstep.restore.materialize import materialize  # torch: slow, so at low priority

    began = time.monotonic()
    try:
        made = materialize(tier_at(store), name)
    except EverstepError as error:
        print(json.dumps({"kind": type(error).__name__, "message": str(error)}), flush=True)
        return 1
    except Exception as error:  # noqa: BLE001 - torch's and the optimizers': told, and not retried
        print(json.dumps({"kind": "Unsupported", "message": repr(error)}), flush=True)
        return 1
    seconds = time.monotonic() - began
    said = {"step": made.step, "epoch": made.epoch, "exact": made.exact, "bytes": made.size}
    print(json.dumps({**said, "seconds": seconds}), flush=True)
    return 0


def give_way() -> None:
    """Take processor and disk only when nobody else wants them, and be the first that goes when
    memory runs out. What the system does not allow is left out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # else a session of its own would have a fair share
        Path("/proc/self/autogroup").write_text("19")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if number := _IOPRIO_SET.get(platform.machine()):
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


def _end_with_keeper() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread cleans up, if it can
    time.sleep(PATIENCE_S)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
