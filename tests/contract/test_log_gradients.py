"""strategy="log" and gradients that are shared, reused, changed late, or of unusual kinds: a record
holds what the optimizer consumed."""

import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from keepers import until
from logs import backward, build, check_run, durable, train
from runs import check_same, check_steps, checkpointer, kinds, logged, snapshot
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import everstep
import forked
from choices import chosen
from everstep import Store, Unsupported
from everstep.capture.copier import Copier
from everstep.format.manifest import CheckpointName
from everstep.redo.recorder import Recorder
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk
from examples import slow


def gan(seed):
    """Two networks, of which the maker's backward adds to the judge's gradients."""
    torch.manual_seed(seed)
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
    return {"maker": maker, "judge": judge, "optimizers": optimizers}


def train_maker(state, has_added=lambda: None):
    state["optimizers"][0].zero_grad()
    state["judge"](state["maker"](torch.randn(8, 6))).square().mean().backward()
    has_added()
    state["optimizers"][0].step()


def train_judge(state):
    judge, inputs = state["judge"], torch.randn(8, 6)
    state["optimizers"][1].zero_grad()
    (judge(inputs) - judge(state["maker"](inputs).detach())).square().mean().backward()
    state["optimizers"][1].step()


def test_gan_whose_second_backward_adds_to_the_first_gradients(store):
    def step(state, _):
        train_judge(state)
        train_maker(state)

    check_run(store, gan, step)


def trains_a_gan_and_dies(store):
    """Each step is copied when the next one has added to its gradients."""
    added, copy_one = threading.Semaphore(0), Copier._copy_one

    def copied_late(self, capture):
        assert added.acquire(timeout=30)
        copy_one(self, capture)

    Copier._copy_one = copied_late
    state = gan(1)
    saver = checkpointer(store, state, strategy="log")
    for step in range(1, 12):
        train_maker(state, added.release if step > 1 else lambda: None)
        train_judge(state)
        saver.step(step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_gan_that_adds_to_gradients_of_a_step_that_is_being_copied(store):
    """Of all steps up to the kill that one is lost, and the one in flight."""
    assert forked.run(trains_a_gan_and_dies, store).returncode == -signal.SIGKILL
    expected, frozen = gan(1), {}
    for step in range(1, 11):
        train_maker(expected)
        train_judge(expected)
        frozen[step] = snapshot(expected)
    restored = gan(2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore() == 10
        check_same(snapshot(restored), frozen[10])
    del frozen[5]
    assert kinds(store) == "brrr" + "brrrr"
    check_steps(store, gan(2), frozen)


@pytest.mark.parametrize("how", ["zero_grad", "data", *slow("mul_")])
def test_gradients_written_to_after_the_update(store, how):
    def step(state, number):
        train(state)
        if number < 5:
            return
        if how == "zero_grad":
            state["optimizer"].zero_grad(set_to_none=False)
        for parameter in state["model"].parameters():
            if how == "mul_":
                parameter.grad.mul_(0.5)
            elif how == "data":
                parameter.grad.data.mul_(0.5)

    check_run(store, build, step)


@pytest.mark.parametrize("detached", [True, *slow(False)])
def test_gradients_that_are_views_of_one_buffer(store, detached):
    """As DDP's buckets are."""

    buffer = torch.zeros(sum(p.numel() for p in build(1)["model"].parameters()))

    def step(state, _):
        buffer.zero_()
        at = 0
        for parameter in state["model"].parameters():
            view = buffer[at : at + parameter.numel()].view_as(parameter)
            parameter.grad = view.data if detached else view
            at += parameter.numel()
        backward(state)
        state["optimizer"].step()

    check_run(store, build, step, "brrrrrrr")


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_gradients_are_the_same_tensors_after_a_restore(store, strategy):
    """Views of one buffer, which the loop zeroes: cut off from it they would go on adding up."""

    def flat(state):
        parameters = list(state["model"].parameters())
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, part in zip(
            parameters, buffer.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        return buffer

    def step(state, buffer):
        buffer.zero_()
        backward(state)
        state["optimizer"].step()

    state, frozen = build(1), {}
    buffer = flat(state)
    with (logged if strategy == "log" else checkpointer)(store, state, strategy=strategy) as saver:
        for number in range(1, 9):
            step(state, buffer)
            saver.step(number)
            frozen[number] = snapshot(state)
    fresh = build(2)
    buffer = flat(fresh)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(5) == 5
    for _ in range(6, 9):
        step(fresh, buffer)
    check_same(snapshot(fresh), frozen[8])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_expanded_gradients(store, kind):
    def step(state, _):
        for parameter in state["model"].parameters():
            parameter.grad = torch.randn(()).expand_as(parameter)
        state["optimizer"].step()

    check_run(store, partial(build, kind=kind), step)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, everstep.clip_grad_norm_])
def test_one_gradient_for_two_parameters(store, clip):
    def make(seed):
        torch.manual_seed(seed)
        parameters = [nn.Parameter(torch.randn(20)) for _ in range(2)]
        return {"parameters": parameters, "optimizer": torch.optim.AdamW(parameters)}

    def step(state, _):
        first, second = state["parameters"]
        first.grad = second.grad = torch.randn(20)
        clip([first, second], 0.1)
        state["optimizer"].step()

    check_run(store, make, step, "brrrrrrr")


def test_going_back_with_gradients_in_memory_that_is_used_again(store):
    """A replay lets go of it; the next backward makes other memory, which looks fresh."""

    def step(state):
        state["optimizer"].zero_grad(set_to_none=False)
        backward(state)
        state["optimizer"].step()

    state, frozen = build(1, width=400), {}
    with logged(store, state) as saver:
        for at in (0, 6):
            assert at == 0 or saver.restore(at) == at
            for number in range(at + 1, at + 9):
                step(state)
                saver.step(number)
                frozen[number] = snapshot(state)
    assert kinds(store) == "brrrrr" + "brrrrrrr"
    check_steps(store, build(2, width=400), frozen)


def weight_of(size, dtype, seed, kind=torch.optim.Adam, **options):
    """One parameter, and its optimizer."""
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.randn(size, dtype=dtype))
    return {"weight": weight, "optimizer": kind([weight], **options)}


