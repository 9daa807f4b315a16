"""What `everstep.clip_grad_norm_` costs, beside torch's own, on the gradients of the bench's model.

    python benchmarks/clipping.py [--size 25m] [--rounds 15]

"out of place" is what happens while a log records and nobody else refers to a gradient; "copied
first" where somebody does, as DDP's buckets do, and always on an accelerator. Alternating, medians;
the memory is what is held between clipping and the update, beside the gradients.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from everstep import clip_grad_norm_
from everstep.cli import workload
from everstep.redo.clipping import raw_gradient
from everstep.redo.kept import Interest

ROW = "{:34} {:>9} {:>9} {:>14}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="25m", choices=workload.SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    run = workload.build(workload.load_text(None), seed=1, steps=10, size=args.size)
    parameters = list(run.model.parameters())
    seconds: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, clip, records, is_shared in (
            ("torch", torch.nn.utils.clip_grad_norm_, False, False),
            ("everstep, nothing is recorded", clip_grad_norm_, False, False),
            ("everstep, out of place", clip_grad_norm_, True, False),
            ("everstep, copied first", clip_grad_norm_, True, True),
        ):
            took, held[name] = measure(parameters, clip, records, is_shared)
            seconds.setdefault(name, []).append(took)
    print(ROW.format("", "ms", "/ torch", "more memory, MB"))
    first = statistics.median(seconds["torch"])
    for name, found in seconds.items():
        took = statistics.median(found)
        row = f"{took * 1e3:.1f}", f"{took / first:.2f}", f"{held[name] / 1e6:.1f}"
        print(ROW.format(name, *row))


def measure(
    parameters: list[torch.nn.Parameter],
    clip: Callable[..., object],
    records: bool,
    is_shared: bool,
) -> tuple[float, int]:
    """Seconds of one clipping, and the bytes of raw gradients that are kept afterwards."""
    interest = Interest()
    interest.set(records)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    others = [parameter.grad for parameter in parameters] if is_shared else []
    began = time.perf_counter()
    clip(parameters, 1.0)
    took = time.perf_counter() - began
    raw = [found.raw for parameter in parameters if (found := raw_gradient(parameter))]
    size = sum(tensor.nbytes for tensor in raw)
    del others, raw
    interest.set(False)
    return took, size


if __name__ == "__main__":
    main()
