"""A small training, which others save and everstep imports, or the other way round."""

import torch
from torch import nn

torch.set_num_threads(1)


class Net(nn.Module):
    """With a tied weight, buffers, and an uneven shape."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


class Job:
    """Model, optimizer, scheduler, and the loss of each step."""

    def __init__(self, seed=0, groups=True):
        self.model = Net(seed)
        named = dict(self.model.named_parameters())
        matrices = [p for p in named.values() if p.ndim > 1]
        vectors = [p for p in named.values() if p.ndim < 2]
        chosen = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        self.optimizer = torch.optim.AdamW(chosen if groups else named.values(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (7,), generator=generator)
        loss = nn.functional.cross_entropy(self.model(tokens), tokens.flip(0))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def run(self, *steps):
        return [self.train(step) for step in range(*steps)]
