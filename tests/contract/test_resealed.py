"""Documents that are sealed, and do not say what a run wrote: refused before anything is changed.

One member of one document is changed at random, and all that name the document by its digest are
sealed again. What that comes to may be a checkpoint like any other. If it is none, everstep says so
with an error of its own, at once, and the live state is as it was.
"""

import contextlib
import io
import json
import logging
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import checkpointer, difference, end_keeper, freeze, supervised
from torch import nn

from divide import divide
from everstep import EverstepError, Store
from everstep.cli.main import main
from everstep.errors import KINDS
from everstep.format.document import digest_of
from everstep.redo.derived import Derived
from everstep.redo.replay import OtherBytes
from everstep.restore.apply import Restore, Scope
from everstep.restore.choose import candidates
from everstep.restore.load import Loader
from everstep.state.view import State
from everstep.tiers.disk import Disk
from examples import examples
from stores import rewrite

ROOM_BYTES = 2 << 30
DEEP, NAN = "@@deep", "@@nan"
VALUES = [
    *(None, True, False, 0, 1, 2, -1, 1 << 40, 1 << 61, 1 << 70, -(10**400), 0.5, 1e300),
    *("", "x", "../x", "\ud800", "cpu", "float32", "0" * 32, DEEP, NAN),
    *([], {}, [[]], [0], ["x"], [None], [[1, 2]], {"x": 0}, {"$": 0}, {"$": "none", "v": 0}),
    {"$": "tensor", "v": "no.such", "device": "cpu"},
    {"$": "tensor", "v": "model.0.weight", "device": "nowhere"},
    {"$": "tensor", "v": "model.0.weight", "device": "meta"},
    {"$": "set", "v": [[1]]},
    {"$": "numpy.array", "v": "", "dtype": "<U0", "shape": [1 << 40]},
    {"$": "numpy.array", "v": "", "dtype": "|O", "shape": [1]},
    {"$": "tuple", "v": 0},
    {"$": "torch.Size", "v": [1 << 70]},
]


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    weights = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": weights}, {"params": others, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, amsgrad=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu"),
        "torch": torch.Generator().manual_seed(seed),
        "numpy": np.random.default_rng(seed),
        "old": np.random.RandomState(seed),
        "python": random.Random(seed),
        "value": {"n": seed, "ema": [torch.full((3,), float(seed))], 2: (np.arange(3), {seed})},
    }


def train(state, step):
    supervised(state)
    nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
    state["optimizer"].step()
    state["value"]["n"] = step


def documents_of(store):
    """By path, what the documents of a store say; tables first, manifests by their steps."""
    paths = sorted(store.rglob("*.json"), key=lambda path: (path.name == "manifest.json", path))
    found = {path: json.loads(path.read_bytes()) for path in paths}
    for value in found.values():
        del value["digest"]
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of whole states, of a log, of a spread base, and of several parts: their paths."""
    found = []
    for kind in ("full", "log", "spread"):
        store, state = tmp_path_factory.mktemp("resealed") / kind, build(1)
        with checkpointer(store, state, strategy=kind) as saver:
            for step in range(1, 5):
                train(state, step)
                saver.save(step, **({"tag": "best"} if step == 2 else {})).wait("local")
        end_keeper(store)
        found.append(store)
    for kind in ("parts", "ranks"):
        found.append(shutil.copytree(found[0], found[0].with_name(kind)))
    divide(found[-2], 4, 5)
    rewrite(found[-1] / "checkpoints/00000004-0001/manifest.json", share_out)
    return found


def share_out(manifest):
    """Some of its objects are those of each of two ranks."""
    own = {name: manifest["objects"].pop(name) for name in ("rng", "python")}
    manifest["ranks"] = [
        {name: {"index": rank, "count": 2, "value": value} for name, value in own.items()}
        for rank in range(2)
    ]


def places_in(value):
    """(holder, key) of each member, however deep."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, (dict, list)) else ():
        yield value, key
        if isinstance(item, (dict, list)):
            yield from places_in(item)


