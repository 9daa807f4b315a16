"""The keeper: a process of its own, how it ends, its files, and what it leaves in the trainer."""

import os
import re
import signal
import stat
import threading
from pathlib import Path

import pytest
import torch
from keepers import Process, Trainer, arenas_mapped, crash, descriptors, ended, socket_of, until

import stores
from everstep import Checkpointer, Store, Unavailable
from everstep.keeper import home
from everstep.keeper.arena import Arena

# ---- a process of its own --------------------------------------------------------------------


def test_it_shares_nothing_with_the_trainer(store):
    process = Process(store, "print(trainer.start().keeper, flush=True); sys.stdin.read()")
    keeper = int(process.read())
    assert os.getsid(keeper) != os.getsid(process.pid)
    status = Path(f"/proc/{keeper}/status").read_text()
    assert int(re.search(r"PPid:\s+(\d+)", status)[1]) != process.pid
    theirs = descriptors(process.pid)
    fds = descriptors(keeper)
    assert fds[0] == "/dev/null"
    assert fds[1] == fds[2] == str(socket_of(store).with_suffix(".log"))
    assert not {name for name in theirs.values() if "pipe" in name} & set(fds.values())
    maps = Path(f"/proc/{keeper}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    assert int(re.search(r"RssAnon:\s+(\d+)", status)[1]) < 60 << 10
    process.kill()


def children():
    """Of this process: those that have ended and nobody waited for, too."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def test_it_is_no_zombie_and_no_child(store):
    before = children()
    with Trainer(store, idle_s=0.0) as trainer:
        keeper = trainer.keeper
        os.kill(keeper, signal.SIGKILL)
        trainer.start()
        assert trainer.keeper != keeper
        assert children() == before


def test_only_this_user_can_open_it(store):
    with Trainer(store):
        path = socket_of(store)
        for file in (path, path.with_suffix(".lock"), path.with_suffix(".log")):
            found = file.stat()
            assert found.st_uid == os.getuid()
            assert stat.S_IMODE(found.st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.slow
def test_eight_trainers_at_once_have_one_keeper(store):
    script = "print(trainer.keeper, flush=True); sys.stdin.read()"
    places = [{**os.environ, "TMPDIR": "/var/tmp"}, {**os.environ, "XDG_RUNTIME_DIR": "/nowhere"}]
    processes = [Process(store, script, env=places[number % 2]) for number in range(8)]
    assert len({process.read() for process in processes}) == 1
    for process in processes:
        process.close()


def test_left_over_files_do_no_harm(store):
    path = socket_of(store)
    path.write_text("no socket")
    path.with_suffix(".lock").write_text("a lock of nobody")
    with Trainer(store) as trainer:
        trainer.start().save(1)


# ---- its end ---------------------------------------------------------------------------------


def test_it_ends_when_the_trainers_have_left(store):
    with Trainer(store, idle_s=0.1) as trainer:
        trainer.start().save(1)
    assert ended(trainer.keeper)
    assert not list(socket_of(store).parent.glob(f"{socket_of(store).stem}.*"))


def test_files_of_keepers_that_were_killed_long_ago_go(store, other_store):
    with Trainer(store) as trainer, Trainer(other_store) as other:
        for path in socket_of(store), socket_of(other_store):
            os.utime(path.with_suffix(".lock"), (0, 0))
        os.kill(trainer.keeper, signal.SIGSTOP)
        trainer.client.close()
        os.kill(trainer.keeper, signal.SIGKILL)
        assert ended(trainer.keeper)
        with Trainer(store.with_name("third")):
            left = socket_of(store).with_suffix(".lock")
            until(lambda: not left.exists(), "the files of the first one go")
            assert socket_of(other_store).with_suffix(".lock").exists()
        other.start().save(1)
    stores.end_keeper(store.with_name("third"))


def test_it_ends_when_a_dead_trainer_does_not_come_back(store):
    keeper = int(crash(store, "trainer.start().save(1); said = trainer.keeper", idle_s=0.3))
    assert ended(keeper)
    assert Store(store).steps() == [1]


def test_sigterm_finishes_what_is_sealed(store):
    with Trainer(store, confirms=False) as trainer:
        trainer.start()
        sequence = trainer.seal(1)
        trainer.expect("written", sequence)
        os.kill(trainer.keeper, signal.SIGTERM)
        trainer.client.confirm(sequence, None)
        trainer.expect("local", sequence)
        keeper = trainer.keeper
    assert ended(keeper, 20)  # at once, though idle_s is longer
    assert Store(store).steps() == [1]


def test_leaving_and_coming_back_at_once(store):
    """The old keeper is on its way out: whoever connects to it must not be lost."""
    for step in range(1, 7):
        with Trainer(store, idle_s=0.0) as trainer:
            trainer.start().save(step)
    assert Store(store).verify().checkpoints == 6


# ---- its files -------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".sock", ".lock"])
def test_where_its_files_were_deleted_there_is_another(store, suffix):
    with Trainer(store) as trainer:
        trainer.start().save(1)
        socket_of(store).with_suffix(suffix).unlink()
        until(lambda: home.status_of(store) is None, "it makes way")
        with Trainer(store) as other:
            assert other.keeper != trainer.keeper
            trainer.save(2)
            trainer.close()
            assert ended(trainer.keeper)
            other.start().save(3)


def test_a_keeper_that_was_replaced_leaves_its_successor_alone(store):
    with Trainer(store) as trainer:
        trainer.start().save(1)
        old = trainer.keeper
        os.kill(old, signal.SIGSTOP)
        for suffix in (".sock", ".lock"):
            socket_of(store).with_suffix(suffix).unlink()
        with Trainer(store) as other:
            os.kill(old, signal.SIGCONT)
            assert other.keeper != old
            trainer.save(2)
            trainer.close()
            assert ended(old)
            assert socket_of(store).exists()
            other.start().save(3)


def test_its_log_has_a_limit(store):
    with Trainer(store) as trainer:
        path = socket_of(store).with_suffix(".log")
        with path.open("ab") as log:
            log.write(b"x" * (home.LOG_BYTES_MAX + 1) + b"the end\n")
        until(lambda: path.stat().st_size < home.LOG_BYTES_MAX, "the log is trimmed")
        assert path.read_bytes().endswith(b"the end\n")
        trainer.start()


def test_what_killed_keepers_left_goes(store):
    directory = home.runtime_directory()
    names = [f"{name}{suffix}" for name in ("dead", "fresh") for suffix in (".lock", ".log")]
    for path in map(directory.joinpath, names):
        path.touch(mode=0o600)
    os.utime(directory / "dead.lock", (0, 0))
    with Trainer(store):
        until(lambda: not (directory / "dead.log").exists(), "it is swept")
        until(lambda: not (directory / "dead.lock").exists(), "its lock goes last")
        assert (directory / "fresh.log").exists()  # somebody may want to read it
    for path in map(directory.joinpath, names):
        path.unlink(missing_ok=True)


def test_it_tells_how_much_is_written(store, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'everstep.keeper' in sys.orig_argv:\n"
        "    from everstep.keeper import process\n"
        "    process.PULSE_S = 0.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Trainer(store) as trainer, Trainer(store) as other:
        before = other.client.patience._progressed
        trainer.start().save(1)
        until(lambda: other.client.patience._progressed > before, "it is told")


# ---- the trainer's own things ----------------------------------------------------------------


def test_a_closed_trainer_leaves_nothing_in_its_process(store):
    state = {"weight": torch.arange(1000.0)}
    handles = []
    mapped = arenas_mapped("self")  # by the tests before this one
    with Checkpointer(store, state) as checkpointer:
        handles.append(checkpointer.save(1))
    del checkpointer
    before = sorted(descriptors("self").values())
    for step in range(2, 5):
        with Checkpointer(store, state) as checkpointer:
            checkpointer.restore()
            handles.append(checkpointer.save(step))
        assert arenas_mapped("self") <= mapped
    assert len(descriptors("self")) <= len(before)
    assert not [each for each in threading.enumerate() if each.name == "everstep-client"]
    assert [handle.level for handle in handles] == ["local"] * 4


def test_arenas_of_absurd_sizes_are_refused():
    with pytest.raises(Unavailable, match="is the limit"):
        Arena.create(1, 2 << 30, 4096)
