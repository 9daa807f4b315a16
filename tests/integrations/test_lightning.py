"""Lightning: automatic optimization with all that a trainer counts, and a GAN by hand."""

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everstep
from forked import Forked
from harness import Trace, check_resumes, random_seed, trains_on_two_ranks

pytestmark = pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed")
EPOCHS, BATCHES = 3, 8


class Noisy(torch.utils.data.Dataset):
    """Rows with noise, drawn when they are loaded."""

    def __init__(self, noise):
        self._noise = noise

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        noise = torch.rand(8) if self._noise else torch.zeros(8)
        return torch.full((8,), index / 32) + noise


class Stream(torch.utils.data.IterableDataset):
    """As many, without a length."""

    def __iter__(self):
        return iter(torch.rand(4 * BATCHES, 8))


def _automatic(trace):  # noqa: C901  # it is a class
    """A module that logs much; its library is imported in the process that trains."""
    import lightning.pytorch as pl
    from torchmetrics import MeanMetric

    class Automatic(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
            self.size = MeanMetric()

        def training_step(self, batch, index):
            loss = (self.net(batch) - batch.mean(1, keepdim=True)).square().mean()
            self.size(batch.abs().mean())
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("size", self.size, on_step=False, on_epoch=True)
            self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
            if index % 3 == 0:
                self.log("seldom", loss, on_step=False, on_epoch=True)
            self.last = loss.detach()
            return loss

        def on_train_batch_end(self, *_):
            if self.trainer.global_step > self.trainer.noted:
                self.trainer.noted = self.trainer.global_step
                trace.note("loss", self.trainer.global_step, self.last)

        def validation_step(self, batch, index):
            loss = self.net(batch).square().mean() + torch.rand(())
            self.log("val_loss", loss, sync_dist=True)
            self.log("epochs", float(self.current_epoch))

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                shown = self.trainer.callback_metrics.items()
                batches = self.trainer.fit_loop.total_batch_idx
                trace.note("evaluation", batches, [str(item) for item in shown])

        def on_train_epoch_end(self):
            shown = sorted(self.trainer.callback_metrics.items())
            trace.note("epoch", self.trainer.current_epoch, [v.item().hex() for _, v in shown])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
            by_epoch = {"scheduler": plateau, "monitor": "val_loss"}
            return [optimizer], [{"scheduler": cosine, "interval": "step"}, by_epoch]

    return Automatic()


def _gan(trace, toggles=True):
    import lightning.pytorch as pl

    class Gan(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
            self.judge = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))

        def training_step(self, batch, index):
            first, second = self.optimizers()
            made = self.generator(torch.randn(len(batch), 4))
            fake = made.detach()
            self._update(first, lambda: F.softplus(-self.judge(made)).mean())
            self._update(
                second,
                lambda: (F.softplus(self.judge(fake)) + F.softplus(-self.judge(batch))).mean(),
            )

        def _update(self, optimizer, loss_of):
            if toggles:
                self.toggle_optimizer(optimizer)
            loss = loss_of()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if toggles:
                self.untoggle_optimizer(optimizer)
            trace.note("loss", self.global_step, loss)
            self.log("loss", loss)

        def on_train_epoch_end(self):
            self.lr_schedulers().step()

        def configure_optimizers(self):
            first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
            second = torch.optim.Adam(self.judge.parameters(), lr=0.01)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]

    return Gan()


def _train(store, trace, make, train, val, monitor="val_loss", averages=False, **options):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

    from everstep.integrations.lightning import EverstepCallback

    warnings.simplefilter("ignore")
    pl.seed_everything(1)
    module = make(trace)
    callbacks = [EverstepCallback(store)] if store else []
    watching = []
    if val is not None:
        patience = 50 if monitor == "val_loss" else 1
        watching = [EarlyStopping(monitor, patience=patience), ModelCheckpoint(monitor="val_loss")]

    averaging = [EMAWeightAveraging(decay=0.7)] if averages else []

    class Resumed(pl.Callback):
        def on_fit_start(self, trainer, module):
            trainer.noted = trainer.global_step
            trace.resumed(trainer.global_step)

    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[*watching, *averaging, *callbacks, Resumed()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=val is not None,
        default_root_dir=str(store or "/tmp") + "-lightning",
        logger=False,
        **options,
    )
    trainer.fit(module, train(), val)
    draw, loop = torch.rand(3), trainer.fit_loop
    found = {each.state_key: each.state_dict() for each in watching}
    kept = {
        key: str(value)
        for state in found.values()
        for key, value in state.items()
        if "path" not in key and key not in ("dirpath", "best_k_models")
    }
    trace.end(
        module=module,
        optimizers=list(trainer.optimizers),
        schedulers=[each.scheduler for each in trainer.lr_scheduler_configs],
        loops={name: each for name, each in loop.state_dict().items() if "progress" in name},
        steps=(trainer.global_step, trainer.current_epoch, loop.epoch_loop._batches_that_stepped),
        callbacks=kept,
        averages=[each._average_model for each in averaging],
        draw=draw,
    )


def _loader(noise=False, kind=torch.utils.data.DataLoader, **options):
    return kind(Noisy(noise), batch_size=4, shuffle=True, **options)


def _stateful():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _loader(kind=StatefulDataLoader, num_workers=2)


def _streamed():
    return torch.utils.data.DataLoader(Stream(), batch_size=4)


