"""Where a restore takes each tensor from: a record need not have what has not changed."""

from everstep.format.global_tensors import Described
from everstep.format.manifest import Manifest, Part, Previous, Record
from everstep.format.packs import Spec
from everstep.format.tables import FileLink, Table, TensorEntry
from everstep.restore.chain import Chain

OPTIMIZERS = {"optimizer": {"groups": {"model.w": 0}, "state": {"model.w": ["m"]}}}


def table(*names):
    entries = {name: TensorEntry(Spec(name, "float32", ()), (), (), "cpu") for name in names}
    return Table((), entries, OPTIMIZERS)


def described(step, table, *referred):
    part = Part(0, FileLink("table", 0), (), (), step)
    objects = {"value": [{"$": "tensor", "v": name, "device": "cpu"} for name in referred]}
    records, previous = (Record(step, (), (part,)),), Previous(step - 1, 1, "")
    more = {"records": records, "previous": previous} if step > 1 else {}
    parts = () if step > 1 else (part,)
    return Described(Manifest(step, 1, "run", "", parts, objects, {}, **more), [table])


def test_each_as_it_was_stored_last():
    value = ("value.kept", "value.gone")
    base = table("model.w", "optimizer.model.w.m", "model.frozen", "model.mean", *value)
    first = table("@0.model.w", "model.mean", "value.new")
    second = table("@0.model.w", "value.new")
    chain = Chain(
        described(1, base, *value),
        [described(2, first, *value, "value.new"), described(3, second, "value.kept", "value.new")],
    )
    found = chain.saved(chain.optimized).tensors
    from_base = ("model.w", "optimizer.model.w.m", "model.frozen", "value.kept")
    assert found == {
        **{name: base.tensors[name] for name in from_base},
        "model.mean": first.tensors["model.mean"],
        "value.new": second.tensors["value.new"],
    }
    assert all(found[name] is base.tensors[name] for name in from_base)
    assert found["model.mean"] is first.tensors["model.mean"]
    assert found["value.new"] is second.tensors["value.new"]