def test_complex_gradients_that_are_lazily_conjugated(store):
    def step(state, _):
        state["optimizer"].zero_grad()
        (state["weight"].conj() * torch.randn(50, dtype=torch.complex64)).real.sum().backward()
        state["weight"].grad = state["weight"].grad.conj()
        state["optimizer"].step()

    check_run(store, partial(weight_of, 50, torch.complex64), step, "brrrrrrr")


def test_complex128(store):
    """Items of 16 bytes: planes are cut at 8."""

    def step(state, _):
        state["optimizer"].zero_grad()
        noise = torch.randn(9000, dtype=torch.complex64).to(torch.complex128)  # zeros to be dropped
        (state["weight"] * noise).real.sum().backward()
        state["optimizer"].step()

    check_run(store, partial(weight_of, 9000, torch.complex128), step, "brrrrrrr")


def test_gradients_of_another_dtype(store):
    def make(seed):
        state = weight_of(20, torch.bfloat16, seed, torch.optim.SGD, lr=0.1)
        state["weight"].grad_dtype = torch.float32
        return state

    def step(state, _):
        state["weight"].grad = torch.randn(20)
        state["optimizer"].step()

    check_run(store, make, step, "brrrrrrr")
    assert materialize(Disk(store), CheckpointName(8, 1)).exact


def test_gradients_of_before_clipping_take_fewer_bytes(stores):
    """Where they have the bits of bfloat16."""

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(160, 160)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def step(state, _):
        state["optimizer"].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = state["model"](torch.randn(8, 160)).square().sum()
        loss.backward()
        everstep.clip_grad_norm_(state["model"].parameters(), 0.5)
        state["optimizer"].step()

    sizes = []
    for pre_clip in (False, True):
        check_run(stores(pre_clip), make, step, "br", steps=2, pre_clip=pre_clip)
        sizes.append(Store(stores(pre_clip)).manifest(2).size)
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize(
    "options", [{"strategy": "log"}, {"strategy": "spread", "every": 4, "window": 4}]
)
def test_gradients_are_let_go_of_when_they_are_saved(store, options):
    """Else a GPU holds them during the next forward and backward, those of each step of a
    window."""
    state = build(1)
    with everstep.Checkpointer(store, state, **chosen(**options)) as saver:
        for step in range(1, 17):
            train(state)
            parameters = state["model"].parameters()
            storages = [StorageWeakRef(p.grad.untyped_storage()) for p in parameters]
            saver.step(step)
            saver.wait()
            state["optimizer"].zero_grad()
            # The copying thread may not have come to that yet when the step is on the disk.
            until(lambda held=storages: all(each.expired() for each in held), "a gradient is held")


def test_no_device_memory_for_copies(store, monkeypatch, caplog):
    """The run itself has enough, and must not end by it."""
    note, calls = Recorder._note_gradients, []

    def note_or_fail(recorder, call, must_copy):
        calls.append(call)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        note(recorder, call, must_copy)

    monkeypatch.setattr(Recorder, "_note_gradients", note_or_fail)
    check_run(store, build, train, "brrrbrrr", each=durable)
    assert "no device memory for copies of gradients of 'optimizer'" in caplog.text


def test_gradients_in_foreign_memory_that_is_filled_again(store, monkeypatch, caplog):
    """Each step's are new tensors, in NumPy's arrays, which are written to before the record is
    copied. The first such record is lost; from then on they are copied at once."""
    written = threading.Event()
    copy_one = Copier._copy_one

    def copied_late(self, capture):
        assert written.wait(30)
        copy_one(self, capture)

    monkeypatch.setattr(Copier, "_copy_one", copied_late)
    state, frozen, failed = build(1, torch.optim.SGD), {}, []
    buffers = [np.zeros(p.shape, np.float32) for p in state["model"].parameters()]

    def fill():
        for buffer, parameter in zip(buffers, state["model"].parameters(), strict=True):
            buffer[...] = np.random.randn(*buffer.shape)
            parameter.grad = torch.from_numpy(buffer)

    fill()
    with logged(store, state) as saver:
        for step in range(1, 16):
            state["optimizer"].step()
            written.clear()
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            state["optimizer"].zero_grad()
            fill()
            written.set()
            try:
                handle.wait()
            except Unsupported as error:
                failed.append(str(error))
    (problem,) = failed
    assert "'@0.model" in problem
    assert kinds(store)[-8:] == "r" * 8
    assert "copied at the call" not in caplog.text  # these are no tensors of the state
    check_steps(store, build(2, torch.optim.SGD), frozen)
