"""What every rank needs, imported once: ranks are forked from a process that has it all."""

import gc

import numpy as np  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import everstep  # noqa: F401

gc.collect()
gc.freeze()  # what is here stays: the collections of a rank are then quick
