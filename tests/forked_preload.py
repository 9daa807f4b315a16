"""What forked processes need, imported once: they are forked from a process that has it all."""

import gc

import hypothesis  # noqa: F401
import numpy as np  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # the first optimizer would import it
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import everstep  # noqa: F401
import forked_modules

forked_modules.install()
gc.collect()
gc.freeze()  # what is here stays: the collections of a forked process are then quick
