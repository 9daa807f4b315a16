"""What holds for all tiers: a directory, a prefix of a bucket, memory, and a partner's memory."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep import Corrupt, Missing, Unavailable, Unsupported
from everstep.tiers import files
from everstep.tiers.memory import Memory
from everstep.tiers.tier import name_of, tier_at
from examples import slow
from stores import write

DATA = os.urandom(100_000)


@pytest.fixture(params=["disk", "bucket", *slow("ceph_bucket")])
def tier(request, tmp_path):
    """One that holds a store."""
    return made(request, tmp_path)


@pytest.fixture(params=["disk", "bucket", "memory", "peer", *slow("ceph_bucket")])
def place(request, tmp_path):
    """One to which checkpoints are copied, and as it is read: a partner's memory by the partner."""
    if request.param == "peer":
        partner = request.getfixturevalue("partner")
        return partner.memory, partner.peer()
    return (made(request, tmp_path),) * 2


def made(request, tmp_path):
    if request.param == "memory":
        return Memory(64 << 20)
    is_disk = request.param == "disk"
    found = tier_at(tmp_path / "tier" if is_disk else request.getfixturevalue(request.param))
    found.make_directories(["", "data"])
    return found


def views(data, size=4096):
    return [memoryview(data)[at : at + size] for at in range(0, len(data), size)]


def test_what_is_written_is_read(tier):
    write(tier, "data/pack", views(DATA))
    assert tier.read("data/pack") == DATA


def test_what_is_there_is_read_by_ranges(place):
    writer, tier = place
    writer.stream("data/pack", views(DATA), len(DATA))
    assert tier.read("data/pack") == DATA
    assert tier.size("data/pack") == len(DATA)
    reader = tier.open("data/pack")
    assert reader.size == len(DATA)
    view = memoryview(bytearray(5000))
    reader.read_into(4000, view)
    assert view == DATA[4000:9000]
    with pytest.raises(Corrupt, match="ends at byte 100000"):
        reader.read_into(99_000, view)
    reader.close()


def test_large_data_is_written_while_it_arrives(tier):
    large = bytearray(os.urandom(20 << 20))
    arrived = []
    write(tier, "data/large", [memoryview(large)], arrived.append)
    assert arrived == sorted(arrived)
    assert arrived[-1] == len(large)
    assert len(arrived) > 1
    assert tier.read("data/large") == large


def test_what_is_written_is_counted_meanwhile(tier):
    """Who waits is told, so that a slow upload is not taken for one that hangs. A disk's writes may
    all be under way when the last bytes are there."""
    large, counts = bytearray(160 << 20), []
    write(tier, "data/large", [memoryview(large)], lambda end: counts.append(tier.written))
    assert counts[-1] > 0 or tier.is_directory
    assert tier.written >= len(large)


def test_a_new_file_is_there_when_it_is_finished(tier):
    with tier.new_file("data/pieces") as file:
        file.write(memoryview(b"one "), 0)
        file.write(memoryview(b"two"), 4)
    file.finish()
    tier.sync_entries(["data/pieces"])
    assert tier.read("data/pieces") == b"one two"


def test_a_new_file_may_be_written_from_one_buffer_and_the_first_page_last(tier):
    buffer = bytearray(1 << 20)
    with tier.new_file("data/packed") as file:
        for index in range(20):
            buffer[:] = bytes([index]) * len(buffer)
            file.write(memoryview(buffer), 4096 + index * len(buffer))
        file.write(memoryview(b"h" * 4096), 0)
    assert tier.size("data/packed") in (None, 4096 + 20 * len(buffer))  # a bucket: nothing yet
    file.finish()
    tier.sync_entries(["data/packed"])
    body = b"".join(bytes([index]) * len(buffer) for index in range(20))
    assert tier.read("data/packed") == b"h" * 4096 + body


def test_what_is_streamed_appears_whole_in_place_of_what_was_there(place):
    writer, tier = place
    pieces = [bytes([index]) * (5 << 20) for index in range(5)]

    def bring():
        for piece in pieces:
            assert tier.size("data/streamed") in (None, 4)
            yield memoryview(piece)

    writer.stream("data/streamed", bring(), 25 << 20)
    assert tier.read("data/streamed") == b"".join(pieces)
    writer.replace("data/streamed", b"less")
    writer.stream("data/streamed", bring(), 25 << 20)
    writer.settle("data/streamed")
    assert tier.read("data/streamed") == b"".join(pieces)
    assert tier.list("data") == ["streamed"]


