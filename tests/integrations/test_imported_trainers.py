"""What transformers' Trainer, Accelerate and Lightning have saved, imported and trained on as by
their own resume."""

import functools
import json
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from accelerated import prepared
from commands import run, run_json
from everstep import Checkpointer, Store
from harness import live, trains_on_two_ranks

torch.set_num_threads(1)


def needs(library):
    return pytest.mark.skipif(not find_spec(library), reason=f"{library} is not installed")


# ---- transformers --------------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 50, (22, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer_of(output, store=None, seed=7, tied=True, **arguments):
    import transformers

    from everstep.integrations.transformers import everstep_trainer

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tied
    )
    chosen = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    chosen |= {"gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True, "seed": 3}
    chosen |= {"lr_scheduler_type": "cosine", "disable_tqdm": True, "logging_steps": 2}
    chosen |= {"save_strategy": "steps", "save_steps": 4, "weight_decay": 0.1}
    kind = transformers.Trainer if store is None else everstep_trainer(transformers.Trainer)
    return kind(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(str(output), **chosen | arguments),
        train_dataset=Data(),
        **({} if store is None else {"everstep": store}),
    )


def losses_of(trainer, resume):
    """Of each update, and what was logged."""
    found, train = [], trainer.training_step

    def training_step(*args, **rest):
        loss = train(*args, **rest)
        found.append(loss.item())
        return loss

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=resume)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = [each.clone() for each in trainer.model.parameters()]
    return found, logged, weights


@needs("transformers")
@needs("accelerate")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [4, 6], ids=["in mid-epoch", "after an epoch"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_the_trainer(store, tmp_path, capsys, step, tied):
    saves = {"save_steps": step, "tied": tied}
    losses_of(trainer_of(tmp_path / "out", **saves), None)
    folder = tmp_path / "out" / f"checkpoint-{step}"
    capsys.readouterr()
    said = run_json(capsys, "import", folder, store)
    assert (said["step"], said["from"], said["left_out"]) == (step, "trainer", {})
    assert Store(store).verify().ok
    theirs = losses_of(trainer_of(tmp_path / "a", seed=8, **saves), str(folder))
    mine = losses_of(trainer_of(tmp_path / "b", store, seed=9, **saves), True)
    assert mine[:2] == theirs[:2]
    assert all(map(torch.equal, mine[2], theirs[2]))
    assert len(mine[0]) > 10


@needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_names_where_the_model_is_unknown(store, tmp_path, capsys):
    trainer = trainer_of(tmp_path / "out")
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-8"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MineForAll"]}))
    assert run("import", folder, store) == 1
    assert "--names" in capsys.readouterr().err
    of = {id(p): name for name, p in trainer.model.named_parameters()}
    names = [of[id(p)] for g in trainer.optimizer.param_groups for p in g["params"]]
    (tmp_path / "names").write_text(json.dumps(names))
    assert run("import", folder, store, "--names", tmp_path / "names") == 0
    named = Store(store).read()
    (folder / "config.json").write_text(json.dumps(config))
    assert run("import", folder, store, "--step", "9") == 0
    known = Store(store).read()
    assert all(torch.equal(known[name], named[name]) for name in known)


@needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_an_export_is_what_from_pretrained_takes(store, tmp_path):
    import transformers

    trainer = trainer_of(tmp_path / "out", store, save_strategy="no", max_steps=2)
    trainer.train()
    trainer.model.config.save_pretrained(tmp_path / "config")
    words = ["export", store, "--to", "hf", tmp_path / "hf", "--config", tmp_path / "config"]
    assert run(*words, "--shard-size", "20KB") == 0
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = trainer.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in loaded.state_dict().items())
    trainer.model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    files = [len(list((tmp_path / at).glob("*.safetensors"))) for at in ("hf", "theirs")]
    assert files[0] > 1
    assert files[1] > 1


# ---- Accelerate ----------------------------------------------------------------------------------


