"""Two ranks that compress what they send, killed and started again: as if nothing had been."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import end_keeper, kinds

from everstep import Store

RANK = Path(__file__).with_name("ranks.py")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "stores").mkdir()
    yield tmp_path / "stores"
    for store in (tmp_path / "stores").iterdir():
        end_keeper(store)


def run(folder, name, last, *more):
    """Both ranks; what they print, by rank and kind."""
    meeting = folder.parent / name
    command = [sys.executable, str(RANK)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), str(meeting), str(last), *more],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        lines = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert {rank.returncode for rank in ranks} == {-signal.SIGKILL if more else 0}
    return [{found["kind"]: found for found in map(json.loads, rank)} for rank in lines]


@pytest.mark.slow
def test_two_ranks_killed_and_started_again(folder, tmp_path):
    straight = tmp_path / "straight" / "stores"
    straight.mkdir(parents=True)
    try:
        expected = run(straight, "first", 12)
    finally:
        for store in straight.iterdir():
            end_keeper(store)
    before = run(folder, "second", 7, "die")
    after = run(folder, "third", 12)
    for rank in range(2):
        for kind, wanted in expected[rank].items():
            found = after[rank][kind]
            assert found["first"] in (6, 7)
            losses = before[rank][kind]["losses"] | found["losses"]
            assert losses == wanted["losses"]
            assert found["state"] == wanted["state"]
            store = straight / f"{kind}.{rank}"
            assert kinds(store) == "b" + 11 * "r"
            assert Store(store).manifest(12).records[0].calls[0]["compressed"]