@dataclass
class Case:
    """What is trained on what, how many steps, of which an epoch has so many."""

    make: Callable = _automatic
    steps: int = 12
    epoch: int = 4
    train: Callable = _loader
    noise: bool | None = False
    """Of what it is evaluated with, if it is."""

    options: dict = field(default_factory=dict)

    def trains(self, store, trace):
        val = None
        if self.noise is not None:
            val = torch.utils.data.DataLoader(Noisy(self.noise), batch_size=16)
        _train(store, trace, self.make, self.train, val, **self.options)


NOISY, WORKERS = partial(_loader, noise=True), {"num_workers": 2, "persistent_workers": True}
HALF = {"val_check_interval": 4, "accumulate_grad_batches": 2}
RANKS = {"strategy": "ddp", "devices": 2, "val_check_interval": 2}
GAN = Case(_gan, 48, 16, noise=None)
CASES = {
    "automatic": Case(train=NOISY, noise=True, options=HALF),
    "stateful": Case(steps=24, epoch=8, train=_stateful, options={"max_steps": 24}),
    "stopped": Case(steps=16, epoch=8, options={"monitor": "epochs"}),
    "gan": replace(GAN, train=partial(_loader, **WORKERS)),
    # Validations between two updates put the average in the place of the weights.
    "averaged": Case(options={**HALF, "val_check_interval": 1, "averages": True}),
    "two ranks": Case(train=NOISY, options=RANKS),
    # The first network's backward adds to gradients of the second one, which are being copied.
    "shared": replace(GAN, make=partial(_gan, toggles=False)),
    "streamed": replace(GAN, train=_streamed),
}
SHORT = [(name, 1) for name in ("automatic", "gan")]
LONG = [pytest.param(name, 3, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize(("name", "kills"), [*SHORT, *LONG])
def test_run(tmp_path, name, kills):
    case = CASES[name]
    check_resumes(
        partial(trains_on_two_ranks, case.trains) if name == "two ranks" else case.trains,
        tmp_path,
        steps=case.steps,
        epoch=case.epoch,
        kills=kills,
        seed=random_seed(),
        # Of two networks. A kill may leave a torn record: its replay finds that, and K are lost.
        losses_per_save=case.epoch if name == "shared" else max(1, case.epoch // BATCHES),
    )


@pytest.mark.filterwarnings("ignore")
def test_fit_goes_on_with_more_epochs_and_the_same_loader(store):
    class Notes:
        def __init__(self):
            self.losses = {}

        def note(self, what, step, value):
            if what == "loss":
                self.losses[step] = value.item()

    def fit(epochs, loader, *callbacks):
        import lightning.pytorch as pl

        notes = Notes()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        quiet |= {"accelerator": "cpu", "enable_checkpointing": False}
        pl.Trainer(max_epochs=epochs, callbacks=list(callbacks), **quiet).fit(_gan(notes), loader)
        return notes.losses

    from everstep.integrations.lightning import EverstepCallback

    loader = _loader()
    torch.manual_seed(0)
    expected = fit(2, loader)
    callback = EverstepCallback(store, keep=everstep.Keep(last=2))
    torch.manual_seed(0)
    begun = fit(1, loader, callback)
    torch.manual_seed(7)
    assert begun | fit(2, loader, callback) == expected
    assert fit(2, loader, callback) == {}
    assert list(begun) == list(range(1, 17))
    assert everstep.Store(store).latest() == 32


@pytest.mark.filterwarnings("ignore")
def test_what_reads_ahead_is_refused(store):
    import lightning.pytorch as pl

    from everstep.integrations.lightning import EverstepCallback

    class Ahead(pl.LightningModule):
        def training_step(self, dataloader_iter):
            next(dataloader_iter)

        def configure_optimizers(self):
            return torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)

    trainer = pl.Trainer(accelerator="cpu", callbacks=[EverstepCallback(store)], logger=False)
    with pytest.raises(everstep.Unsupported, match="reads ahead"):
        trainer.fit(Ahead(), torch.utils.data.DataLoader(Noisy(noise=False)))


@pytest.mark.filterwarnings("ignore")
def test_another_way_of_averaging_is_refused(store):
    import lightning.pytorch as pl

    from everstep.integrations.lightning import EverstepCallback

    averaging = pl.callbacks.StochasticWeightAveraging(0.1)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[EverstepCallback(store), averaging], logger=False
    )
    with pytest.raises(everstep.Unsupported, match="Take WeightAveraging"):
        trainer.fit(_gan(None), torch.utils.data.DataLoader(Noisy(noise=False)))


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_is_refused(store):
    import lightning.pytorch as pl

    from everstep.integrations.lightning import EverstepCallback

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    unmade = object.__new__(pl.strategies.DeepSpeedStrategy)  # it is not installed
    trainer._accelerator_connector.strategy = unmade
    with pytest.raises(everstep.Unsupported, match="Take DDP"):
        EverstepCallback(store).on_fit_start(trainer, _gan(None))


def ends_by_sigterm(store, notes):
    """In the middle of the second epoch, in a step."""
    import lightning.pytorch as pl

    class Ends(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 24:
                os.kill(os.getpid(), signal.SIGTERM)

    warnings.simplefilter("ignore")
    from everstep.integrations.lightning import EverstepCallback

    loader = torch.utils.data.DataLoader(Noisy(noise=False), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[EverstepCallback(store, every=100), Ends()],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(_gan(Trace(notes)), loader)


def test_sigterm_saves_the_step(store, tmp_path):
    with Forked(ends_by_sigterm, store, tmp_path / "notes") as process:
        assert process.wait() == -signal.SIGTERM
    assert everstep.Store(store).latest() == 26
