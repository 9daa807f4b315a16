"""python -m benchmarks.interchange [ROW ...]: import and export beside libraries' own conversions.

100 million parameters with AdamW's state (1.2 GB); the page cache is warm for all. Each conversion
is a process of its own, measured from where its imports are done; the two sides of a row take
turns. Seconds are medians, and beside those of the others stands how long they take until what
they wrote is durable, as it is when everstep is done. Memory is measured in a round of its own:
the peak of what the kernel cannot take back (so without mapped files), of all processes of a
conversion together, less what they had before it.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import processes

ROUNDS = 3
SAMPLE_S = 0.02

_TRAINED = """
import torch
from torch import nn
def trained():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(66)]
    model = nn.Sequential(nn.Embedding(30_000, 1024), *layers)
    return model, torch.optim.AdamW(model.named_parameters())
"""
_MAKE = """
import everstep
model, optimizer = trained()
for parameter in model.parameters():
    parameter.grad = torch.randn_like(parameter)
optimizer.step()
state = {"model": model, "optimizer": optimizer}
with everstep.Checkpointer("store", state, strategy="full") as checkpointer:
    checkpointer.save(1)
torch.save({name: part.state_dict() for name, part in state.items()}, "latest.pt")
"""
_IN_TWO = """
import atexit, os, subprocess, sys
import torch.distributed as dist
if "RANK" not in os.environ:
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": PORT, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    second = {**os.environ, "RANK": "1", "LOCAL_RANK": "1"}
    again = [sys.executable, "-W", "ignore", "-c", sys.orig_argv[-1]]
    other = subprocess.Popen(again, env=second, stdout=subprocess.DEVNULL)
    atexit.register(other.wait)
dist.init_process_group("gloo")
"""
_MAKE_ZERO = """
import deepspeed
model, optimizer = trained()
config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
          "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": STAGE}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.arange(2)).square().mean())
engine.step()
engine.save_checkpoint("zeroSTAGE")
"""
_EVERSTEP = """
import torch
import everstep.interchange.export, everstep.interchange.sources, everstep.interchange.write
from everstep.cli.main import main
"""
_DCP = "import torch, torch.distributed.checkpoint.format_utils as convert\n"
_ZERO_TO_FP32 = """
import os, torch
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict as convert
"""
_UNIVERSAL = """
import argparse, glob, os, torch
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.checkpoint import ds_to_universal
(tag,) = glob.glob("zeroSTAGE/global_step*")
given = argparse.Namespace(input_folder=tag, output_folder=OUT, num_extract_workers=4,
    num_merge_workers=2, keep_temp_folder=False, strict=True, inject_missing_state=True)
"""
_GATHERED = """
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
config = transformers.LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=11,
    num_attention_heads=12, vocab_size=16_000)
model = transformers.LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""
_SAVES = """
whole = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    model.save_pretrained(OUT, state_dict=whole)
"""


class Side(NamedTuple):
    """What is imported or built before, and what is measured."""

    title: str
    before: str
    work: str


def _imports(source: str, title: str = "", words: str = "") -> Side:
    work = f"main(['import', '{source}', OUT, '--step', '1'{words}])"
    return Side(title or f"{source} → store", _EVERSTEP, work)


def _exports(kind: str, title: str) -> Side:
    return Side(title, _EVERSTEP, f"main(['export', 'store', '--to', '{kind}', OUT])")


def _universal(stage: int) -> Side:
    before = _UNIVERSAL.replace("STAGE", str(stage))
    return Side("`ds_to_universal`", before, "ds_to_universal.main(given)")


