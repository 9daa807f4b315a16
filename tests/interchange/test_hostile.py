"""What comes from others may be damaged, or made to do harm: Corrupt or Unsupported, in bounded
memory; nothing is executed, nothing outside of the store touched. A seeded fuzzer over all."""

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import zipfile
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from trained import Job

import stores
from commands import run
from everstep import Corrupt, EverstepError, Missing, Unsupported
from everstep.interchange import torch_files
from everstep.interchange.sources import read_source
from everstep.interchange.trees import Options
from everstep.interchange.write import write
from everstep.tiers.disk import Disk

TOLD = (Corrupt, Unsupported, Missing)
MEMORY_BYTES = 3 << 30


def imported(path, place):
    """All of it, its bytes as well."""
    draft = read_source(path, None, Options())
    write(Disk(place, stores.Unsynced()), draft, 1)
    return draft


# ---- the corpus ----------------------------------------------------------------------------------

CORPUS = Path(__file__).parent / "corpus"
SAMPLES = sorted(path.stem for path in CORPUS.glob("*.zip"))
"""What the libraries themselves have saved: corpus/make.py."""
MUTANTS = sorted((CORPUS / "mutants").glob("*.zip"))
"""What has once been answered wrongly, by SAMPLE-FAULT.zip."""


def sample(name, folder):
    """What is to be imported of it, in a new folder."""
    shutil.unpack_archive(CORPUS / f"{name}.zip", folder)
    return place_of(folder)


def place_of(folder):
    """A folder, or the only thing in it."""
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 else folder


