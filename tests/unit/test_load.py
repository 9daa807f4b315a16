"""What is delivered from memory is what was verified, whatever another process writes there."""

import pytest
import torch
import xxhash

from everstep import Corrupt
from everstep.format.manifest import Part
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import FileLink, TensorEntry, decode_table, encode_table
from everstep.restore import load as load_module
from everstep.restore.deliver import Delivery
from everstep.restore.load import Loader, MemorySource
from everstep.sharding.layout import LocalBox
from stores import content, image_of


def test_memory_that_changes_after_the_check(monkeypatch):
    spec = Spec("x", "float32", (5000,))
    layout = lay_out([spec])
    expected = content(spec, 1)
    image = image_of(layout, {"x": expected})
    digests = [""] * layout.digest_count
    digests[layout.pieces[0].digest] = xxhash.xxh3_128_hexdigest(expected)
    part = Part(0, FileLink("table", 0), (FileLink("pack", layout.size),), tuple(digests), 1)
    source = MemorySource([memoryview(image)])
    copy_chunk = load_module.copy_chunk

    def copy_and_overwrite(*arguments):
        copy_chunk(*arguments)
        image[:] = bytes(len(image))

    monkeypatch.setattr(load_module, "copy_chunk", copy_and_overwrite)
    tensor = torch.zeros(5000)
    table = decode_table(encode_table(layout, {}, {}, {}), "a table")
    destinations = [(TensorEntry(spec, layout.pieces), [Delivery.to(LocalBox.whole(tensor))])]
    with Loader() as loader:
        loader.load(part, [[source]], destinations, table, None)
        assert tensor.numpy().tobytes() == expected
        with pytest.raises(Corrupt):
            loader.load(part, [[source]], destinations, table, None)
