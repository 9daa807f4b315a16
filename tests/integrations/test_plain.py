"""The harness with a loop of one's own: dropout, a scheduler, a shuffled loader, three epochs."""

import pytest
import torch
from torch import nn

import everstep
from harness import check_resumes, random_seed

pytest.importorskip("torchdata.stateful_dataloader")
EPOCHS = 3


def trains(store, trace):
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader = StatefulDataLoader(torch.randn(64, 8), batch_size=8, shuffle=True)
    counters = {"epoch": 0}
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "counters": counters,
    }
    checkpointer = everstep.Checkpointer(store, state) if store else None
    step = checkpointer.restore() if checkpointer else 0
    trace.resumed(step)
    while counters["epoch"] < EPOCHS:
        for batch in loader:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            trace.note("loss", step, loss)
            counters["epoch"] = step // 8
            if checkpointer:
                checkpointer.step(step)
    if checkpointer:
        checkpointer.close()
    trace.end(**state | {"loader": None})


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_plain_loop(tmp_path, kills):
    check_resumes(trains, tmp_path, steps=24, epoch=8, kills=kills, seed=random_seed())


def test_a_wrong_resume_is_found(tmp_path):
    with pytest.raises(AssertionError, match=r"life 2 has another \('loss'"):
        check_resumes(forgets_its_optimizer, tmp_path, steps=12, epoch=8, seed=1, late=0.0)


def forgets_its_optimizer(store, trace):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = everstep.Checkpointer(store, {"model": model}) if store else None
    start = checkpointer.restore() if checkpointer else 0
    trace.resumed(start)
    for step in range(start + 1, 13):
        loss = model(torch.ones(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trace.note("loss", step, loss)
        if checkpointer:
            checkpointer.step(step)
    trace.end(model=model)
