"""The command `everstep` on a store with logs: what it says of bases, records and chains."""

import pytest

import cli_store
from commands import run, run_json
from everstep.cli.chains import Chains, Link
from everstep.format.manifest import CheckpointName
from everstep.store import commit
from everstep.tiers.disk import Disk


@pytest.fixture
def logged(tmp_path):
    path = tmp_path / "runs" / "log"
    cli_store.make_logged(path)
    return path


def rows_of(logged, capsys):
    """What `ls` says of each checkpoint, by its name."""
    return {row["name"]: row for row in run_json(capsys, "ls", logged)["checkpoints"]}


def lose(logged, name):
    """A checkpoint is no more, and what goes on from it is still there."""
    (logged / "checkpoints" / name / "manifest.json").unlink()


def test_ls_tells_states_from_logs(logged, capsys):
    assert run("ls", logged) == 0
    rows = [line.split("MiB")[0].split()[:-1] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row and row[0] in "●○"] == [
        ["●", "10", "state"],
        ["●", "11", "log", "of", "10"],
        ["●", "12", "log", "of", "10"],
        ["○", "13-1", "log", "of", "10"],
        ["○", "14-1", "state"],
        ["○", "15-1", "log", "of", "14"],
        ["●", "13", "state"],
        ["●", "14", "log", "of", "13", "←", "latest"],
    ]


def test_ls_json_tells_bases_and_records(logged, capsys):
    rows = rows_of(logged, capsys)
    log = rows["00000012-0001"]
    assert (log["kind"], log["base"], log["records"]) == ("log", {"step": 10, "epoch": 1}, 2)
    assert (log["previous"]["step"], log["previous"]["epoch"]) == (11, 1)
    state = rows["00000014-0001"]
    assert (state["kind"], state["base"], state["previous"]) == ("state", None, None)


def test_a_log_that_was_made_whole_needs_nothing_before_it(logged, capsys):
    cli_store.make_whole(Disk(logged), CheckpointName(12, 1))
    rows = rows_of(logged, capsys)
    assert rows["00000012-0001"]["base"] == {"step": 12, "epoch": 1}
    assert rows["00000013-0001"]["base"] == {"step": 12, "epoch": 1}
    assert (rows["00000012-0001"]["records"], rows["00000013-0001"]["records"]) == (0, 1)
    run("ls", logged)
    assert "log, whole" in capsys.readouterr().out
    assert run("show", logged, "12") == 0
    text = capsys.readouterr().out
    assert "made whole since, 6.7 MiB beside it" in text
    assert "  whole          6.7 MiB since " in text
    assert "bit for bit" in text
    whole = run_json(capsys, "show", logged, "12")["whole"]
    assert (whole["exact"], whole["size"]) == (True, rows["00000010-0001"]["size"])
    assert rows["00000012-0001"]["whole"] == whole
    assert rows["00000013-0001"]["whole"] is None
    lose(logged, "00000010-0001")
    assert run_json(capsys, "gc", logged)["orphans"] == ["00000011-0001"]


def test_a_log_that_was_made_whole_inexactly_is_still_replayed(logged, capsys):
    cli_store.make_whole(Disk(logged), CheckpointName(12, 1), exact=False)
    rows = rows_of(logged, capsys)
    row = rows["00000012-0001"]
    assert (row["base"], row["records"]) == ({"step": 10, "epoch": 1}, 2)
    assert row["whole"]["exact"] is False
    run("ls", logged)
    assert "log of 10 (whole: inexact)" in capsys.readouterr().out
    run("show", logged, "12")
    text = capsys.readouterr().out
    assert "2 records to replay" in text
    assert "but for last bits: a restore goes on replaying" in text
    assert run("rm", logged, "11-1", "--yes") == 1
    assert "--following" in capsys.readouterr().err


def test_rm_of_what_a_whole_step_does_not_need(logged, capsys):
    cli_store.make_whole(Disk(logged), CheckpointName(12, 1))
    assert run("rm", logged, "10-1", "11-1", "--yes") == 0
    assert run("verify", logged) == 0
    capsys.readouterr()
    assert run_json(capsys, "gc", logged)["orphans"] == []


def test_ls_of_a_log_whose_base_is_gone(logged, capsys):
    lose(logged, "00000013-0002")
    assert run("ls", logged) == 0
    assert "log of ?" in capsys.readouterr().out
    assert run_json(capsys, "ls", logged)["checkpoints"][-2]["base"] is None


def test_show_of_a_log(logged, capsys):
    assert run("show", logged, "12") == 0
    text = capsys.readouterr().out
    for expected in (
        "log of         step 10: 2 records to replay, 4.0 MiB, after a state of 6.7 MiB; 10.8",
        "calls          @0 optimizer  torch.optim.adamw.AdamW · 2 gradients, 2.0 MiB · 2 from bef",
        "clip 1 (4 B) · gradients 2 (2.0 MiB) · rng 1 (4.9 KiB)",
        "@0.model.wte.weight",
        "@0!clip.0",
    ):
        assert expected in text
    assert "follows" not in text


