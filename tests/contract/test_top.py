"""What `everstep top` tells of a run that goes on."""

import json
import re

import pytest
from test_bucket_store import build, train

import everstep
from everstep import Tiers
from everstep.cli import top
from everstep.cli.main import main
from forked import run
from stores import end_keeper


@pytest.fixture
def running(tmp_path):
    """A run with a remote tier, of which three steps are everywhere."""
    store, state = tmp_path / "local", build()
    tiers = Tiers(remote=tmp_path / "remote")
    with everstep.Checkpointer(store, state, strategy="full", tiers=tiers) as checkpointer:
        for step in (1, 2, 3):
            train(state)
            checkpointer.save(step).wait("remote", timeout=60)
        yield store, checkpointer
    end_keeper(store)


def snapshot(store, capsys):
    assert main(["top", str(store), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_snapshot_tells_tiers_and_trainers(running, capsys):
    store, checkpointer = running
    found = snapshot(store, capsys)
    [local, tier], [trainer] = found["tiers"], found["trainers"]
    assert (tier["level"], tier["newest"], tier["copied"], tier["waiting"]) == ("remote", 3, 3, 0)
    assert (local["newest"], local["copied"], local["waiting"]) == (3, 3, 0)
    assert (local["level"], local["place"]) == ("local", str(store))
    assert local["bytes"] > 3 * 1600
    assert local["seconds"] > 0
    assert 0 <= found["time"] - local["newest_at"] < 600
    assert trainer["lives"]
    assert trainer["memory_bytes"] > 3 * 1600
    assert trainer["figures"]["saves"] in (2, 3)  # told with the third, which may count already
    assert tier["bytes"] == checkpointer.metrics.tiers["remote"]["bytes"] > 3 * 1600


def test_the_view_has_a_line_for_each_tier(running, capsys):
    shown = top.lines(snapshot(running[0], capsys))
    assert [line.split()[:2] for line in shown if re.match("local|remote", line)] == [
        ["local", "3"],
        ["remote", "3"],
    ]
    assert any("stall" in line for line in shown)


def test_openmetrics_has_each_figure_once(running, capsys):
    shown = list(top.openmetrics(snapshot(running[0], capsys)))
    assert shown[-1] == "# EOF"
    samples = dict(line.rsplit(" ", 1) for line in shown if not line.startswith("#"))
    assert samples['everstep_copied_total{level="remote"}'] == "3"
    assert samples['everstep_newest{level="local"}'] == "3"
    assert float(samples['everstep_newest_age_seconds{level="remote"}']) >= 0
    types = [line.split()[2] for line in shown if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_two_runs_of_a_store_are_one_series(running, capsys):
    found = snapshot(running[0], capsys)
    local, tier = found["tiers"]
    later = {**local, "newest": 9, "newest_at": local["newest_at"] + 1}
    found["tiers"] = [later, local, tier]
    shown = [line for line in top.openmetrics(found) if not line.startswith("#")]
    assert [line for line in shown if line.startswith('everstep_newest{level="local"')] == [
        'everstep_newest{level="local"} 9'
    ]
    names = [line.rsplit(" ", 1)[0] for line in shown]
    assert len(names) == len(set(names))


def test_a_textfile_is_replaced_whole(running, tmp_path, monkeypatch):
    store, _ = running
    end = top._snapshots(str(store), 0.01)
    assert next(end)["tiers"]
    path = tmp_path / "everstep.prom"
    path.write_text("old\n")
    monkeypatch.setattr(top, "_snapshots", lambda *_: [next(end)])
    assert main(["top", str(store), "--openmetrics", str(path)]) == 0
    assert path.read_text().endswith("# EOF\n")
    assert list(tmp_path.glob(".*")) == []


def test_without_a_keeper_it_says_so(tmp_path, capsys):
    run(saves_one, tmp_path / "store")
    end_keeper(tmp_path / "store")
    assert main(["top", str(tmp_path / "store")]) == 1
    assert "no keeper of it runs on this node" in capsys.readouterr().err


def saves_one(store):
    with everstep.Checkpointer(store, build()) as checkpointer:
        checkpointer.save(1)
