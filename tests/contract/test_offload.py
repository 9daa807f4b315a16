"""OffloadedOptimizer: another process makes the updates, with the bits of torch's own optimizer."""

import contextlib
import copy
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep import OffloadedOptimizer, Unavailable, Unsupported
from everstep.sharding.leaves import bytes_of
from examples import slow
from processes import ended, until

KINDS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
]


def model(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Linear(40, 7)).to(dtype)


def gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        shape, dtype = parameter.shape, parameter.dtype
        is_left_out = (number + step) % 5 == 0
        new = None if is_left_out else torch.randn(shape, generator=generator).to(dtype)
        parameter.grad = new


class Reference:
    """The same class on the CPU, on masters of the same weights."""

    def __init__(self, kind, parameters, **options):
        self.parameters = parameters
        self.masters = [p.detach().float().clone().requires_grad_() for p in parameters]
        self.optimizer = kind(self.masters, lr=0.01, **options)

    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def same(one, other):
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(bytes_of(left), bytes_of(right))


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (*KINDS[0], torch.bfloat16),
        (*KINDS[1], torch.float32),
        (*KINDS[-1], torch.float32),
        *slow(*((*kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16))),
    ],
    ids=str,
)
def test_the_bits_are_those_of_the_same_optimizer(kind, options, dtype):
    first, second = model(1, dtype), model(1, dtype)
    mine, theirs = list(first.parameters()), list(second.parameters())
    offloaded = OffloadedOptimizer(kind, mine, lr=0.01, **options)
    reference = Reference(kind, theirs, **options)
    rates = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9)
        for each in (offloaded, reference.optimizer)
    ]
    for step in range(1, 8):
        gradients(mine, step)
        gradients(theirs, step)
        offloaded.step()
        reference.step()
        for rate in rates:
            rate.step()
        same(mine, theirs)
    moments = reference.optimizer.state
    for parameter, master in zip(mine, reference.masters, strict=True):
        kept = {k: v for k, v in offloaded.state[parameter].items() if k != "master"}
        assert kept.keys() == moments[master].keys()
        same(kept.values(), [moments[master][key] for key in kept])
        if dtype == torch.bfloat16:
            same([offloaded.state[parameter]["master"]], [master.detach()])
    offloaded.close()


@pytest.mark.slow
def test_a_state_dict_goes_on_elsewhere():
    first, second = model(1, torch.bfloat16), model(2, torch.bfloat16)
    mine, theirs = list(first.parameters()), list(second.parameters())
    offloaded = OffloadedOptimizer(torch.optim.AdamW, mine, lr=0.01)
    for step in range(1, 4):
        gradients(mine, step)
        offloaded.step()
    other = OffloadedOptimizer(torch.optim.AdamW, theirs, lr=0.5)
    gradients(theirs, 1)
    other.step()  # what it has is replaced
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(offloaded.state_dict()))
    for step in range(4, 7):
        for parameters, optimizer in ((mine, offloaded), (theirs, other)):
            gradients(parameters, step)
            optimizer.step()
        same(mine, theirs)
    assert offloaded.state[mine[0]]["exp_avg"].dtype == torch.float32
    offloaded.close()
    other.close()


