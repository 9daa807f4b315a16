"""The command `everstep`: what it prints, its exit codes, and that it starts without torch."""

import os
import subprocess
import sys

import pytest

import cli_store
from commands import run, run_json
from everstep.cli import main as command
from everstep.cli import text
from everstep.format.document import FORMAT_VERSION, seal
from everstep.format.manifest import CheckpointName
from everstep.store import commit
from everstep.tiers.disk import Disk

PROGRAM = "import sys; from everstep.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "runs" / "gpt"
    cli_store.make_branched(path)
    return path


def test_ls_tells_what_was_left_behind(store, capsys):
    assert run("ls", store) == 0
    out = capsys.readouterr().out
    assert "5 checkpoints · 1 of them left behind (○)" in out
    lines = [line.split("  ")[0] for line in out.splitlines()[3:]]
    captions = [line.split(" · ")[:2] for line in lines if line.startswith("epoch")]
    assert captions == [["epoch 1", "from nothing"], ["epoch 2", "from step 80 of epoch 1"]]
    rows = [line.split()[:2] for line in out.splitlines()[3:]]
    steps = [row for row in rows if row[0] in "●○"]
    assert steps == [["●", "40"], ["●", "80"], ["○", "120-1"], ["●", "81"], ["●", "100"]]
    assert rows[0] == ["epoch", "1"]
    assert rows[4] == ["epoch", "2"]


def test_ls_shows_tags_metrics_and_size(store, capsys):
    run("ls", store)
    lines = capsys.readouterr().out.splitlines()
    assert any(" 80 " in line and "best" in line and "loss 5" in line for line in lines)
    assert any(" 100 " in line and "latest" in line and "6.7 MiB" in line for line in lines)


def test_ls_json(store, capsys):
    found = run_json(capsys, "ls", store)
    assert found["latest"] == 100
    assert [row["name"] for row in found["checkpoints"] if not row["current"]] == ["00000120-0001"]
    assert [epoch["fork"] for epoch in found["epochs"]] == [0, 80]
    tags = {row["step"]: row["tags"] for row in found["checkpoints"]}
    assert tags == {40: [], 80: ["best"], 81: [], 100: [], 120: []}


def test_ls_of_an_empty_store(tmp_path, capsys):
    cli_store.begin(tmp_path)
    assert run("ls", tmp_path) == 0
    assert "nothing is committed yet" in capsys.readouterr().out


def test_ls_names_a_damaged_manifest(store, capsys):
    manifest = store / "checkpoints" / "00000081-0002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert run("ls", store) == 0
    assert "corrupt" in capsys.readouterr().out
    assert "problem" in run_json(capsys, "ls", store)["checkpoints"][2]


def test_ls_hides_the_middle_of_long_runs(tmp_path, capsys):
    disk, identity = cli_store.begin(tmp_path)
    commit.claim_epoch(disk, None)
    for step in range(1, 31):
        cli_store.save(disk, identity, step, 1)
    commit.set_tag(disk, "best", CheckpointName(20, 1))
    assert run("ls", tmp_path) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[4:]]
    shown = [["●", str(step)] for step in (1, 2, 20, *range(25, 31))]
    assert rows == [*shown[:2], ["┊", "17"], shown[2], ["┊", "4"], *shown[3:]]
    assert run("ls", tmp_path, "--all") == 0
    assert capsys.readouterr().out.count("●") == 30


def test_ls_leaves_out_epochs_that_wrote_nothing(store, capsys):
    disk = Disk(store)
    for fork in (100, 81):
        commit.claim_epoch(disk, CheckpointName(fork, 2))
    assert run("ls", store) == 0
    out = capsys.readouterr().out
    assert "epoch 3 " not in out
    assert "epoch 4 · from step 81 of epoch 2" in out
    assert "○ 100-2" in out


def test_show_takes_the_newest_a_step_a_tag_or_a_full_name(store, capsys):
    for words, name in [
        ([], "00000100-0002"),
        ([80], "00000080-0001"),
        (["best"], "00000080-0001"),
        (["120-1"], "00000120-0001"),
    ]:
        assert run_json(capsys, "show", store, *words)["name"] == name