def test_show_json_of_a_log(logged, capsys):
    found = run_json(capsys, "show", logged, "12")
    assert found["kind"] == "log"
    assert found["previous"]["step"] == 11
    assert found["chain"]["base"] == {"step": 10, "epoch": 1}
    assert found["chain"]["records"] == 2
    assert found["chain"]["bytes"] == found["chain"]["base_bytes"] + found["chain"]["record_bytes"]
    (record,) = found["records"]
    assert (record["step"], record["bytes"]) == (12, found["size"])
    (call,) = record["calls"]
    assert (call["optimizer"], call["gradients"]) == ("optimizer", 2)
    assert [(len(clip["names"]), clip["foreach"]) for clip in call["clips"]] == [(2, True)]
    assert call["gradient_bytes"] == 512 * 1024 * 4 + 96 * 64 * 2
    assert {row["name"] for row in found["tensors"]} >= {"@0.model.wte.weight", "@0!clip.0"}
    state = run_json(capsys, "show", logged, "10")
    assert (state["kind"], state["chain"], state["records"]) == ("state", None, [])


def test_show_of_a_log_whose_chain_is_broken(logged, capsys):
    lose(logged, "00000010-0001")
    assert run("show", logged, "12") == 0
    assert "NOT RESTORABLE: " in capsys.readouterr().out
    found = run_json(capsys, "show", logged, "12")
    assert found["chain"] is None
    assert "goes on from it" in found["broken"]


@pytest.mark.parametrize(
    "calls", [({"optimizer": "o"},), (None,), ({"class": 1, "optimizer": 1, "sets": 2},)]
)
def test_show_of_calls_that_are_none(tmp_path, capsys, calls):
    disk, identity = cli_store.begin(tmp_path)
    commit.claim_epoch(disk, None)
    base = cli_store.save(disk, identity, 1, 1)
    cli_store.save_log(disk, identity, 2, base, calls=calls)
    assert run("show", tmp_path) == 1
    assert ".records[0].calls[0]" in capsys.readouterr().err


def test_verify_of_a_log_reads_its_chain(logged, capsys):
    assert run("verify", logged, "12") == 0
    assert "3 checkpoints (a log, and what it goes on from) intact" in capsys.readouterr().out
    assert run("verify", logged, "10") == 0
    assert "1 checkpoint intact" in capsys.readouterr().out


def test_verify_names_the_logs_that_damage_cuts_off(logged, capsys):
    pack = next(logged.glob("data/00000011-0001-*.safetensors"))
    with pack.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\0\0\0")
    assert run("verify", logged) == 1
    text = capsys.readouterr().out
    assert "00000012-0001 to 00000013-0001  2 logs cannot be restored" in text
    assert "1 of 8 checkpoints damaged" in text
    assert run_json(capsys, "verify", logged, code=1)["cut_off"] == [
        "00000012-0001",
        "00000013-0001",
    ]


def test_rm_of_what_logs_go_on_from(logged, capsys):
    assert run("rm", logged, "10", "13-1", "--yes") == 1
    error = capsys.readouterr().err
    assert error.startswith("everstep: Conflict: deleting 10-1, 13-1 from ")
    assert "what follows (steps 11 to 12) goes on from there" in error
    assert f"everstep rm {logged} 10-1 13-1 --following" in error
    assert len(run_json(capsys, "ls", logged)["checkpoints"]) == 8
    deleted = run_json(capsys, "rm", logged, "11", "--following")["deleted"]
    assert deleted == ["00000011-0001", "00000012-0001", "00000013-0001"]
    assert run_json(capsys, "rm", logged, "10")["deleted"] == ["00000010-0001"]


def test_gc_names_logs_without_a_base(logged, capsys):
    assert run_json(capsys, "gc", logged)["orphans"] == []
    lose(logged, "00000010-0001")
    assert run_json(capsys, "gc", logged)["orphans"] == [
        f"{step:08d}-0001" for step in (11, 12, 13)
    ]
    assert run("gc", logged) == 0
    text = capsys.readouterr().out
    assert "3 logs cannot be restored any more" in text
    assert f"everstep rm {logged} 11-1 --following" in text
    assert run("rm", logged, "11-1", "--following") == 0


def test_chains_end_also_where_a_store_is_made_up(tmp_path):
    """A ring of logs, which no digest allows: looking at it must end all the same."""
    disk, _ = cli_store.begin(tmp_path)
    one, two = CheckpointName(1, 1), CheckpointName(2, 1)
    chains = Chains(disk)
    chains._links = {one: Link({}, two, 1, True), two: Link({}, one, 1, True)}
    assert chains.origin(one) is None