def test_a_training_loop_with_closure_clipping_and_scaler():
    first, second = model(1), model(1)
    offloaded = OffloadedOptimizer(torch.optim.AdamW, first.parameters(), lr=0.01)
    plain = torch.optim.AdamW(second.parameters(), lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    pairs = list(zip((first, second), (offloaded, plain), scalers, strict=True))
    for step in range(5):
        inputs = torch.randn(4, 12)
        losses = []
        for net, optimizer, scaler in pairs:
            optimizer.zero_grad()
            if step % 2:

                def closure(net=net, optimizer=optimizer, inputs=inputs):
                    optimizer.zero_grad()
                    value = net(inputs).square().mean()
                    value.backward()
                    return value

                losses.append(optimizer.step(closure).item())
                continue
            loss = net(inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            everstep.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        same(first.parameters(), second.parameters())
    offloaded.close()


def test_weights_that_somebody_else_changes_count():
    first, second = model(1), model(1)
    offloaded = OffloadedOptimizer(torch.optim.SGD, first.parameters(), lr=0.1)
    plain = torch.optim.SGD(second.parameters(), lr=0.1)
    for step in range(1, 4):
        for net, optimizer in ((first, offloaded), (second, plain)):
            net[0].weight.data[0] += step  # without a word to anybody
            gradients(list(net.parameters()), step)
            optimizer.step()
        same(first.parameters(), second.parameters())
    offloaded.close()


def killed(pid):
    with contextlib.suppress(ProcessLookupError):  # one killed before that had ended by itself
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_workers_that_are_killed_at_any_moment():
    """The next one goes on within the step. EVERSTEP_SEED=... again."""
    seed = int(os.environ.get("EVERSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"EVERSTEP_SEED={seed}")
    rng = random.Random(seed)
    torch.manual_seed(1)
    first = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6))).to(torch.bfloat16)
    second = copy.deepcopy(first)
    mine, theirs = list(first.parameters()), list(second.parameters())
    offloaded = OffloadedOptimizer(torch.optim.AdamW, mine, lr=0.01)
    reference = Reference(torch.optim.AdamW, theirs)
    kills = 0
    for step in range(1, 13):
        gradients(mine, step)
        gradients(theirs, step)
        pid = offloaded._process and offloaded._process.worker.pid
        timer = None
        if pid and rng.random() < 0.5:
            timer = threading.Timer(rng.uniform(0, 0.06), killed, (pid,))
            timer.start()
            kills += 1
        offloaded.step()
        if timer:
            timer.join()
            assert ended(pid)
        reference.step()
        same(mine, theirs)
    assert kills > 1
    offloaded.close()


def resident(pid):
    """Bytes of the files in memory that a process has mapped."""
    rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["RssFile"].split()[0]) << 10


@pytest.mark.slow
def test_state_in_a_file_is_in_memory_a_chunk_at_a_time(tmp_path):
    torch.manual_seed(1)
    first = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(8))).to(torch.bfloat16)
    second = copy.deepcopy(first)
    mine, theirs = list(first.parameters()), list(second.parameters())
    offloaded = OffloadedOptimizer(torch.optim.AdamW, mine, lr=0.01, states=tmp_path)
    reference = Reference(torch.optim.AdamW, theirs)
    for step in range(1, 4):
        gradients(mine, step)
        gradients(theirs, step)
        offloaded.step()
        reference.step()
        same(mine, theirs)
        if step == 1:
            libraries = resident(offloaded._process.worker.pid)
    size = sum(each.numel() for each in mine) * 12
    assert size > 200e6
    assert resident(offloaded._process.worker.pid) < libraries + 0.2 * size
    assert not list(tmp_path.iterdir())  # the file has no name
    offloaded.close()


def test_a_directory_that_cannot_be_is_told_before_anything_changes(tmp_path):
    net = model(1)
    before = [each.detach().clone() for each in net.parameters()]
    offloaded = OffloadedOptimizer(torch.optim.Adam, net.parameters(), states=tmp_path / "none")
    gradients(list(net.parameters()), 1)
    with pytest.raises(Unavailable, match="No such file"):
        offloaded.step()
    same([each.detach() for each in net.parameters()], before)


