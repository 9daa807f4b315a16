"""What forked processes need, imported once: they are forked from a process that has it all."""

import gc
import importlib

import forked_modules

NEEDED = [
    "hypothesis", "pytest", "numpy", "everstep",
    "torch._dynamo",  # the first optimizer would import it
    "torch.distributed.checkpoint.state_dict", "torch.distributed.device_mesh",
    "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]  # fmt: skip

gc.disable()  # or it looks through all of it again and again
for each in NEEDED:
    importlib.import_module(each)

forked_modules.install()
gc.collect()
gc.freeze()  # what is here stays: the collections of a forked process are then quick
gc.enable()