_TO_DCP = Side("`torch_save_to_dcp`", _DCP, "convert.torch_save_to_dcp('latest.pt', OUT)")
_TO_TORCH = Side("`dcp_to_torch_save`", _DCP, "convert.dcp_to_torch_save('dcp', OUT)")
_TO_FP32 = "convert('zero2', OUT, safe_serialization=True)"
_WEIGHTS = ", '--only', 'model'"
ROWS: dict[str, tuple[Side, Side]] = {
    "torch-in": (_imports("latest.pt", "torch → store"), _TO_DCP),
    "dcp-in": (_imports("dcp"), _TO_TORCH),
    "torch-out": (_exports("torch", "store → torch"), _TO_TORCH),
    "dcp-out": (_exports("dcp", "store → dcp"), _TO_DCP),
    "zero2-in": (_imports("zero2", "ZeRO-2 → store"), _universal(2)),
    "zero3-in": (_imports("zero3", "ZeRO-3 → store"), _universal(3)),
    "weights-in": (
        _imports("zero2", "ZeRO-2 → store, weights alone", _WEIGHTS),
        Side("`zero_to_fp32`", _ZERO_TO_FP32, _TO_FP32),
    ),
    "ucp-out": (_exports("ucp", "store → ucp"), _universal(2)),
    "hf-out": (
        _exports("hf", "store → hf"),
        Side("gathered, `save_pretrained`", _IN_TWO + _GATHERED, _SAVES),
    ),
}
"""By name: everstep's side, and the library's own."""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interchange")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW", help=", ".join(ROWS))
    chosen = parser.parse_args().rows or list(ROWS)
    with tempfile.TemporaryDirectory(prefix="es-bench-", dir=os.getcwd()) as name:
        folder = Path(name)
        _make(folder, chosen)
        print("| everstep | seconds | MB | the library's own | seconds | until durable | MB |")
        print("|---|---|---|---|---|---|---|")
        for row in chosen:
            print(_row(folder, *ROWS[row]), flush=True)


def _make(folder: Path, chosen: list[str]) -> None:
    """What is to be converted."""
    _run(folder, Side("", _TRAINED, _MAKE))
    _run(folder, Side("", _EVERSTEP, "main(['export', 'store', '--to', 'dcp', 'dcp'])"))
    for stage in (2, 3):
        if any(f"zero{stage}" in side.before + side.work for row in chosen for side in ROWS[row]):
            made = _MAKE_ZERO.replace("STAGE", str(stage))
            _run(folder, Side("", _IN_TWO + _TRAINED, made))


def _row(folder: Path, mine: Side, theirs: Side) -> str:
    taken: dict[Side, list[tuple[float, float]]] = {mine: [], theirs: []}
    for _ in range(ROUNDS):
        for side, found in taken.items():
            found.append(_run(folder, side)[:2])
    (seconds, _), (others, durable) = (
        [statistics.median(column) for column in zip(*found, strict=True)]
        for found in taken.values()
    )
    memory, more = (_run(folder, side, is_watched=True)[2] for side in (mine, theirs))
    return (
        f"| {mine.title} | {seconds:.1f} | {memory:.0f} | {theirs.title} | {others:.1f} "
        f"| {durable:.1f} | {more:.0f} |"
    )


_MEASURED = """
import os, time
from pathlib import Path
is_first = os.environ.get("RANK", "0") == "0"
if is_first:
    Path("ready").touch()
    input()
began = time.monotonic()
{work}
done = time.monotonic()
for path in (Path(OUT), *Path(OUT).rglob("*")) if is_first else ():
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
if is_first:
    Path("took").write_text(f"{{done - began}} {{time.monotonic() - began}}")
"""


def _run(folder: Path, side: Side, is_watched: bool = False) -> tuple[float, float, float]:
    """Seconds of the work, those until its output is durable, and the peak of memory in MB."""
    os.sync()
    given = f"OUT = 'out'\nPORT = '{29_000 + os.getpid() % 1000}'\n"
    program = given + side.before + _MEASURED.format(work=side.work)
    command = [sys.executable, "-W", "ignore", "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(command, cwd=folder, stderr=said, **pipes) as process,
    ):
        while not (folder / "ready").exists() and process.poll() is None:
            time.sleep(SAMPLE_S)
        before = peak = _memory_mb(process.pid, folder)
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.close()
        while process.poll() is None:
            if is_watched:
                peak = max(peak, _memory_mb(process.pid, folder))
            time.sleep(SAMPLE_S)
    assert process.returncode == 0, (folder / "said").read_text()
    seconds, durable = map(float, (folder / "took").read_text().split())
    for path in (folder / each for each in ("ready", "took", "out") if (folder / each).exists()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds, durable, peak - before


def _memory_mb(pid: int, folder: Path) -> float:
    """What the process and its children have, without files; what they share counts once."""
    total = 0
    for each in processes([pid], str(folder)):
        with contextlib.suppress(OSError):  # it has just ended
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1])
    return total / 1000


if __name__ == "__main__":
    main()