def test_what_cannot_be_is_told():
    net = model(1)
    with pytest.raises(Unsupported, match="LBFGS"):
        OffloadedOptimizer(torch.optim.LBFGS, net.parameters())
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        OffloadedOptimizer(torch.optim.Muon, [nn.Parameter(torch.zeros(3))])
    embedding = nn.Embedding(10, 4, sparse=True)
    offloaded = OffloadedOptimizer(torch.optim.SGD, embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(Unsupported, match="sparse"):
        offloaded.step()
    same([embedding.weight.detach()], [before])
    turned = nn.Parameter(torch.zeros(3, 4).t())
    with pytest.raises(Unsupported, match="does not lie row by row"):
        OffloadedOptimizer(torch.optim.Adafactor, [turned])
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    half.grad_dtype = torch.float32
    half.grad = torch.ones(3)
    with pytest.raises(Unsupported, match=r"a gradient is torch\.float32"):
        OffloadedOptimizer(torch.optim.SGD, [half], lr=0.1).step()
    offloaded = OffloadedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    gradients(list(net.parameters()), 1)
    offloaded.step()
    with pytest.raises(Unsupported, match="after its first update"):
        offloaded.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    offloaded.close()


def test_a_worker_that_cannot_start(monkeypatch):
    net = model(1)
    before = [each.detach().clone() for each in net.parameters()]
    offloaded = OffloadedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    gradients(list(net.parameters()), 1)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        with pytest.raises(Unavailable, match="3 processes"):
            offloaded.step()
    same([each.detach() for each in net.parameters()], before)
    offloaded.step()  # and it goes on when there is one
    pid = offloaded._process.worker.pid
    offloaded.close()
    until(lambda: ended(pid, 0), "its end")


def test_an_update_that_fails_there_is_told():
    """And the next one is made by another process."""
    net, plain = model(1), model(1)
    offloaded = OffloadedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for each, optimizer in ((net, offloaded), (plain, reference)):
        gradients(list(each.parameters()), 1)
        optimizer.step()
    offloaded.param_groups[0]["lr"] = "much"
    with pytest.raises(Unavailable, match=r"in another process: .*TypeError"):
        offloaded.step()
    offloaded.param_groups[0]["lr"] = 0.1
    for optimizer in (offloaded, reference):
        optimizer.step()
    same(net.parameters(), plain.parameters())
    offloaded.close()


@pytest.fixture
def small_chunks(monkeypatch):
    """Each parameter is one."""
    monkeypatch.setattr("everstep.offload.shared.CHUNK_BYTES", 1)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("how", ["fails", "interrupted"])
def test_a_step_that_is_broken_off_is_no_state(how, monkeypatch):
    net, plain = model(1), model(1)
    groups = [{"params": [each]} for each in net.parameters()]
    offloaded = OffloadedOptimizer(torch.optim.Adam, groups, lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)

    def update():
        for each, optimizer in ((net, offloaded), (plain, reference)):
            for parameter in each.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    update()
    weights, moments = copy.deepcopy(net.state_dict()), copy.deepcopy(offloaded.state_dict())
    if how == "fails":
        offloaded.param_groups[-1]["lr"] = "much"
    else:

        def interrupted():
            until(lambda: offloaded._shared.is_changed, "nothing is made")
            raise KeyboardInterrupt

        monkeypatch.setattr(offloaded._process, "finish", interrupted)
    with pytest.raises(Unavailable if how == "fails" else KeyboardInterrupt):
        offloaded.step()
    offloaded.param_groups[-1]["lr"] = 0.1
    for call in (offloaded.step, offloaded.state_dict):
        with pytest.raises(Unsupported, match=r"broken off.*restore\(\)"):
            call()
    net.load_state_dict(weights)
    offloaded.load_state_dict(moments)
    update()
    same(net.parameters(), plain.parameters())
    offloaded.close()


def test_a_forked_child_keeps_no_worker(store):
    """As those of a DataLoader, which live while their trainer ends the worker."""
    net = model(1)
    offloaded = OffloadedOptimizer(torch.optim.Adam, net.parameters())
    gradients(list(net.parameters()), 1)
    offloaded.step()
    worker = offloaded._process.worker.pid
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    offloaded.close()
    assert ended(worker)
    os.close(theirs)
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0


def test_weights_that_go_back_to_no_state_have_new_masters():
    net = model(1, torch.bfloat16)
    weights = [each.detach().clone() for each in net.parameters()]
    offloaded = OffloadedOptimizer(torch.optim.Adam, net.parameters(), lr=1e-6)
    for _ in range(2):  # in the second there is no state, and weights of the same bytes
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        offloaded.step()
        masters = [offloaded.state[each]["master"].clone() for each in net.parameters()]
        same(net.parameters(), weights)
        offloaded.load_state_dict({**offloaded.state_dict(), "state": {}})
        offloaded.state.clear()
    same(masters, [w.float() - 1e-6 for w in weights])
    offloaded.close()


def test_parameters_that_change_groups(monkeypatch):
    net, plain = model(1), model(1)
    optimizers = [
        kind([{"params": [each], "lr": 0.1 * n} for n, each in enumerate(m.parameters(), 1)])
        for m, kind in (
            (net, lambda g: OffloadedOptimizer(torch.optim.Adam, g)),
            (plain, torch.optim.Adam),
        )
    ]
    for _ in range(2):
        for each, optimizer in zip((net, plain), optimizers, strict=True):
            for parameter in each.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            last = optimizer.param_groups.pop()
            optimizer.param_groups[0]["params"] += last["params"]
    same(net.parameters(), plain.parameters())
    optimizers[0].close()


class Watched(nn.Module):
    """Layers of which backward waits, half-way, until some updates are made."""

    def __init__(self, width=1500):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        self.wait = lambda: None

    def forward(self, rows):
        hidden = self.layers[0](rows)
        hidden.register_hook(lambda gradient: self.wait())
        return self.layers[2](self.layers[1](hidden)).square().mean()


@pytest.mark.parametrize("is_killed", [*slow(False), True])
def test_updates_overlap_with_backward(is_killed):
    first, second = Watched(), Watched()
    overlapped = OffloadedOptimizer(torch.optim.AdamW, first.parameters(), lr=0.01, overlap=True)
    plain = torch.optim.AdamW(second.parameters(), lr=0.01)
    rates = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (overlapped, plain)]
    last = first.layers[2].weight
    begun = []

    def wait():
        until(lambda: not torch.equal(overlapped.state[last]["exp_avg"], moments), "no update")
        begun.append(len(overlapped.overlap._sent))
        if is_killed and len(begun) == 2:
            killed(overlapped._process.worker.pid)

    for step in range(4):
        inputs = torch.randn(4, 1500)
        weights = last.detach().clone()
        if step:  # of the first there is no state before it is made
            moments, first.wait = overlapped.state[last]["exp_avg"].clone(), wait
        for net, optimizer in ((first, overlapped), (second, plain)):
            optimizer.zero_grad()
            net(inputs).backward()
            assert net is second or torch.equal(last, weights)
            optimizer.step()
        for rate in rates:
            rate.step()
        same(first.parameters(), second.parameters())
    assert begun == [2, 2, 2]
    overlapped.close()


@pytest.mark.parametrize("change", ["accumulated", "clipped", "by hand", "rate", "weight"])
def test_what_overlap_cannot_have_is_told(change):
    net = model(1)
    weights = [each.detach().clone() for each in net.parameters()]
    offloaded = OffloadedOptimizer(torch.optim.AdamW, net.parameters(), lr=0.01, overlap=True)

    def loss():
        return net(torch.ones(2, 12)).square().mean()

    loss().backward()
    if change == "clipped":
        nn.utils.clip_grad_norm_(net.parameters(), 0.001)
    elif change == "by hand":
        for parameter in net.parameters():
            parameter.grad.data.mul_(0.5)
    elif change == "rate":
        offloaded.param_groups[0]["lr"] = 0.5
    elif change == "weight":
        with torch.no_grad():
            next(net.parameters()).mul_(1.0)
    with pytest.raises(Unsupported, match=r"overlap=True.*restore\(\)"):
        loss().backward() if change == "accumulated" else offloaded.step()
    with pytest.raises(Unsupported, match="overlap=True"):
        offloaded.step()  # again, as the state is not what it should be
    same(net.parameters(), weights)
    offloaded.close()
