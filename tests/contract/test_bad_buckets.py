"""Buckets that will not do: each is told, by an error of the right class, and what can be read is
read."""

import pytest
import torch

import cli_store
import everstep
from everstep import Missing, Store, Unavailable, Unsupported
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.store.copy import Copier
from everstep.tiers.bucket import Bucket
from examples import slow
from stores import end_keeper

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
