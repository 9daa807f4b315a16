"""A bucket as the store: saved, killed, restored; outages; buckets and servers that will not do.
And who deletes there, where nothing is locked, looks first who writes, and waits."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from keepers import until

import cli_store
import everstep
from everstep import Conflict, Missing, Store, Unavailable, Unsupported
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, names, presence, retain
from everstep.store.copy import Copier
from everstep.store.presence import Presence
from everstep.tiers.bucket import Bucket
from everstep.tiers.disk import Disk
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


@pytest.mark.slow
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


# ---- buckets that will not do --------------------------------------------------------------------


PATIENCE_S = 5.0


@pytest.fixture
def filled(bucket, tmp_path):
    """A bucket with the states 40, 80 and their like, of two tensors or so."""
    source = cli_store.make_logged(tmp_path / "source")
    Copier(source, Bucket(bucket)).copy(CheckpointName(12, 1))
    yield bucket
    end_keeper(bucket)


def refuse_writes(method, headers):
    return (403, "AccessDenied") if method in ("PUT", "POST", "DELETE") else None


def refuse_all(method, headers):
    return 403, "SignatureDoesNotMatch"


def refuse_conditions(method, headers):
    has_condition = any(name.lower() == "if-none-match" for name in headers)
    return (501, "NotImplemented") if has_condition else None


def test_wrong_credentials(filled, proxy, capsys):
    proxy.refuses = refuse_all
    with pytest.raises(Unavailable, match="credentials are wrong, or do not allow it"):
        Store(filled)
    with pytest.raises(Unavailable, match="credentials"):
        everstep.Checkpointer(filled, {"x": torch.zeros(3)})
    for command in (["ls", filled], ["gc", filled], ["cp", filled, "/nowhere"]):
        assert main(command) == 1
        assert "everstep: Unavailable:" in (said := capsys.readouterr().err)
        assert "credentials" in said


@pytest.mark.parametrize("server", slow("ceph_bucket"))
def test_wrong_credentials_of_a_real_server(server, request, monkeypatch):
    url = request.getfixturevalue(server)
    assert Bucket(url).create("everstep.json", b"{}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(Unavailable, match="credentials are wrong"):
        Store(url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    with pytest.raises(Unavailable, match="credentials are wrong"):
        Bucket(url).create("tags/a.json", b"{}")


def test_no_such_bucket(bucket, capsys):
    with pytest.raises(Missing, match="s3://nothere/run"):
        Store("s3://nothere/run")
    with pytest.raises(Unavailable, match=r"no such bucket.*Make the bucket first"):
        everstep.Checkpointer("s3://nothere/run", {"x": torch.zeros(3)})
    with pytest.raises(Unavailable, match="no such bucket: make it first"):
        Bucket("s3://nothere/run").list("data")
    assert main(["ls", "s3://nothere/run"]) == 1
    assert "Missing: there is no store at s3://nothere/run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bucket_that_can_only_be_read_is_read(filled, proxy, tmp_path, capsys):
    proxy.refuses = refuse_writes
    store = Store(filled)
    assert store.steps() == [10, 11, 12]
    assert store.verify().ok
    assert store.read(10)["model.wte.weight"].shape == (512, 1024)
    assert main(["cp", filled, str(tmp_path / "copy")]) == 0
    assert Store(tmp_path / "copy").steps() == [10, 11, 12]
    capsys.readouterr()
    for command in (["rm", filled, "12"], ["cp", str(tmp_path / "source"), filled]):
        assert main(command) == 1
        assert "credentials are wrong, or do not allow it" in capsys.readouterr().err
    assert store.steps() == [10, 11, 12]


def test_a_trainer_restores_from_what_it_cannot_write_to(bucket, proxy):
    state = {"x": torch.arange(1000.0)}
    with everstep.Checkpointer(bucket, state) as checkpointer:
        checkpointer.save(1).wait()
    end_keeper(bucket)
    proxy.refuses = refuse_writes
    state["x"] = torch.zeros(1000)
    checkpointer = everstep.Checkpointer(bucket, state)
    assert checkpointer.restore() == 1
    assert torch.equal(state["x"], torch.arange(1000.0))
    with pytest.raises(Unavailable, match="do not allow it"):
        checkpointer.save(2).wait()
    with pytest.raises(Unavailable, match="do not allow it"):
        checkpointer.close()
    end_keeper(bucket)


def test_a_server_that_says_it_has_no_conditional_writes(filled, proxy):
    proxy.refuses = refuse_conditions
    assert Store(filled).verify().ok
    with pytest.raises(Unsupported, match="no conditional writes"):
        Bucket(filled).create("tags/a.json", b"{}")
    with pytest.raises(Unsupported, match="no conditional writes"):
        everstep.Checkpointer(f"{filled}/new", {"x": torch.zeros(3)})


def test_a_url_of_an_unknown_kind(capsys, tmp_path):
    cli_store.make_branched(tmp_path / "source")
    for url in ("ftp://host/run", "s4://bucket/run"):
        with pytest.raises(Unsupported, match="Say s3://, gs:// or az://"):
            Store(url)
        with pytest.raises(Unsupported, match="Say s3://"):
            everstep.Checkpointer(url, {"x": torch.zeros(3)})
        for command in (["ls", url], ["cp", str(tmp_path / "source"), url]):
            assert main(command) == 1
            assert f"Unsupported: opening {url}" in capsys.readouterr().err


# ---- deleting ------------------------------------------------------------------------------------


def saves_ten(url, die=0):
    """Saves ten steps; at the end waits to be told to go on, or dies at the step `die`."""
    state = {"step": torch.zeros(3)}
    with everstep.Checkpointer(url, state) as checkpointer:
        for step in range(1, 11):
            state["step"] += 1
            checkpointer.save(step).wait()
            if step == die:
                os.kill(os.getpid(), signal.SIGKILL)
        print("waiting", flush=True)
        sys.stdin.readline()


@pytest.fixture
def logged(bucket, tmp_path):
    """A bucket with 10 to 12 of epoch 1, and 13 and 14 of epoch 2."""
    source, target = cli_store.make_logged(tmp_path / "source"), Bucket(bucket)
    Copier(source, target).copy(CheckpointName(12, 1))
    Copier(source, target).copy(CheckpointName(14, 2))
    return target


def old(monkeypatch, tier, *paths):
    """Let these be two hours old."""
    files = tier.files

    def aged(self, directory):
        found = files(directory).items()
        is_old = [f"{directory}/{name}" in paths for name, _ in found]
        return {n: (s, at - 7200.0 * o) for o, (n, (s, at)) in zip(is_old, found, strict=True)}

    monkeypatch.setattr(Bucket, "files", aged)


@pytest.mark.slow
def test_nothing_is_deleted_while_somebody_writes(logged, capsys, monkeypatch):
    monkeypatch.setattr(presence, "LEAVE_S", 0.5)
    writer = Presence(logged)
    writer.show(True)
    until(lambda: presence.living(logged), "it is shown")
    for command in (["rm", logged.root, "14-2"], ["gc", logged.root]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert "Conflict" in said
        assert f"{os.getpid()}" in said
        assert "somebody writes to it" in said
    assert Store(logged.root).steps() == [10, 11, 12, 13, 14]
    writer.end()
    assert not presence.living(logged)
    assert main(["rm", logged.root, "14-2"]) == 0
    assert main(["gc", logged.root]) == 0


def test_a_writer_that_leaves_is_waited_for(logged, monkeypatch):
    writer = Presence(logged)
    writer.show(True)
    until(lambda: presence.living(logged), "it is shown")
    leaves = threading.Timer(0.3, writer.end)
    leaves.start()
    assert retain.delete(logged, [CheckpointName(14, 2)])
    leaves.join()


def test_a_writer_that_died_counts_for_some_minutes(logged, monkeypatch, capsys):
    path = f"{names.WRITERS}/0123456789abcdef"
    logged.replace(path, b"{}")
    monkeypatch.setattr(presence, "LEAVE_S", 0.5)
    with pytest.raises(Conflict, match="for 5 min"):
        Store(logged.root).gc()
    old(monkeypatch, logged, path)
    files, _ = Store(logged.root).gc()
    assert files == 1
    assert logged.size(path) is None


def test_a_clock_that_is_wrong_does_not_matter(logged, monkeypatch):
    logged.replace(f"{names.WRITERS}/0123456789abcdef", b"{}")
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 86400)
    assert presence.living(Bucket(logged.root))


def test_a_trainer_is_a_writer_until_it_closes(url, monkeypatch, capsys):
    with Forked(saves_ten, url) as process:
        assert process.stdout.readline() == "waiting\n"
        until(lambda: presence.living(Bucket(url)), "it is shown")
        monkeypatch.setattr(presence, "LEAVE_S", 0.5)
        assert main(["rm", url, "3"]) == 1
        assert "somebody writes" in capsys.readouterr().err
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait() == 0
    monkeypatch.setattr(presence, "LEAVE_S", 30.0)
    assert main(["rm", url, "3"]) == 0


def test_a_trainer_that_was_killed_is_no_writer_when_its_keeper_is_done(url, monkeypatch):
    with Forked(saves_ten, url, 7) as process:
        assert process.wait() == -signal.SIGKILL
    monkeypatch.setattr(presence, "LEAVE_S", 30.0)
    assert main(["rm", url, "3"]) == 0


def test_who_copies_to_a_bucket_is_a_writer_there(store, bucket, monkeypatch):
    tiers = everstep.Tiers(remote=bucket)
    with everstep.Checkpointer(store, {"x": torch.ones(3)}, tiers=tiers) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step).wait("remote", timeout=60)
        until(lambda: presence.living(Bucket(bucket)), "it is shown")
        monkeypatch.setattr(presence, "LEAVE_S", 0.5)
        with pytest.raises(Conflict, match="somebody writes"):
            Store(bucket).delete(1)
    monkeypatch.setattr(presence, "LEAVE_S", 30.0)
    assert Store(bucket).delete(1)


def test_what_no_manifest_reaches_goes_when_it_is_old(logged, monkeypatch):
    lost = [f"{names.DATA}/00000011-0001-{token}-0.safetensors" for token in ("aa", "bb")]
    live = f"{names.DATA}/00000015-0002-cc-0.safetensors"
    table = names.table_path("0" * 32)
    for path in (*lost, live, table):
        logged.replace(path, b"data")
    assert retain.sweep(logged) == (0, 0)
    old(monkeypatch, logged, lost[0], live, table)
    assert retain.sweep(logged) == (2, 8)
    assert logged.size(lost[0]) is logged.size(table) is None
    assert logged.size(lost[1]) == logged.size(live) == 4
    assert Store(logged.root).verify().ok


def test_what_was_committed_since_it_looked_stays(logged, monkeypatch, tmp_path):
    """A step whose data was copied long ago is committed while gc looks around."""
    source = Disk(tmp_path / "source")
    step = CheckpointName(13, 1)
    (pack,) = catalog.read_manifest(source, step).all_parts[0].packs
    logged.replace(pack.path, source.read(pack.path))
    old(monkeypatch, logged, pack.path)
    looked, held = retain._idle, []

    def meanwhile(tier, directory):
        if not held:
            held.append(Copier(source, logged).copy(step))
        return looked(tier, directory)

    monkeypatch.setattr(retain, "_idle", meanwhile)
    retain.sweep(logged)
    assert held[0].checkpoints == [step]
    assert logged.size(pack.path) == pack.size
    assert Store(logged.root).verify().ok


def test_steps_are_listed_by_one_request(logged, monkeypatch):
    def fails(self, path):
        raise AssertionError(path)

    monkeypatch.setattr(Bucket, "size", fails)
    assert [name.step for name in catalog.committed(logged)] == [10, 11, 12, 13, 14]