@pytest.fixture
def bounded():
    """Whoever takes more memory than that gets a MemoryError, which is none of those told."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        there = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (there + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# ---- the fuzzer ----------------------------------------------------------------------------------

NUMBERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
OPCODES = [op.encode("latin1") for op in map(chr, range(0x28, 0x99))]


def mutated(data, random):
    """The bytes with one to four damages."""
    data = bytearray(data)
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(len(data)) if data else 0
        kind = random.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([random.randrange(256)])
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + random.randrange(1, 64)]
        elif kind == 3:
            data[at : at + 8] = struct.pack("<Q", random.choice(NUMBERS))
        elif kind == 4:
            data[at : at + 4] = struct.pack("<I", random.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 5:
            data[at:at] = data[max(0, at - random.randrange(1, 200)) : at]
        else:
            data[at : at + 1] = random.choice(OPCODES)
    return bytes(data)


def damaged(path, random):
    """The bytes of a file with damages; of every second zip only its pickle is damaged."""
    data, out = path.read_bytes(), io.BytesIO()
    if path.suffix == ".distcp" or not zipfile.is_zipfile(path) or random.randrange(2):
        return mutated(data, random)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            own = old.read(name)
            new.writestr(name, mutated(own, random) if name.endswith("data.pkl") else own)
    return out.getvalue()


def answer(source, store):
    """What the import of it comes to. Whatever else it raises is a fault."""
    try:
        imported(source, store)
    except TOLD as error:
        return type(error).__name__
    finally:
        shutil.rmtree(store, ignore_errors=True)
    return "taken"


@pytest.mark.parametrize("name", SAMPLES)
def test_what_libraries_have_saved_is_taken(tmp_path, name):
    draft = imported(sample(name, tmp_path / "sample"), tmp_path / "store")
    assert draft.tensors
    assert not draft.left_out


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_mutants_that_once_found_faults(tmp_path, bounded, path):
    shutil.unpack_archive(path, tmp_path / "in")
    assert answer(place_of(tmp_path / "in"), tmp_path / "store") != "taken"
    assert {each.name for each in tmp_path.iterdir()} == {"in"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rounds", [40, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SAMPLES)
def test_damage_is_told(tmp_path, bounded, name, rounds):
    seed = int(os.environ.get("EVERSTEP_SEED") or 7)
    outcomes = set()
    for number in range(rounds):
        chance = random.Random(f"{seed} {number}")
        source = sample(name, tmp_path / "in")
        chosen = chance.choice(sorted(each for each in tmp_path.rglob("*") if each.is_file()))
        chosen.write_bytes(damaged(chosen, chance))
        try:
            outcomes.add(answer(source, tmp_path / "store"))
        except BaseException as error:
            kept = shutil.make_archive(str(tmp_path / f"{name}-{number}"), "zip", tmp_path / "in")
            error.add_note(
                f"EVERSTEP_SEED={seed}: when it is mended, {kept} goes to corpus/mutants"
            )
            raise
        shutil.rmtree(tmp_path / "in")
    assert "Corrupt" in outcomes
    assert not list(tmp_path.iterdir())


# ---- pickles in every disguise -------------------------------------------------------------------


def archive(path, data, **records):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", data)
        for name, own in records.items():
            made.writestr(f"archive/{name}", own)
    return path


def calls(name, argument):
    """`name(argument)`, in all ways that a pickle has to say so."""
    module, _, function = name.rpartition(".")
    text = f"X{struct.pack('<I', len(argument)).decode('latin1')}{argument}".encode("latin1")
    found = f"c{module}\n{function}\n".encode()
    stacked = b"".join(b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, function)) + b"\x93"
    old = f"V{argument}\n".encode()
    return {
        "reduce": found + b"(" + text + b"tR.",
        "stack global": b"\x80\x04" + stacked + b"(" + text + b"tR.",
        "instance": b"(" + old + f"i{module}\n{function}\n".encode() + b".",
        "object": b"(" + found + old + b"o.",
        "new": b"\x80\x02" + found + text + b"\x85\x81.",
        "new with names": b"\x80\x04" + found + text + b"\x85}\x92.",
        "build": b"\x80\x02" + found + b")\x81}" + text + b"K\x01sb.",
        "copyreg": b"ccopyreg\n_reconstructor\n("
        + found
        + b"cbuiltins\nobject\nNtR"
        + text
        + b"b.",
        "in a tensor": b"ctorch._tensor\n_rebuild_from_type_v2\n("
        + found
        + b"N("
        + text
        + b"tNtR.",
        "in an array": b"cnumpy\ndtype\n(" + found + b"tR.",
        "persistent": b"(X\x07\x00\x00\x00storage" + found + text + b"K\x00K\x00tQ.",
        "getattr": b"cbuiltins\ngetattr\n(" + found + text + b"tR(tR.",
        "extension": b"\x82\x01(" + text + b"tR.",
        "in a default": b"ccollections\ndefaultdict\n(" + found + b"tR.",
    }


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "posix.system", "subprocess.Popen"])
@pytest.mark.parametrize("way", list(calls("a.b", "c")))
def test_nothing_is_executed(tmp_path, monkeypatch, name, way):
    monkeypatch.chdir(tmp_path)
    program = calls(name, "touch executed" if name != "builtins.eval" else "open('executed','w')")
    whole = b"}(X\x01\x00\x00\x00a" + program[way][:-1] + b"X\x01\x00\x00\x00wK\x01u."
    proto = b"\x80\x04" if program[way][:1] != b"\x80" else b""
    path = archive(tmp_path / "a.pt", proto + whole)
    try:
        draft = imported(path, tmp_path / "store")
        assert set(draft.objects) <= {"a", "w"}
    except TOLD:
        pass
    assert not (tmp_path / "executed").exists()


class Runs:
    """Would make a file."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def test_what_a_program_would_run_is_left_out(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Job().model.state_dict(), "args": Runs(), "step": 1}, "a.pt")
    assert run("import", "a.pt", store) == 0
    assert "posix.system" in capsys.readouterr().out
    metadata = pickle.dumps(Runs())
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata)
    assert run("import", "dcp", store, "--step", "2") == 1
    assert "Corrupt" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


# ---- sizes that lie, paths that leave ------------------------------------------------------------


def safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def row(dtype="F32", shape=(2,), at=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


HEADERS = {
    "beyond the file": {"a": row(at=(8, 16))},
    "too short": {"a": row(at=(0, 4))},
    "backwards": {"a": row(at=(8, 0))},
    "negative": {"a": row(shape=(-2,))},
    "overflow": {"a": row(shape=(1 << 61, 1 << 61))},
    "enormous": {"a": row(shape=(1 << 40,), at=(0, 1 << 42))},
    "no shape": {"a": {"dtype": "F32"}},
    "a text for a shape": {"a": {**row(), "shape": "22"}},
    "booleans": {"a": row(shape=(True, True), at=(0, 4))},
    "no object": [1, 2],
    "nested": b"[" * 100_000,
    "twice": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}',
    "no text": b"\xff\xfe\x00",
    "a number of digits": b'{"a":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", list(HEADERS))
def test_headers_of_safetensors(tmp_path, bounded, name):
    path = safetensors(tmp_path / "a.safetensors", HEADERS[name], bytes(8))
    with pytest.raises(TOLD):
        imported(path, tmp_path / "store")


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 9])
def test_a_header_that_is_longer_than_its_file(tmp_path, bounded, length):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(Corrupt):
        imported(path, tmp_path / "store")


BAD_PATHS = ["../secret.safetensors", "/etc/passwd", "a/b", "..", "", ".", "a\x00b", "-x" * 200]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", BAD_PATHS)
def test_paths_do_not_leave_the_folder(tmp_path, bad):
    folder = tmp_path / "in"
    folder.mkdir()
    safetensors(tmp_path / "secret.safetensors", {"a": row()}, bytes(8))
    index = {"weight_map": {"a": bad}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TOLD):
        imported(folder, tmp_path / "store")
    shutil.rmtree(folder)
    sample("dcp", folder)
    said = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - torch's own
    for info in said.storage_data.values():
        info.relative_path = bad
    (folder / ".metadata").write_bytes(pickle.dumps(said))
    with pytest.raises(TOLD):
        imported(folder, tmp_path / "store")
    shutil.rmtree(folder)
    sample("zero-2", folder)
    (folder / "latest").write_text(bad)
    with pytest.raises(TOLD):
        imported(folder, tmp_path / "store")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "a"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name, make):
    index = {"weight_map": {"w": "a"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if name != "a":
        (tmp_path / "model.safetensors.index.json").unlink()
    make(tmp_path / name)
    with pytest.raises(Corrupt):
        imported(tmp_path, tmp_path / "store")


def nested(count):
    """Tuples that are twice in each other: 2 to the power of count, in some bytes."""
    return b"\x80\x02]q\x00" + b"".join(
        b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(count)
    )


RANGE = b"cbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R"
PICKLES = {
    "a thousandfold": b"\x80\x02}X\x01\x00\x00\x00a" + nested(60)[2:] + b"s.",
    "in itself": b"\x80\x02}X\x01\x00\x00\x00a]q\x01h\x01as.",
    "deep": b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 50_000 + b"a" * 49_999 + b"s.",
    "a deep key": b"\x80\x02}" + b")" + b"\x85" * 50_000 + b"K\x01s.",
    "a bytearray by its size": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
    "a long of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "no end": b"\x80\x02}",
    "an empty stack": b"\x80\x02.",
    "no mark": b"\x80\x02t.",
    "nothing": b"",
    "many sets": b"\x80\x04" + b"\x8f" * 3_000_000 + b".",
    "copies of a text": b"\x80\x02X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\x00c_codecs\nencode\n"
    b"q\x01" + b"h\x01h\x00\x85R" * 20_000 + b".",
    "a set of a range": b"\x80\x02cbuiltins\nset\n" + RANGE + b"\x85R.",
    "a shape of a range": b"\x80\x02ctorch\nSize\n" + RANGE + b"\x85R.",
    "copies in a list": b"\x80\x02]X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\x00a"
    b"c_codecs\nencode\nq\x01a(" + b"h\x01h\x00\x85R" * 20_000 + b"e.",
    "a storage a thousandfold": b"\x80\x02(" + nested(60)[2:] + b"NNNNtQ.",
    "a key a thousandfold": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    + nested(60)[2:]
    + b"NK\x01tQ.",
    "states of states": b"\x80\x02" + b"ca\nb\n" * 50_000 + b"b" * 49_999 + b".",
    "a state of its own": b"\x80\x02ca\nb\nq\x00h\x00b.",
    "a state for a list": b"\x80\x02]}X\x06\x00\x00\x00extendK\x01sb.",
    "attributes for a text": b"\x80\x02X\x01\x00\x00\x00aN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "a list that is called": b"\x80\x02])R.",
    "a device that is called": b"\x80\x02ctorch\ndevice\nX\x03\x00\x00\x00cpu\x85R)R.",
    "a call of a call": b"\x80\x02cos\nsystem\n)R)R.",
    "an item in itself": b"\x80\x02ccollections\ndeque\n)Rq\x00h\x00a.",
    "entries without values": b"\x80\x02}(K\x01K\x02K\x03u.",
    "a frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"abc.",
    "a memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "names of texts": b"\x80\x04(X\x00\x00\x10\x00"
    + b"a" * (1 << 20)
    + b"q\x00"
    + b"h\x00h\x00\x93" * 20_000
    + b"t.",
    "items of a text": b"\x80\x02(ctorch\nSize\nq\x01X\x00\x00\x20\x00"
    + "\u0101".encode() * (1 << 20)
    + b"q\x00"
    + b"h\x01h\x00\x85R" * 150
    + b"t.",
    "a shape of long numbers": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(\x8a\xff"
    + b"\x01" * 255
    + b"q\x00"
    + b"h\x00" * 500_000
    + b"tcnumpy\ndtype\nX\x02\x00\x00\x00f4\x85R\x89X\x01\x00\x00\x00atb.",
    "a deque a thousandfold": b"\x80\x04(X\x00\x00\x40\x00"
    + b"a" * (4 << 20)
    + b"(ccollections\ndeque\n)Rq\x00"
    + b"h\x00" * 999
    + b"tq\x01"
    + b"h\x01" * 4000
    + b"t.",
    "no device": b"\x80\x02ctorch\ndevice\nX\x01\x00\x00\x00a\x85R.",
}


@pytest.mark.parametrize("name", list(PICKLES))
def test_pickles_that_want_much(tmp_path, bounded, name):
    path = archive(tmp_path / "a.pt", PICKLES[name])
    with pytest.raises(TOLD):
        imported(path, tmp_path / "store")


@pytest.mark.parametrize("place", ["fqn", "offset"])
def test_metadata_whose_places_are_nested_deeply(tmp_path, bounded, place):
    """Hashing such a tuple takes the process's stack."""

    def made(name, state):
        said = b"".join(b"X" + struct.pack("<I", len(k)) + k.encode() + v for k, v in state.items())
        kind = f"ctorch.distributed.checkpoint.metadata\n{name}\n".encode()
        return kind + b")\x81}(" + said + b"ub"

    deep = b")" + b"\x85" * 200_000
    index = made("MetadataIndex", {"fqn": b"X\x01\x00\x00\x00a", "offset": b")", place: deep})
    said = {"state_dict_metadata": b"}", "storage_data": b"}" + index + b"Ns"}
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x02" + made("Metadata", said) + b".")
    with pytest.raises(TOLD):
        imported(tmp_path / "dcp", tmp_path / "store")


def tensor(shape, strides, offset=0, count=2, key="0"):
    """The pickle of one, of a storage of so many numbers."""

    def number(n):
        return b"\x8a\x09" + n.to_bytes(9, "little", signed=True)

    def numbers(all_of):
        return b"(" + b"".join(map(number, all_of)) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00" + key.encode()
    storage += b"X\x03\x00\x00\x00cpu" + number(count) + b"tQ"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + numbers(shape)
    return b"\x80\x02}X\x01\x00\x00\x00a" + made + numbers(strides) + b"\x89NtRs."


TENSORS = {
    "beyond its storage": tensor((3,), (1,)),
    "behind it": tensor((1,), (1,), offset=5),
    "by its strides": tensor((2,), (1 << 40,)),
    "negative": tensor((2,), (-1,)),
    "negative lengths": tensor((-1, -2), (1, 1)),
    "overflow": tensor((1 << 61, 1 << 61), (0, 0)),
    "expanded": tensor((1 << 40,), (0,)),
    "a storage that is too large": tensor((2,), (1,), count=1 << 60),
    "a storage that is not there": tensor((2,), (1,), key="9"),
    "many dims": tensor((1,) * 200, (1,) * 200),
}


@pytest.mark.parametrize("name", list(TENSORS))
def test_tensors_that_lie(tmp_path, bounded, name):
    path = archive(tmp_path / "a.pt", TENSORS[name], **{"data/0": bytes(8)})
    with pytest.raises(TOLD):
        imported(path, tmp_path / "store")


def test_a_tensor_that_does_not(tmp_path):
    path = archive(tmp_path / "a.pt", tensor((2,), (1,)), **{"data/0": bytes(8)})
    assert imported(path, tmp_path / "store").tensors["model.a"].shape == (2,)


class Kind(Enum):
    """Which nobody here knows."""

    ONE = 1


def test_keys_of_all_kinds(tmp_path):
    """Of an optimizer, saved as it is, they are tensors."""
    job = Job()
    job.run(2)
    keys = [((1, 2), 3), frozenset({"a"}), torch.device("cpu"), torch.Size([1]), np.int64(3)]
    keys += [np.str_("b"), (1, (2, (3,)))]
    saved = {"model": job.model.state_dict(), "optimizer": job.optimizer, "kinds": {Kind.ONE: 1}}
    torch.save({**saved, "keys": dict.fromkeys(keys, 1), "sets": {*keys}}, tmp_path / "a.pt")
    draft = imported(tmp_path / "a.pt", tmp_path / "store")
    assert draft.left_out.keys() == {"optimizer", "kinds"}
    assert "keys" in draft.objects
    found = torch_files.load(tmp_path / "a.pt")
    assert (found["keys"], found["sets"]) == (dict.fromkeys(keys, 1), {*keys})


def test_arrays_of_what_is_not_known_are_left_out(tmp_path):
    kinds = [np.array(["a"], np.dtypes.StringDType()), np.str_(""), np.rec.array([(1, 2.0)])]
    saved = {f"{number}": each for number, each in enumerate(kinds)}
    torch.save({"model": Job().model.state_dict(), **saved}, tmp_path / "a.pt")
    assert imported(tmp_path / "a.pt", tmp_path / "store").left_out.keys() == saved.keys()


def test_zips_that_are_none_of_torch(tmp_path, bounded):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(50 << 20))
    with pytest.raises(Unsupported, match="compressed"):
        imported(tmp_path / "bomb.pt", tmp_path / "store")
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Unsupported, match="Say it by --from"):
        imported(tmp_path / "old.pt", tmp_path / "store")
    with pytest.raises(Unsupported, match="loaded and saved anew"):
        read_source(tmp_path / "old.pt", "torch", Options())
    big = archive(tmp_path / "big.pt", b"\x80\x02}.", byteorder=b"big")
    with pytest.raises(Unsupported, match="big-endian"):
        imported(big, tmp_path / "store")
    with pytest.raises(EverstepError):
        imported(Path("nowhere"), tmp_path / "store")


CONFIGS = {
    "attn_implementation": "kernels-community/evil",
    "_attn_implementation": "kernels-community/evil",
    "num_labels": 10**9,
    "text_config": {"num_hidden_layers": 10**9},
    "n_layer": "1",
    "hidden_size": 10**15,
}


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_config_that_wants_much(tmp_path, monkeypatch, bounded, name):
    """Or code of others, which transformers would fetch by a package that is not here."""
    fetched = []
    fetch = "transformers.integrations.hub_kernels.load_and_register_attn_kernel"
    monkeypatch.setattr(fetch, lambda *_, **__: fetched.append(1))
    folder = sample("trainer", tmp_path / "folder")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: CONFIGS[name]}))
    with contextlib.suppress(*TOLD):
        imported(folder, tmp_path / "store")
    assert not fetched
