"""A trainer without torch: a client, an arena, and what the keeper said. Also run as a process:

python keepers.py STORE SCRIPT IDLE_S: runs the script with `trainer` and the names of this module.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import stores
from everstep.format.document import seal
from everstep.format.packs import lay_out
from everstep.format.tables import encode_table
from everstep.keeper import home
from everstep.keeper.arena import Arena, Row, SlotState  # noqa: F401 - for the scripts
from everstep.keeper.client import Client
from processes import PATIENCE_S, ended, stopped, until  # noqa: F401 - for the tests


class Trainer:
    """Attached to the keeper of `store`; `confirms=False`: "written" is left to the test."""

    def __init__(self, store, idle_s=600.0, specs=stores.SMALL, confirms=True, slots=3, tiers=None):
        self.specs, self.confirms = specs, confirms
        self.events = []
        self._changed = threading.Condition()
        self.layout = lay_out(specs)
        self.table = encode_table(self.layout, {}, {}, {})
        self.slots = slots
        self.key, self.arena, self.sequence = f"key-{os.getpid()}-{id(self)}", None, 0
        self.client = Client(Path(store), None, self._on_event, idle_s, tiers=tiers)

    @property
    def keeper(self):
        return self.client.keeper_pid

    def start(self, parent=None):
        """Claim an epoch and give an arena."""
        self.epoch = self.client.claim(parent)
        self.arena = Arena.create(self.slots, 64 << 10, self.layout.size)
        self.client.add_arena(self.key, self.arena)
        return self

    def seal(self, step, submit=True, follows=None):
        """Put a state into the next slot, or a record which `follows` a step; its sequence."""
        self.sequence += 1
        self.fill(step, 0, self.layout.size)
        self.arena.seal(*self.documents(step, follows))
        if submit:
            self.client.submit(self.key)
        return self.sequence

    def record(self, step, submit=True):
        """Put a record into the next slot, which follows the step before; its sequence."""
        return self.seal(step, submit, follows=step - 1)

    def announce(self, step, follows=None):
        """Tell of a state (or record) whose image is still to come (`arrive`); its sequence."""
        self.sequence += 1
        self.arena.announce(*self.documents(step, follows))
        self.client.submit(self.key)
        return self.sequence

    def arrive(self, step, end):
        """The newest image has arrived up to there."""
        self.fill(step, 0, end)
        self.client.tell_copied(self.sequence, end)

    def end(self, state):
        """The newest image is whole (SEALED), or will never be (TORN)."""
        self.arena.set_state(self.slot, state)
        self.client.submit(self.key)

    @property
    def slot(self):
        return self.sequence % self.arena.slot_count

    def fill(self, step, start, end):
        contents = {spec.name: stores.content(spec, step) for spec in self.specs}
        image = stores.image_of(self.layout, contents)
        self.arena.image(self.slot)[start:end] = image[start:end]

    def documents(self, step, follows=None):
        said = {"objects": {}, "hyperparameters": {}, "topology": {}, "capture": {}}
        said |= {"metrics": {}, "tag": None}
        if follows is not None:
            said["record"] = {"previous": follows, "calls": [stores.CALL]}
        descriptor = seal(said)
        sizes = self.layout.size, len(self.table), len(descriptor)
        return self.slot, Row(self.sequence, step, *sizes), self.table, descriptor

    def state_of(self, sequence):
        return self.arena.state(sequence % self.arena.slot_count)

    def expect(self, kind, sequence=None, count=1):
        """Wait until the keeper has said this so many times; the last of these messages."""

        def found():
            return [
                event
                for event in self.events
                if event["type"] == kind and sequence in (None, event.get("sequence"))
            ]

        with self._changed:
            arrived = self._changed.wait_for(lambda: len(found()) >= count, PATIENCE_S)
            assert arrived, f"no {kind} of {sequence}: {self.events}"
            return found()[-1]

    def save(self, step):
        """Durably."""
        sequence = self.seal(step)
        self.expect("local", sequence)
        return sequence

    def close(self):
        self.client.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _on_event(self, message):
        if message["type"] == "written" and self.confirms:
            self.client.confirm(message["sequence"], None)
        with self._changed:
            self.events.append(message)
            self._changed.notify_all()


class Process:
    """A script with a trainer in a process of its own; `read` takes a line that it printed."""

    def __init__(self, store, script, idle_s=600.0, env=None):
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(store), script, str(idle_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    @property
    def pid(self):
        return self.process.pid

    def read(self):
        line = self.process.stdout.readline()
        assert line, "the trainer process has ended"
        return line.strip()

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PATIENCE_S)


def crash(store, script, idle_s=600.0):
    """Run a script that sets `said`, then SIGKILL; what it said."""
    process = Process(store, script + "\nprint(said, flush=True); sys.stdin.read()", idle_s)
    said = process.read()
    process.kill()
    return said


def arenas_mapped(pid):
    """Inodes of the arenas that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:everstep-arena" in line}


def descriptors(pid):
    """What its descriptors are."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(link.name)] = os.readlink(link)
        except FileNotFoundError:
            continue
    return found


def socket_of(store):
    return home.endpoint(store).with_suffix(".sock")


if __name__ == "__main__":
    with Trainer(sys.argv[1], float(sys.argv[3])) as trainer:
        exec(sys.argv[2])  # noqa: S102 - the test's own words
