"""A packed file, which is written while its pieces come (keeper/data.py)."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from everstep.format.packed import HEADER_BYTES, header
from everstep.keeper.data import BUFFER_BYTES, BUFFERS, write_packed
from everstep.tiers.files import NewFile
from everstep.tiers.system import System


class Noted(System):
    """Notes where is written."""

    def __init__(self):
        self.places = []

    def pwrite(self, fd, data, offset):
        self.places.append(offset)
        return super().pwrite(fd, data, offset)


def test_where_its_thread_does_not_start_at_first(tmp_path, monkeypatch):
    data = random.Random(1).randbytes((BUFFERS + 2) * BUFFER_BYTES)
    begin, refused = threading.Thread.start, []

    def start(thread):
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    system = Noted()
    file = NewFile(system, str(tmp_path / "file"), ThreadPoolExecutor(1))
    found = write_packed(file.write, [data])
    assert found == (HEADER_BYTES + len(data), header(len(data)))
    file.finish()
    assert len(refused) == 1
    *places, last = system.places
    assert (places, last) == (sorted(set(places)), 0)
    assert (tmp_path / "file").read_bytes() == header(len(data)) + data
