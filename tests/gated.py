"""Processes whose disk hangs while a file is there, or that soon give a tier up."""

import os
import time

from everstep.keeper import process
from everstep.tiers.system import System


def shut(gate):
    """From now on this process syncs nothing while `gate` is there."""

    def fsync(system, fd):
        while os.path.exists(gate):
            time.sleep(0.002)
        os.fsync(fd)

    System.fsync = fsync


def impatient():
    """From now on a tier that does not answer is away after a second."""
    process.TIER_PATIENCE_S = 1.0