def test_show_prints_all_there_is(store, capsys):
    assert run("show", store, "best") == 0
    shown = capsys.readouterr().out
    for expected in (
        "step 80 · epoch 1 · best",
        "capture        strategy full · every 1",
        "memory         slots 2 · image 6.7 MiB · budget 1.1 GiB · formula 2 images",
        "optimizer.0  lr 0.0003 · betas [0.9, 0.95] · weight_decay 0.1",
        "{epoch 2, position 4711}",
        "6 tensors, 6.7 MiB: ema 1 (0 B) · model 3 (2.0 MiB) · optimizer 2 (4.7 MiB)",
        "model.wte.weight = model.head.weight",
        "512 × 1024",
    ):
        assert expected in shown


def test_settings_tell_their_units():
    figures = {"is_log": False, "copy_bytes_per_s": 2 << 30, "read_bytes_per_s": 0}
    figures |= {"call_s": 0.0013, "refusal": None, "record_bytes": 1 << 20}
    assert text.settings(figures) == (
        "log no · copy 2.0 GiB/s · read unknown · call 1.3 ms · record 1.0 MiB"
    )


def test_settings_of_a_document_that_lies():
    assert text.settings({"budget_bytes": -(10**400), "copy_s": float("nan")}).startswith("budget_")


def test_tagged_values_are_told_in_words():
    nan = {"$": "float", "v": "7ff8000000000000"}
    value = {"a": {"$": "tuple", "v": [1.0, nan]}, "b": list(range(9)), "c": {"$": "new"}}
    assert text.brief(value) == "{a [1, nan], b 9 items, c new}"


def test_show_json_tells_the_chunks_of_each_tensor(store, capsys):
    tensors = {row["name"]: row for row in run_json(capsys, "show", store)["tensors"]}
    moment = tensors["optimizer.state.model.wte.weight.exp_avg"]
    assert moment["size"] == 1200 * 1024 * 4
    assert (moment["chunks"], len(moment["digest"])) == (2, 32)
    assert tensors["model.wte.weight"]["aliases"] == ["model.head.weight"]


@pytest.mark.parametrize(("pattern", "count"), [("attention", 2), ("*.weight", 2), ("head", 1)])
def test_show_filters_by_name(store, capsys, pattern, count):
    assert len(run_json(capsys, "show", store, "--names", pattern)["tensors"]) == count


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--names", "nothing"], ""),
        (["120"], "120-1"),
        (["79"], "it has 4 from 40 to 100, the nearest is 80"),
    ],
)
def test_show_of_what_does_not_exist(store, capsys, words, said):
    assert run("show", store, *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("everstep: Missing: ")
    assert said in error
    assert error.count("\n") == 1


def test_verify_finds_a_flipped_bit(store, capsys):
    assert run("verify", store) == 0
    assert "5 checkpoints intact" in capsys.readouterr().out
    pack = next(store.glob("data/00000081-0002-*.safetensors"))
    with pack.open("r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)[0]
        file.seek(1 << 20)
        file.write(bytes([byte ^ 16]))
    assert run("verify", store) == 1
    shown = capsys.readouterr().out
    assert "1 of 5 checkpoints damaged" in shown
    assert "model.wte.weight" in shown or "exp_avg" in shown
    assert run("verify", store, "80") == 0
    capsys.readouterr()
    found = run_json(capsys, "verify", store, code=1)
    assert list(found["problems"]) == ["00000081-0002"]


def test_rm_deletes_and_tells_the_bytes(store, capsys):
    size = sum(path.stat().st_size for path in store.glob("data/000000[48]0-*"))
    found = run_json(capsys, "rm", store, "40", "best")
    assert found == {"deleted": ["00000040-0001", "00000080-0001"], "bytes": size}
    assert run_json(capsys, "ls", store)["checkpoints"][0]["step"] == 81


def test_rm_of_one_that_is_missing_deletes_none(store, capsys):
    assert run("rm", store, "40", "41") == 1
    capsys.readouterr()
    assert len(run_json(capsys, "ls", store)["checkpoints"]) == 5


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 4), ("\n", 1, 5), ("", 1, 5)])
def test_rm_asks_on_a_terminal(store, capsys, monkeypatch, answer, code, left):
    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run("rm", store, "40") == code
    assert "delete 1 checkpoint of" in capsys.readouterr().err
    assert len(run_json(capsys, "ls", store)["checkpoints"]) == left
    assert run("rm", store, "81", "--yes") == 0