def test_what_fails_to_come_is_not_there(place):
    writer, tier = place

    def bring():
        for _ in range(4):
            yield memoryview(bytes(8 << 20))
        raise RuntimeError("the image is torn")

    with pytest.raises(RuntimeError, match="torn"):
        writer.stream("data/torn", bring(), 40 << 20)
    assert tier.size("data/torn") is None
    assert tier.list("data") == []
    writer.stream("data/whole", views(DATA), len(DATA))  # its memory is free


@pytest.mark.parametrize("way", ["write", "new_file"])
def test_what_fails_is_not_there(tier, way):
    def fail(end):
        raise RuntimeError("the image is torn")

    def write_piece_by_piece():
        with tier.new_file("data/torn") as file:
            file.write(memoryview(DATA), 0)
            fail(0)

    def write_at_once():
        write(tier, "data/torn", views(DATA), fail)

    with pytest.raises(RuntimeError, match="torn"):
        {"write": write_at_once, "new_file": write_piece_by_piece}[way]()
    assert tier.size("data/torn") is None
    assert tier.list("data") == []


def test_one_of_many_creates(place):
    tier, reader = place
    start = threading.Barrier(8)

    def create(index):
        start.wait()
        return tier.create("epochs/0001.json", f"writer {index}".encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert tier.read("epochs/0001.json") == f"writer {won.index(True)}".encode()
    assert not tier.create("epochs/0001.json", b"late")
    assert reader.holds("epochs/0001.json")


def test_documents_are_replaced_and_deleted(place):
    writer, tier = place
    writer.replace("tags/best.json", b"1")
    writer.replace("tags/best.json", b"2")
    assert tier.read("tags/best.json") == b"2"
    writer.delete("tags/best.json")
    writer.delete("tags/best.json")
    assert not tier.holds("tags/best.json")
    with pytest.raises(Missing, match=r"tags/best\.json"):
        tier.read("tags/best.json")
    with pytest.raises(Missing):
        tier.open("tags/best.json")


def test_names_are_listed_by_directory(place):
    writer, tier = place
    for path in ("checkpoints/a/manifest.json", "checkpoints/b/state.json", "everstep.json"):
        writer.create(path, b"{}")
    assert tier.list("checkpoints") == ["a", "b"]
    assert tier.list("checkpoints/a") == ["manifest.json"]
    assert {"checkpoints", "everstep.json"} <= set(tier.list(""))
    assert tier.list("nowhere") == []


def test_sizes_and_ages_of_files_are_told(tier):
    tier.create("checkpoints/a/manifest.json", b"{}")
    [(name, (size, written))] = tier.files("checkpoints/a").items()
    assert (name, size) == ("manifest.json", 2)
    assert abs(tier.now() - written) < 60
    assert tier.files("checkpoints") == tier.files("nowhere") == {}


def test_what_holds_a_file_is_listed(place):
    writer, tier = place
    for path in ("checkpoints/b/manifest.json", "checkpoints/a/manifest.json"):
        writer.create(path, b"{}")
    writer.create("checkpoints/c/state.json", b"{}")
    assert tier.holders("checkpoints", "manifest.json") == ["a", "b"]
    assert tier.holders("nowhere", "manifest.json") == []


def test_a_document_that_is_too_large_is_not_read(place, monkeypatch):
    monkeypatch.setattr(files, "DOCUMENT_BYTES_MAX", 10)
    writer, tier = place
    writer.create("everstep.json", b"x" * 100)
    with pytest.raises(Corrupt, match="100 bytes, at most 10"):
        tier.read("everstep.json")


def test_one_store_has_one_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert name_of("link/run") == name_of(tmp_path / "run") == str(tmp_path / "run")
    assert name_of("s3://bucket/run/") == "s3://bucket/run"


def test_urls_of_no_store_are_told(bucket):
    with pytest.raises(Unsupported, match="ftp://host/run"):
        tier_at("ftp://host/run")
    with pytest.raises(Unavailable, match=r"s3://nowhere/run.*no such bucket"):
        tier_at("s3://nowhere/run").create("everstep.json", b"{}")


def test_a_server_that_is_not_there_is_unavailable(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    gone = tier_at(bucket, patience_s=1.0)
    with pytest.raises(Unavailable, match="reading s3://tests/"):
        gone.read("everstep.json")
