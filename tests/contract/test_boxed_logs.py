"""Records of parameters that are boxes of other tensors, in one process: fused matrices, parts of
matrices, flat ranges with padding. Each is replayed to the bytes of the run, on each of them."""

import zlib
from functools import partial
from math import prod

import pytest
import torch
from torch import nn

import everstep
from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, Mismatch, Shard, Store, Unsupported
from everstep.format.boxes import Box
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from stores import end_keeper

SHAPES = {"q": (6, 5), "k": (3, 5), "v": (3, 5), "norm": (5,), "scale": ()}
PADDING = 3
STEPS = 6


def numbers(name, step):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(SHAPES[name], generator=generator)


# Each gives parameters by name; of each which tensors it has, as views, and where they begin.


def dense():
    return {
        name: (torch.zeros(shape), lambda t, n=name: [(n, None, t)])
        for name, shape in SHAPES.items()
    }


def fused():
    def parts(t):
        q, k, v = t.split([6, 3, 3])
        return [("q", (0, 0), q), ("k", (0, 0), k), ("v", (0, 0), v)]

    return {
        **{name: dense()[name] for name in ("norm", "scale")},
        "qkv": (torch.zeros(12, 5), parts),
    }


def transposed():
    """Their elements lie column by column."""
    made = fused()
    _, parts = made["qkv"]
    return {**made, "qkv": (torch.zeros(5, 12), lambda t: parts(t.t()))}


def halves():
    """Two parameters are one tensor."""
    made = {name: dense()[name] for name in SHAPES if name != "q"}
    return {
        "q": (torch.zeros(2, 5), lambda t: [("q", (0, 0), t)]),
        "r": (torch.zeros(4, 5), lambda t: [("q", (2, 0), t)]),
        **made,
    }


def flat():
    """All of them, one after another."""

    def parts(t):
        found, at = [], 0
        for name, shape in SHAPES.items():
            found += [
                (name, shard.offsets, shard.tensor)
                for shard in Shard.flat(name, shape, 0, t[at : at + prod(shape)])
            ]
            at += prod(shape)
        return found

    return {"flat": (torch.full((sum(map(prod, SHAPES.values())) + PADDING,), 42.0), parts)}


