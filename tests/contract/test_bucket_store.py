"""A bucket as the store: saved, killed, restored; outages; servers that will not do."""

import os
import signal

import pytest
import torch

import everstep
from everstep import Conflict, Missing, Store, Unavailable, Unsupported
from everstep.cli.main import main
from examples import slow
from forked import Forked, run
from stores import end_keeper

STEPS = 12


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 40)).square().mean().backward()
    state["optimizer"].step()


def trains(url, strategy, die=None):
    """Goes on from what is there; prints the step that was restored, and the weights at the end."""
    state = build()
    with everstep.Checkpointer(url, state, strategy=strategy) as checkpointer:
        start = checkpointer.restore()
        print(start, flush=True)
        for step in range(start + 1, STEPS + 1):
            train(state)
            checkpointer.step(step)
            if step == die:
                os.kill(os.getpid(), signal.SIGKILL)
    print(state["model"].weight.double().sum().item().hex(), flush=True)


@pytest.fixture(params=["bucket", *slow("ceph_bucket")])
def url(request):
    found = request.getfixturevalue(request.param)
    yield found
    end_keeper(found)


@pytest.mark.parametrize(
    ("strategy", "memory"),
    [
        ("log", "kept"),
        *slow(
            ("full", "lost"),
            ("full", "kept"),
            ("spread", "kept"),
            ("spread", "lost"),
            ("log", "lost"),
        ),
    ],
)
def test_a_killed_run_goes_on(url, strategy, memory):
    torch.manual_seed(0)
    state = build()
    for _ in range(STEPS):
        train(state)
    with Forked(trains, url, strategy, 7) as process:
        assert process.stdout.readline() == "0\n"
        assert process.wait() == -signal.SIGKILL
    if memory == "lost":
        end_keeper(url)
    ended = run(trains, url, strategy)
    start, weights = ended.stdout.split()
    assert int(start) >= (6 if memory == "kept" else 1)
    assert weights == state["model"].weight.double().sum().item().hex()
    assert Store(url).latest() == STEPS
    assert Store(url).verify().ok


def test_levels_say_where_it_is(url):
    state = build()
    with everstep.Checkpointer(url, state) as checkpointer:
        train(state)
        handle = checkpointer.save(1, tag="best", metrics={"loss": 2.0})
        handle.wait("held")
        handle.wait("remote")
        assert handle.level == "remote"
        assert handle.done()
        with pytest.raises(ValueError, match="remote"):
            checkpointer.wait("local")
        checkpointer.wait()
    assert Store(url).manifest("best").metrics == {"loss": 2.0}
    weight = Store(url).read("best", names=["model.weight"])["model.weight"]
    assert torch.equal(weight, state["model"].weight)


def test_commands_take_a_url(url, capsys):
    run(trains, url, "full")
    for command in (["ls"], ["show"], ["verify"], ["gc"]):
        assert main([*command, url]) == 0, capsys.readouterr()
    assert main(["rm", url, "3"]) == 0
    assert 3 not in Store(url).steps()
    assert main(["ls", f"{url}/nothing"]) != 0
    assert f"no store at {url}/nothing" in capsys.readouterr().err
    with pytest.raises(Missing):
        Store(f"{url}/nothing")


def test_of_two_writers_one_goes_on(url):
    first, second = build(), build()
    one = everstep.Checkpointer(url, first)
    one.save(1).wait()
    with everstep.Checkpointer(url, second) as two:
        two.restore()
        two.save(2).wait()
        with pytest.raises(Conflict, match="epoch"):
            one.save(2).wait()
    with pytest.raises(Conflict):
        one.close()
    assert Store(url).latest() == 2


def test_an_outage_is_waited_for(url, proxy):
    state = build()
    with everstep.Checkpointer(url, state) as checkpointer:
        checkpointer.save(1).wait()
        proxy.is_away = True
        train(state)
        handle = checkpointer.save(2)
        handle.wait("held")
        assert handle.level == "held"
        proxy.is_away = False
        handle.wait("remote")
    assert Store(url).steps() == [1, 2]


def test_a_server_without_conditions_can_be_read(url, proxy):
    run(trains, url, "full")
    end_keeper(url)
    proxy.drops_conditions = True
    assert Store(url).latest() == STEPS
    state = build()
    checkpointer = everstep.Checkpointer(url, state)
    assert checkpointer.restore() == STEPS
    handle = checkpointer.save(STEPS + 1)
    with pytest.raises((Unsupported, Unavailable), match="no conditional writes"):
        handle.wait()
    with pytest.raises((Unsupported, Unavailable), match="no conditional writes"):
        checkpointer.close()


def test_a_record_that_is_squeezed_comes_back(url):
    torch.manual_seed(0)
    model = torch.nn.Embedding(3000, 300)
    model.weight.register_hook(lambda grad: grad.bfloat16().float())  # half of it is zeros
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with everstep.Checkpointer(url, state, strategy="log") as checkpointer:
        for step in (1, 2, 3):
            state["optimizer"].zero_grad()
            model(torch.randint(3000, (8,))).square().mean().backward()
            state["optimizer"].step()
            checkpointer.step(step)
    end_keeper(url)
    record = Store(url).manifest(3).records[0]
    assert record.part.stored is not None
    assert record.size < model.weight.nbytes * 0.6
    weights = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    with everstep.Checkpointer(url, state, strategy="log") as checkpointer:
        assert checkpointer.restore() == 3
    assert torch.equal(model.weight, weights)
