"""Claims: what holds a log while a process makes a whole state of one of its steps.

    claims/00000100-0003-5f0c1a2b      step 100 of epoch 3; the packs that come carry that token

Invariants:
* While a claim lives, no retention and no gc deletes its checkpoint, what that goes on from, or the
  packs of its token.
* A claim lives as long as its process: it is a locked file. What a dead process left, its packs
  with it, goes with the next deletion, gc or base.
* A claim is made under the store's shared lock, and looked at under the exclusive one.
"""

import contextlib
import logging
import secrets
from collections.abc import Iterator

from everstep.errors import EverstepError, Missing
from everstep.format.manifest import CheckpointName
from everstep.store import commit, names
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")


@contextlib.contextmanager
def hold(disk: Tier, name: CheckpointName) -> Iterator[str]:
    """Claim a checkpoint while this lasts; the token for the packs of its state. Raises Missing
    where it does not exist, Unavailable."""
    token = secrets.token_hex(4)
    with contextlib.ExitStack() as stack:
        with disk.locked(exclusive=False):
            if disk.size(names.manifest_path(name)) is None:
                raise Missing(f"materialising {name} of {disk.root}: there is no such checkpoint")
            stack.enter_context(disk.claim(names.claim_path(name, token)))
        yield token


def held(disk: Tier) -> dict[CheckpointName, set[str]]:
    """The checkpoints that are claimed by living processes, and the tokens of their packs."""
    found: dict[CheckpointName, set[str]] = {}
    for file_name in disk.list(names.CLAIMS):
        claim = names.parse_claim(file_name)
        if claim and disk.is_claimed(f"{names.CLAIMS}/{file_name}"):
            found.setdefault(claim[0], set()).add(claim[1])
    return found


def clear(disk: Tier) -> tuple[int, int]:
    """Delete the claims of processes that died, and what they had written. The store is locked
    exclusively by the caller. Returns (files, bytes) freed."""
    files = freed = 0
    for file_name in disk.list(names.CLAIMS):
        path = f"{names.CLAIMS}/{file_name}"
        claim = names.parse_claim(file_name)
        if claim is None or disk.is_claimed(path):
            continue
        name, token = claim
        packs = [each for each in disk.list(names.DATA) if each.startswith(f"{name}-{token}-")]
        try:
            freed += commit.discard_files(disk, name, [f"{names.DATA}/{pack}" for pack in packs])
            disk.delete(path)
            files += len(packs)
        except EverstepError as error:  # the next one tries again
            log.warning("clearing the claim %s of %s: %s", file_name, disk.root, error)
    return files, freed
