"""python -m benchmarks.interchange: import and export beside the libraries' own conversions.

100 million parameters with AdamW's state (1.2 GB), each in a process of its own: seconds and peak
memory, less those of a process that only imports the same modules. everstep syncs what it writes,
the others do not; the page cache is warm for all.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MAKE = """
import everstep, torch
from torch import nn
layers = [nn.Linear(1024, 1024) for _ in range(66)]
model = nn.Sequential(nn.Embedding(30_000, 1024), *layers)
optimizer = torch.optim.AdamW(model.named_parameters())
for parameter in model.parameters():
    parameter.grad = torch.randn_like(parameter)
optimizer.step()
state = {"model": model, "optimizer": optimizer}
with everstep.Checkpointer("store", state, strategy="full") as checkpointer:
    checkpointer.save(1)
torch.save({name: part.state_dict() for name, part in state.items()}, "latest.pt")
"""
_MINE = "import torch, everstep.interchange.export, everstep.interchange.sources\n"
_MINE += "from everstep.cli.main import main\n"
_THEIRS = "import torch, torch.distributed.checkpoint.format_utils as f\n"
_WEIGHTS = "from safetensors.torch import save_file\n"
_WEIGHTS += "saved = torch.load('latest.pt')['model']\n"
ROWS = {
    "torch → store": (_MINE, "main(['import', 'latest.pt', OUT, '--step', '1'])"),
    "dcp → store": (_MINE, "main(['import', 'dcp', OUT, '--step', '1'])"),
    "store → torch": (_MINE, "main(['export', 'store', '--to', 'torch', OUT])"),
    "store → dcp": (_MINE, "main(['export', 'store', '--to', 'dcp', OUT])"),
    "store → hf": (_MINE, "main(['export', 'store', '--to', 'hf', OUT])"),
    "DCP: dcp → torch": (_THEIRS, "f.dcp_to_torch_save('dcp', OUT)"),
    "DCP: torch → dcp": (_THEIRS, "f.torch_save_to_dcp('latest.pt', OUT)"),
    "safetensors: torch → weights": (_THEIRS, f"{_WEIGHTS}save_file(saved, OUT)"),
}


def main(rounds: int = 3) -> None:
    """Print a table: the median of three."""
    with tempfile.TemporaryDirectory(prefix="es-bench-", dir=os.getcwd()) as name:
        folder = Path(name)
        _run(folder, _MAKE)
        _run(folder, f"{_MINE}main(['export', 'store', '--to', 'dcp', 'dcp'])")
        print("| | seconds | peak MB |\n|---|---|---|")
        for title, (imports, work) in ROWS.items():
            found = []
            for number in range(rounds):
                empty = _run(folder, imports)
                full = _run(folder, f"{imports}OUT = 'out{number}'\n{work}")
                found.append([a - b for a, b in zip(full, empty, strict=True)])
                subprocess.run(["rm", "-rf", folder / f"out{number}"], check=True)
            seconds, memory = (statistics.median(row[at] for row in found) for at in (0, 1))
            print(f"| {title} | {seconds:.1f} | {memory:.0f} |", flush=True)


def _run(folder: Path, program: str) -> tuple[float, float]:
    """Seconds, and peak memory in MB."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], cwd=folder, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, program
    return time.monotonic() - began, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