def test_gc_deletes_what_older_epochs_left(store, capsys):
    stray = store / "data" / "00000099-0001-0123abcd-0.safetensors"
    stray.write_bytes(bytes(4096))
    assert run_json(capsys, "gc", store) == {"files": 1, "bytes": 4096, "orphans": []}
    assert not stray.exists()
    assert run("gc", store) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_ls_says_nothing_of_kinds_where_there_is_one(store, capsys):
    run("ls", store)
    assert "KIND" not in capsys.readouterr().out


def test_inside_a_store_its_name_may_be_left_out(store, capsys, monkeypatch):
    monkeypatch.chdir(store)
    assert run("ls") == 0
    capsys.readouterr()
    assert run_json(capsys, "show", "80")["step"] == 80
    assert run_json(capsys, "rm", "40")["deleted"] == ["00000040-0001"]
    assert run("verify", "best") == 0


def test_without_a_store_it_says_where_one_is(store, capsys, monkeypatch):
    monkeypatch.chdir(store.parent.parent)
    for words in (["ls"], ["show", "80"], ["verify"], ["gc"], ["rm", "80"]):
        assert run(*words) == 1
        error = capsys.readouterr().err
        assert error.startswith("everstep: Missing: the current directory is no store")
        assert "runs/gpt" in error
    assert run("ls", "runs") == 1
    assert "runs is no store: it has no everstep.json" in capsys.readouterr().err
    assert run("ls", "nowhere") == 1
    assert "there is no nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc", "rm -y", "materialize"])
def test_a_store_of_another_format_is_left_alone(command, store, capsys):
    (store / "everstep.json").write_bytes(seal({"format": FORMAT_VERSION + 1, "run": "r"}))
    before = sorted(store.rglob("*"))
    name, *options = command.split()
    steps = ["3"] if name in ("rm", "materialize") else []
    assert run(name, store, *steps, *options) == 1
    assert "everstep: Unsupported: " in capsys.readouterr().err
    assert sorted(store.rglob("*")) == before


def test_a_store_of_somebody_else(store, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    assert run("ls", store) == 1
    said = capsys.readouterr().err
    assert f"looking for {store / 'everstep.json'}: Permission denied. This user may not" in said


def test_usage_errors_exit_with_2(store, capsys):
    for words in (["nonsense"], ["ls", "--nonsense"], ["rm", store], ["ls", store, "80"]):
        with pytest.raises(SystemExit) as exit_:
            run(*words)
        assert exit_.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run("fork", store, "80")
    assert "a step is missing, or what comes after it" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.COMMANDS)


@pytest.mark.parametrize(
    ("name", "default"), [("show", "the newest"), ("verify", "all on all branches")]
)
def test_help_says_what_is_meant_without_a_step(name, default, capsys):
    with pytest.raises(SystemExit):
        run(name, "--help")
    assert f"(default: {default})" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_exits_with_130(store, monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_dispatch", interrupt)
    assert run("ls", store) == 130


def test_ls_needs_neither_torch_nor_numpy_nor_rich(store):
    code = (
        "import sys; from everstep.cli.main import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    for words in (["ls", store], ["show", store], ["verify", store], ["gc", store]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == "[]\n"


def test_a_reader_that_leaves_early_is_no_error(store):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "ls", str(store)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_stdout_the_exit_code_tells(store):
    command = 'exec "$0" -c "$1" ls "$2" >&-'
    for path, expected in ((store, 0), (store / "missing", 1)):
        words = ["sh", "-c", command, sys.executable, PROGRAM, str(path)]
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == expected
        assert "Traceback" not in done.stderr


def test_what_a_store_holds_cannot_steer_the_terminal(tmp_path, capsys):
    disk, identity = cli_store.begin(tmp_path)
    commit.claim_epoch(disk, None)
    cli_store.save(disk, identity, 1, 1, metrics={"a\x1b[2J": "\x1b]0;owned\x07\n"})
    for words in (["ls", tmp_path], ["show", tmp_path]):
        assert run(*words) == 0
        assert not set(capsys.readouterr().out) & {"\x1b", "\x07"}


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 59, "1536.0 PiB"),
    ],
)
def test_sizes(size, words):
    assert text.size(size) == words


def test_a_terminal_has_colours_and_an_end(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "6")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert text.line("abcdefghij", "bad") == "\x1b[1;31mabcde…\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert text.line("abcdef", "bad") == "abcdef"