KINDS = {"dense": dense, "fused": fused, "transposed": transposed, "halves": halves, "flat": flat}
ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3, foreach=True)
OPTIMIZERS = {
    "adamw": ADAMW,
    "loop": partial(torch.optim.AdamW, lr=0.1, foreach=False, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}


class Job:
    """A training in one of KINDS."""

    def __init__(self, kind, optimizer=ADAMW):
        self.made = KINDS[kind]()
        self.model = nn.ParameterDict()
        with torch.no_grad():
            for name, (tensor, parts) in self.made.items():
                for each, offsets, view in parts(tensor):
                    view.copy_(_inside(numbers(each, 0), offsets, view))
                self.model[name] = nn.Parameter(tensor)
        self.optimizer = optimizer(self.model.parameters())

    def layout(self, name, tensor):
        _, parts = self.made[name.removeprefix("model.")]
        found = parts(tensor.detach())
        if found[0][1] is None:
            return None
        return [Shard(f"model.{each}", SHAPES[each], at, view) for each, at, view in found]

    def train(self, step, but=()):
        for name, parameter in self.model.items():
            parameter.grad = torch.zeros_like(parameter)
            parts = self.made[name][1](parameter.grad)
            for each, offsets, view in parts:
                view.copy_(_inside(numbers(each, step), offsets, view))
            if but and any(each in but for each, _, _ in parts):
                parameter.grad = None
        self.optimizer.step()

    def whole(self):
        """Parameters and their state as global tensors."""
        found = {}
        for name, parameter in self.model.items():
            values = {"": parameter.detach(), **self.optimizer.state[parameter]}
            for key, value in values.items():
                for each, offsets, view in self.made[name][1](parameter.detach()):
                    at = f"optimizer.model.{each}.{key}" if key else f"model.{each}"
                    if value.shape != parameter.shape or key == "step":
                        found[at] = value.clone()
                        continue
                    whole = found.setdefault(at, torch.full(SHAPES[each], torch.nan))
                    memory = value.as_strided(view.shape, view.stride(), view.storage_offset())
                    _inside(whole, offsets, view).copy_(memory)
        return found

    def attached(self, store, **more):
        state = {"model": self.model, "optimizer": self.optimizer}
        more = {"strategy": "log", "base_every": 4, "when_full": "wait", **more}
        return Checkpointer(store, state, **chosen(layout=self.layout, **more))


def _inside(whole, offsets, view):
    if offsets is None or not whole.ndim:
        return whole
    return whole[Box(tuple(offsets), tuple(view.shape)).slices_in(Box.whole(tuple(whole.shape)))]


def runs(store, kind, optimizer=ADAMW, steps=STEPS, train=Job.train, **more):
    """The state after each step."""
    job, found = Job(kind, optimizer), {}
    with job.attached(store, **more) as checkpointer:
        for step in range(1, steps + 1):
            train(job, step)
            checkpointer.step(step)
            found[step] = job.whole()
        checkpointer.wait()
    return found


def records(store, steps=STEPS):
    return [bool(Store(store).manifest(step).records) for step in range(1, steps + 1)]


SLOW = pytest.mark.slow
FAST = [("fused", "adamw"), ("flat", "momentum")]
CASES = [
    pytest.param(saved, optimizer, marks=() if (saved, optimizer) in FAST else SLOW)
    for saved in KINDS
    for optimizer in OPTIMIZERS
]


@pytest.mark.parametrize(("saved", "optimizer"), CASES)
def test_each_is_replayed_on_each(store, tmp_path, saved, optimizer):
    kind = OPTIMIZERS[optimizer]
    expected = runs(tmp_path / "other", "dense", kind, STEPS + 2)
    frozen = runs(store, saved, kind)
    assert records(store) == [False, True, True, True, False, True]
    assert Store(store).verify().ok
    for step, state in frozen.items():
        check_equal(state, expected[step])
    for other in KINDS:
        job = Job(other, kind)
        job.train(77)  # something else
        with job.attached(store) as checkpointer:
            for step in (4, STEPS):
                assert checkpointer.restore(step, exact="require") == step
                check_equal(job.whole(), frozen[step])
        for step in (STEPS + 1, STEPS + 2):
            job.train(step)
            check_equal(job.whole(), expected[step])
    end_keeper(tmp_path / "other")


@pytest.mark.slow
def test_a_restored_run_goes_on_recording(store, tmp_path):
    expected = runs(tmp_path / "other", "dense", steps=9)
    runs(store, "fused", steps=4)
    for number, kind in enumerate(("flat", "transposed", "fused", "flat", "dense"), 4):
        job = Job(kind)
        with job.attached(store) as checkpointer:
            assert checkpointer.restore() == number
            check_equal(job.whole(), expected[number])
            for step in range(number + 1, min(number + 3, 10)):
                job.train(step)
                checkpointer.step(step)
        Store(store).delete(min(number + 2, 9)) if number < 8 else None
    end_keeper(tmp_path / "other")


@pytest.mark.parametrize("kind", [pytest.param("fused", marks=SLOW), "flat"])
def test_it_is_made_whole_without_the_program(store, kind):
    frozen = runs(store, kind)
    with pytest.raises(Unsupported, match="everstep materialize"):
        Store(store).read(3)
    assert materialize(Disk(store), CheckpointName(3, 1)).exact
    found = {
        name: tensor for name, tensor in Store(store).read(3).items() if not name.startswith("rng")
    }
    check_equal(found, frozen[3])
    job = Job("dense")
    with job.attached(store) as checkpointer:
        assert checkpointer.restore(3, exact="require") == 3
        check_equal(job.whole(), frozen[3])


def test_a_part_is_taken_beside_the_state(store):
    frozen = runs(store, "flat")
    job = Job("fused")
    with job.attached(store) as checkpointer:
        checkpointer.restore(4, only=["model"])
        found = {name: t for name, t in job.whole().items() if name.startswith("model")}
        check_equal(found, {name: t for name, t in frozen[4].items() if name.startswith("model")})


@pytest.mark.parametrize(
    "kind", [pytest.param("fused", marks=SLOW), pytest.param("transposed", marks=SLOW), "flat"]
)
def test_audits_look_at_what_is_of_tensors(store, kind):
    """Padding is of none: it decays, and is in no checkpoint."""
    frozen = runs(store, kind, verify="full")
    assert records(store) == [False, True, True, True, False, True]
    job = Job(kind)
    with job.attached(store, verify="full") as checkpointer:
        assert checkpointer.restore(4) == 4
    check_equal(job.whole(), frozen[4])


def leaves_out(job, step, but):
    job.train(step, but if step in (3, 5) else ())


def test_one_without_a_gradient_has_none_at_the_replay(store):
    frozen = runs(store, "fused", train=partial(leaves_out, but=("k",)))
    assert records(store)[2]
    job = Job("fused")
    with job.attached(store) as checkpointer:
        checkpointer.restore(4)
    check_equal(job.whole(), frozen[4])
    assert frozen[4]["optimizer.model.k.step"] == 3


def lacks_a_part(job, step):
    for name, parameter in job.model.items():
        parameter.grad = torch.ones_like(parameter) * step
        if name == "r" and step == 4:
            parameter.grad = None
    job.optimizer.step()


def test_a_tensor_is_updated_in_all_of_its_parts(store, caplog):
    """Else no record tells of it: a base does."""
    plain = partial(torch.optim.SGD, lr=0.1)
    frozen = runs(store, "halves", plain, train=lacks_a_part)
    assert records(store) == [False, False, True, False, True, True]
    assert (
        "'model.r' are parts of it, and their gradients are torch.float32 and not there"
        in caplog.text
    )
    job = Job("halves", plain)
    with job.attached(store) as checkpointer:
        for step in (3, 5):
            checkpointer.restore(step)
            check_equal(job.whole(), frozen[step])


def test_a_dense_record_of_one_tensor_does_not_fit_a_parameter_of_several(store):
    frozen = runs(store, "dense", train=partial(leaves_out, but=("k",)))
    job = Job("fused")
    before = job.whole()
    with job.attached(store) as checkpointer:
        with pytest.raises(Mismatch, match=r"'model\.q' and 'model\.k' are in one parameter here"):
            checkpointer.restore(3)
        check_equal(job.whole(), before)
        checkpointer.restore(2)
        check_equal(job.whole(), frozen[2])


def clips(job, step):
    for name, parameter in job.model.items():
        parameter.grad = torch.zeros_like(parameter)
        for each, offsets, view in job.made[name][1](parameter.grad):
            view.copy_(_inside(numbers(each, step), offsets, view))
    everstep.clip_grad_norm_(list(job.model.parameters()), 0.5)
    job.optimizer.step()


@pytest.mark.parametrize("saved", ["dense", "fused"])
def test_clipped_gradients(store, saved):
    """Of the dense ones raw gradients and the coefficient, of boxes what was consumed."""
    frozen = runs(store, saved, train=clips)
    (record,) = Store(store).manifest(3).records
    clipped = [name for clip in record.calls[0]["clips"] for name in clip["names"]]
    assert ("model.q" in clipped) == (saved == "dense")
    assert "model.norm" in clipped
    for other in ("dense", "fused", "transposed", "flat"):
        job = Job(other)
        with job.attached(store) as checkpointer:
            checkpointer.restore(4, exact="require")
        check_equal(job.whole(), frozen[4])


class Coupled(torch.optim.Optimizer):
    """By the norm of each gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


def test_what_does_not_go_by_elements_is_exact_on_the_same_boxes_alone(store):
    frozen = runs(store, "fused", Coupled)
    job = Job("fused", Coupled)
    with job.attached(store) as checkpointer:
        assert checkpointer.restore(4, exact="require") == 4
        check_equal(job.whole(), frozen[4])
    for other in ("dense", "transposed", "flat"):
        with (
            Job(other, Coupled).attached(store) as checkpointer,
            pytest.raises(Unsupported, match="other ranks or boxes"),
        ):
            checkpointer.restore(4, exact="require")


def test_padding_may_count_where_an_update_does_not_go_by_elements(store):
    runs(store, "flat", Coupled)
    with (
        Job("flat", Coupled).attached(store) as checkpointer,
        pytest.raises(Unsupported, match="other ranks or boxes"),
    ):
        checkpointer.restore(4, exact="require")


@pytest.mark.slow
def test_auto_goes_over_to_a_log(store, monkeypatch):
    from everstep.capture import auto

    monkeypatch.setattr(auto, "SAVES_MIN", 5)
    monkeypatch.setattr(auto, "SLOWER", 1e9)
    frozen = runs(store, "flat", strategy="auto", base_every=None, steps=20)
    assert records(store, 20)[-1]
    job = Job("fused")
    with job.attached(store) as checkpointer:
        checkpointer.restore(20, exact="require")
    check_equal(job.whole(), frozen[20])


def test_windows_have_one_step(store):
    frozen = runs(store, "fused", strategy="spread", base_every=None, every=3)
    assert Store(store).steps() == [3, 6]
    check_equal({n: t for n, t in Store(store).read(6).items() if "rng" not in n}, frozen[6])
