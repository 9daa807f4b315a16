"""python -m benchmarks.merges --mergekit PATH/mergekit-yaml: `everstep merge` and `everstep diff`
beside mergekit's own merge, of the same two models.

Two Llamas of 110 million parameters in float32, weights alone; the merged one has the first half of
its layers from one and the rest from the other. Whole commands, imports included: seconds and peak
memory, medians of three in turn. mergekit has nothing like diff, and syncs nothing.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LAYERS, WIDTH, INNER, WORDS = 12, 768, 2048, 16_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 12,
    "num_key_value_heads": 12, "vocab_size": WORDS, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
YAML = """
slices:
  - sources: [{{model: {one}, layer_range: [0, {half}]}}]
  - sources: [{{model: {two}, layer_range: [{half}, {all}]}}]
merge_method: passthrough
dtype: float32
"""
RECIPE = """
base = {{ store = "one-store", step = 1 }}
[[take]]
from = {{ store = "two-store", step = 1 }}
tensors = "model.model.layers.{{{half}..{last}}}.**"
[[take]]
from = {{ store = "two-store", step = 1 }}
tensors = "model.{{lm_head,model.norm}}.**"
"""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merges")
    parser.add_argument("--mergekit", required=True, help="its command mergekit-yaml")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    half = LAYERS // 2
    everstep = [sys.executable, "-m", "everstep"]
    rows = {
        "mergekit-yaml": [args.mergekit, "config.yaml", "OUT", "--no-copy-tokenizer"],
        "everstep merge": [*everstep, "merge", "recipe.toml", "OUT"],
        "everstep diff": [*everstep, "diff", "one-store", "1", "two-store", "1"],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory(prefix="es-bench-", dir=os.getcwd()) as name:
        folder = Path(name)
        for seed, model in enumerate(("one", "two")):
            _apart(make, folder / model, seed)
            _run([*everstep, "import", model, f"{model}-store", "--step", "1"], folder)
        (folder / "config.yaml").write_text(
            YAML.format(one=folder / "one", two=folder / "two", half=half, all=LAYERS)
        )
        (folder / "recipe.toml").write_text(RECIPE.format(half=half, last=LAYERS - 1))
        for _ in range(args.rounds):
            for title, command in rows.items():
                out = folder / title.replace(" ", "-")
                shutil.rmtree(out, ignore_errors=True)
                words = [str(out) if word == "OUT" else word for word in command]
                found[title].append(_run(words, folder))
        _apart(_check, folder / "mergekit-yaml", folder / "everstep-merge")
    print("| | seconds | peak MB |\n|---|---|---|")
    for title, each in found.items():
        seconds, memory = (statistics.median(column) for column in zip(*each, strict=True))
        print(f"| {title} | {seconds:.2f} | {memory:.0f} |")


def _apart(function: Callable[..., None], *arguments: object) -> None:
    """In a process of its own: the peak of one that is started counts that of who starts it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function.__name__} ended with {process.exitcode}")


def make(folder: Path, seed: int) -> None:
    """A model as Hugging Face's library has it."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    shapes = {"model.embed_tokens": (WORDS, WIDTH), "lm_head": (WORDS, WIDTH)}
    shapes["model.norm"] = (WIDTH,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{each}_proj": (WIDTH, WIDTH) for each in "qkvo"}
        shapes |= {f"{at}.mlp.{each}_proj": (INNER, WIDTH) for each in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = WIDTH, INNER
        shapes |= {f"{at}.{each}_layernorm": (WIDTH,) for each in ("input", "post_attention")}
    folder.mkdir()
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _check(theirs: Path, mine: Path) -> None:
    """Both have come to the same bytes."""
    import torch
    from safetensors.torch import load_file

    from everstep import Store

    wanted = {}
    for path in theirs.glob("*.safetensors"):
        wanted |= load_file(path)
    found = {name.removeprefix("model."): each for name, each in Store(mine).read().items()}
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def _run(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds, and peak memory in MB."""
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command}: {(folder / 'log').read_text()[-2000:]}")
    return time.monotonic() - began, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
