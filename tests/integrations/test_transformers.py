"""transformers' Trainer: GPT-2 with accumulation, a cosine, dropout and two loader workers; what
TRL does; evaluation, early stopping and the best model; LoRA."""

import dataclasses
import functools
import re
import warnings
from importlib.util import find_spec

import pytest
import torch

from everstep import Store, Unsupported
from everstep.integrations.transformers import everstep_trainer
from harness import check_resumes, random_seed, trains_on_two_ranks

pytestmark = pytest.mark.skipif(
    not find_spec("transformers"), reason="transformers is not installed"
)
COUNTED = ("global_step", "epoch", "max_steps", "total_flos", "best_metric", "best_global_step")


@dataclasses.dataclass
class Case:
    """What a run is given; steps of a run that is not stopped, and of an epoch."""

    arguments: dict
    steps: int = 18
    epoch: int = 6
    stops: bool = False
    adapters: bool = False
    counts: bool = False


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
CASES = {
    "gpt2": Case({"dataloader_num_workers": 2}),
    "trl": Case({"eval_strategy": "epoch", "max_steps": 15}, steps=15, counts=True),
    "best": Case(
        {**EVALUATES, "save_strategy": "best", "load_best_model_at_end": True, "learning_rate": 0.3}
    ),
    "stops": Case(
        {**EVALUATES, "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
        | {"learning_rate": 5.0, "warmup_steps": 6},
        steps=4,
        epoch=4,
        stops=True,
    ),
    "plateau": Case(
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "bf16": True}
    ),
    "lengths": Case({"train_sampling_strategy": "group_by_length"}),
    "samplers": Case({"accelerator_config": {"use_seedable_sampler": False}}),
    "lora": Case({"learning_rate": 1e-2}, adapters=True),
}


TWO_RANKS = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}


class Data(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 50, (count, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class CountsTokens:
    """A Trainer like TRL's: sums between two logs, which are no part of the Trainer's state."""

    def __init__(self, *args, **rest):
        super().__init__(*args, **rest)
        self._metrics, self._total_train_tokens = {"tokens": []}, 0

    def compute_loss(self, model, inputs, *args, **rest):
        if model.training:
            self._metrics["tokens"].append(inputs["input_ids"].float().mean().item())
            self._total_train_tokens += inputs["input_ids"].numel()
        return super().compute_loss(model, inputs, *args, **rest)

    def log(self, logs, *args, **rest):
        tokens = self._metrics["tokens"]
        logs["tokens"] = sum(tokens) / max(len(tokens), 1)
        logs["total"] = self._total_train_tokens
        tokens.clear()
        super().log(logs, *args, **rest)


def model_of(case):
    import transformers

    torch.manual_seed(7)
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    if not case.adapters:
        return model
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"]))


def trainer_of(case, output, store=None, callbacks=(), **everstep):
    """A Trainer of the case; without everstep where there is no store."""
    import transformers

    warnings.simplefilter("ignore")
    base = transformers.Trainer
    if case.counts:
        base = type("CountingTrainer", (CountsTokens, base), {})
    arguments = transformers.TrainingArguments(
        str(output),
        **{"lr_scheduler_type": "cosine", "num_train_epochs": 3, "save_strategy": "no"}
        | {"learning_rate": 1e-3, "logging_steps": 3, "per_device_train_batch_size": 2}
        | {"gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True}
        | {"disable_tqdm": True}
        | case.arguments,
    )
    early = [transformers.EarlyStoppingCallback(1)] if case.stops else []
    kind = base if store is None else everstep_trainer(base)
    own = {} if store is None else {"everstep": {"store": store, **everstep} if everstep else store}
    return kind(
        model=model_of(case),
        args=arguments,
        train_dataset=Data(21, 1),
        eval_dataset=Data(8, 2),
        callbacks=[*early, *callbacks],
        **own,
    )


class Notes:
    """A callback: where a life begins, each step's loss (of its batches) and each evaluation."""

    def __init__(self, trace):
        self.trace, self.losses = trace, []

    def on_train_begin(self, args, state, control, **_):
        self.trace.resumed(state.global_step)

    def on_step_end(self, args, state, control, **_):
        self.trace.note("loss", state.global_step, list(self.losses))
        self.losses.clear()

    def on_evaluate(self, args, state, control, metrics, **_):
        if control.should_evaluate:  # an epoch's last step may be evaluated twice
            self.trace.note(f"evaluation at {state.epoch}", state.global_step, metrics["eval_loss"])


def trains(case, store, trace):
    import transformers

    notes = type("Callback", (Notes, transformers.TrainerCallback), {})(trace)
    trainer = trainer_of(case, f"{trace.path}.folder", store, [notes])
    train = trainer.training_step

    def training_step(*args, **rest):
        loss = train(*args, **rest)
        notes.losses.append(loss.item())
        return loss

    trainer.training_step = training_step
    result = trainer.train(**({"resume_from_checkpoint": True} if store else {}))
    end = {
        "model": trainer.model,
        "optimizer": trainer.optimizer.state_dict()["state"],
        "scheduler": trainer.lr_scheduler,
        "counted": {name: getattr(trainer.state, name) for name in COUNTED},
        "history": [
            {name: value for name, value in row.items() if not re.search("second|time", name)}
            for row in trainer.state.log_history
        ],
        "result": [result.global_step, result.training_loss],
    }
    trace.end(**end)


FAST = ("gpt2", "trl", "stops", "lora")


@pytest.mark.parametrize(
    ("name", "kills"),
    [(name, 1) for name in FAST]
    + [pytest.param(name, 3, marks=pytest.mark.slow) for name in CASES if name != "stops"],
)
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path, name, kills):
    case = CASES[name]
    if case.adapters:
        pytest.importorskip("peft")
    check_resumes(
        functools.partial(trains, case),
        tmp_path,
        steps=case.steps,
        epoch=case.epoch,
        kills=kills,
        seed=random_seed(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "best"])
def test_two_ranks(tmp_path, name):
    case = dataclasses.replace(CASES[name], arguments={**CASES[name].arguments, **TWO_RANKS})
    run = functools.partial(trains_on_two_ranks, functools.partial(trains, case))
    check_resumes(run, tmp_path, steps=9, epoch=3, kills=3, seed=random_seed())


def test_the_best_step_has_a_tag_and_its_metrics(tmp_path, store):
    trainer = trainer_of(CASES["stops"], tmp_path, store, every=100)
    trainer.train()
    found = Store(store).manifest("best")
    assert found.step == trainer.state.best_global_step == 2
    assert found.metrics["eval_loss"] == trainer.state.best_metric
    assert Store(store).steps() == [2, 4]  # where the Trainer saves, not where `every` says
    stored = Store(store).read("best", names=["model.transformer.wte.weight"])
    (weight,) = stored.values()
    assert torch.equal(weight, trainer.model.transformer.wte.weight)


def test_a_folder_of_the_trainers_own_is_gone_on_from(tmp_path, store):
    case = dataclasses.replace(CASES["gpt2"], arguments={"save_strategy": "steps", "save_steps": 5})
    first = trainer_of(case, tmp_path)
    first.train()
    second = trainer_of(case, tmp_path, store)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert min(Store(store).steps()) == 11
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_what_is_not_known_is_told(tmp_path, store):
    with pytest.raises(TypeError, match="'store'"):
        trainer_of(CASES["gpt2"], tmp_path, {}).train()
    trainer = trainer_of(CASES["gpt2"], tmp_path, store)
    with pytest.raises(Unsupported, match="search of hyperparameters"):
        trainer.train(trial={"learning_rate": 0.1})