def mutate(generator, value):
    """Change one member at random; what was done."""
    places = list(places_in(value))
    depths = {}
    for holder, key in places:  # else nearly all would be digests and numbers of python's generator
        depths.setdefault((type(holder), key if isinstance(key, str) else 0), []).append(
            (holder, key)
        )
    holder, key = generator.choice(generator.choice(list(depths.values())))
    before = holder[key]
    way = generator.randrange(8)
    if way == 0:
        del holder[key]
        return f"{key!r} is left out, was {before!r:.100}"
    if way == 1 and isinstance(before, list) and before:
        holder[key] = generator.choice([before[:-1], before + before[-1:], before[::-1]])
    elif way == 2:
        other, name = generator.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif way == 3 and type(before) is int:
        holder[key] = before + generator.choice([-1, 1, 4096])
    else:
        holder[key] = generator.choice(VALUES)
    return f"{key!r} is {holder[key]!r:.100}, was {before!r:.100}"


def sealed(value):
    text = json.dumps(value, separators=(",", ":"))
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{NAN}"', "NaN")
    body = text[:-1].encode() if value else b'{"format":1'
    return body + b',"digest":"' + digest_of(body).encode() + b'"}\n'


def reseal(store, documents):
    """Write all of them, and in each the digests of those that it names."""
    renamed = {}
    for path, value in documents.items():
        was = digest_of(path.read_bytes())
        text = json.dumps(value)
        if any(old in text for old in renamed):
            for holder, key in list(places_in(value)):
                old = holder[key]
                if isinstance(old, str) and (found := [each for each in renamed if each in old]):
                    digest, size = renamed[found[0]]
                    holder[key] = old.replace(found[0], digest)
                    if isinstance(holder, dict) and key == "digest" and "size" in holder:
                        holder["size"] = size
        data = sealed(value)
        if (now := digest_of(data)) != was:
            renamed[was] = now, len(data)
        if path.parent.name == "tables":
            path = path.with_name(f"{now}.json")
        path.write_bytes(data)


def frozen(state):
    rng = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    return {"state": freeze(state), "rng": list(rng)}


def restored(store, reference):
    """What a restore of it into a new state raises, if that is an error of everstep's; by then the
    state is as before, but where the bytes of tensors, or what an update came to, showed it."""
    live = build(7)
    state = State(live)
    before = frozen(live)
    try:
        (found, *_) = candidates(Disk(store), reference, {})
        with Loader() as loader:
            Restore(found, state, Derived({}, state), loader, Scope(None, None, False)).apply()
    except EverstepError as error:
        found = error
    else:
        return None
    assert "allocate" not in f"{found} {found.__cause__}", found
    if not isinstance(found, OtherBytes) and "have digest" not in str(found):
        assert difference(frozen(live), before) is None, found
    return found


def looked_at(store):
    """What else reads documents says what is wrong in the same way."""
    with contextlib.suppress(EverstepError):
        Store(store).verify()
    with contextlib.suppress(EverstepError):
        Store(store).read()
    for words in (["ls"], ["ls", "--json"], ["show"], ["show", "--json"]):
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = main([words[0], str(store), *words[1:]])
        assert code == 0 or errors.getvalue().split(":")[1].strip() in KINDS, errors.getvalue()


@contextlib.contextmanager
def little_room():
    """Whoever takes much memory gets none."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check(stores, path, seed):
    generator = random.Random(seed)
    original = generator.choice(stores)
    store = path / "store"
    shutil.copytree(original, store)
    documents = documents_of(store)
    kinds = {}
    for each in documents:
        kinds.setdefault(each.parent.name if each.name != "manifest.json" else "", []).append(each)
    chosen = generator.choice(
        generator.choice([*[kinds[""]] * 4, kinds["tables"], *kinds.values()])
    )
    done = f"seed {seed}: {chosen.relative_to(store)} of {original.name}: "
    done += mutate(generator, documents[chosen])
    reseal(store, documents)
    try:
        found = [restored(store, None)]
        if chosen.name == "manifest.json":
            found.append(restored(store, chosen.parent.name))
        looked_at(store)
    except BaseException as error:
        error.add_note(done)
        raise
    shutil.rmtree(store)
    return done, found


@pytest.fixture(autouse=True)
def log_in_unicode(monkeypatch):
    """What documents say is told on stderr alone: a worker cannot report what is no Unicode."""
    monkeypatch.setattr(logging.getLogger("everstep"), "propagate", False)


def test_resealed_documents(stores, tmp_path):
    run(stores, tmp_path, examples(60), first=20261124)
    run(stores, tmp_path, 1, first=1000081260352)  # of two groups one has no hyperparameters


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_resealed_documents(stores, tmp_path):
    first = random.SystemRandom().randrange(1 << 40)  # a restore sets the other one
    run(stores, tmp_path, 2000, first)


def run(stores, path, count, first):
    with little_room():
        for seed in range(first, first + count):
            check(stores, path, seed)