def accelerated(seed):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def accelerated_losses(accelerator, model, optimizer, scheduler, steps):
    losses = []
    for step in range(*steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs("accelerate")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_accelerate(store, tmp_path, capsys, safe):
    from everstep.integrations.accelerate import state_of

    first = accelerated(1)
    accelerated_losses(*first, (0, 4))
    first[0].save_state(str(tmp_path / "saved"), safe_serialization=safe)
    said = run_json(capsys, "import", tmp_path / "saved", store, "--step", "4")
    assert (said["from"], said["left_out"]) == ("accelerate", {})
    theirs = accelerated(2)
    theirs[0].load_state(str(tmp_path / "saved"))
    expected = accelerated_losses(*theirs, (4, 9))
    mine = accelerated(3)
    with Checkpointer(store, state_of(mine[0])) as checkpointer:
        assert checkpointer.restore() == 4
        assert accelerated_losses(*mine, (4, 9)) == expected


# ---- Lightning -----------------------------------------------------------------------------------


@needs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_lightning(store, tmp_path, capsys):
    import lightning.pytorch as pl

    class Plain(pl.LightningModule):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
            self.losses = []

        def training_step(self, batch, index):
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    batches = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(batches, batch_size=4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = pl.Trainer(max_epochs=1, **quiet)
        first.fit(Plain(1), loader)
        first.save_checkpoint(tmp_path / "last.ckpt")
        theirs = Plain(2)
        pl.Trainer(max_epochs=2, **quiet).fit(theirs, loader, ckpt_path=tmp_path / "last.ckpt")
    capsys.readouterr()
    said = run_json(capsys, "import", tmp_path / "last.ckpt", store)
    assert (said["step"], said["from"], said["left_out"]) == (8, "lightning", {})
    mine = Plain(3)
    (optimizer,), ((row),) = mine.configure_optimizers()
    scheduler, losses = row["scheduler"], []
    state = {"model": mine, "optimizer": [optimizer], "scheduler": [scheduler]}
    with Checkpointer(store, state) as checkpointer:
        assert checkpointer.restore() == 8
        for batch in loader:
            loss = mine.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    assert losses == theirs.losses


# ---- Accelerate with FSDP2, on two ranks ---------------------------------------------------------


def on_two_ranks(begin, store, trace):
    """Begins as it is told, and tells the losses of the steps that come then."""
    accelerator, (model, optimizer, _, scheduler) = prepared()

    def train(steps):
        for step in steps:
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield step, loss.item()

    begin(accelerator, train, store)
    for step, loss in train(range(3, 7)):
        trace.note("loss", step, loss)
    trace.end()


def saves_state(folder, accelerator, train, store):
    list(train(range(1, 3)))
    accelerator.save_state(str(folder))


def loads_state(folder, accelerator, train, store):
    accelerator.load_state(str(folder))


def restores(accelerator, train, store):
    from everstep.integrations.accelerate import state_of

    with Checkpointer(store, state_of(accelerator)) as checkpointer:
        only = ["model", "optimizer", "scheduler", "accelerator", "rng"]
        assert checkpointer.restore(only=only) == 2


@needs("accelerate")
def test_a_folder_of_accelerates_fsdp2(store, tmp_path, capsys):
    def losses(name, begin):
        run_of = functools.partial(trains_on_two_ranks, functools.partial(on_two_ranks, begin))
        notes = live(run_of, store, tmp_path, name)
        return {key: value for key, value in notes.items() if key[0] == "loss"}

    folder = tmp_path / "saved"
    losses("first", functools.partial(saves_state, folder))
    said = run_json(capsys, "import", folder, store, "--step", "2")
    assert (said["from"], said["left_out"]) == ("accelerate", {})
    theirs = losses("theirs", functools.partial(loads_state, folder))
    assert losses("mine", restores) == theirs
    assert len(theirs) == 4
