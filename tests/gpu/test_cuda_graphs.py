"""CUDA graphs, by hand and by torch.compile: their memory is written to again at each replay, with
no hook, and with nothing that counts a version."""

import pytest
import torch
from test_cuda import build, check_steps, state_bytes, train
from torch import nn

import everstep
from choices import chosen

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's advice on graphs and compilers


class Graphed:
    """A whole step of training, or its forward and backward, as a graph."""

    def __init__(self, state, with_update):
        self.state, self.with_update = state, with_update
        self.data = torch.randn(64, 1024, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._work()
                state["optimizer"].step()
        torch.cuda.current_stream().wait_stream(stream)
        state["optimizer"].zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._work()
            if with_update:
                state["optimizer"].step()

    def _work(self):
        self.state["optimizer"].zero_grad()
        self.state["model"](self.data).square().mean().backward()

    def step(self):
        self.data.copy_(torch.randn(64, 1024, device="cuda"))
        self.graph.replay()
        if not self.with_update:
            self.state["optimizer"].step()


@pytest.mark.parametrize(
    ("strategy", "with_update"),
    [("full", True), ("full", False), ("auto", True), ("auto", False), ("log", False)],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["graph first", "checkpointer first"])
def test_every_step_is_exact(store, strategy, with_update, is_first):
    state = build(0, capturable=True)
    graphed = Graphed(state, with_update) if is_first else None
    expected = {}
    with everstep.Checkpointer(store, state, strategy=strategy) as checkpointer:
        if graphed is None:  # the state of step 1 was copied while nobody knew of a graph
            train(state)
            checkpointer.step(1)
            checkpointer.wait("captured")
            graphed = Graphed(state, with_update)
        for step in range(2, 10):
            graphed.step()
            checkpointer.step(step)
            if step % 2:
                expected[step] = state_bytes(state)
    check_steps(store, build(1, capturable=True), expected)


@pytest.mark.parametrize("options", [{"strategy": "log"}, {"strategy": "spread", "every": 3}])
def test_a_graph_with_the_update_is_refused(store, options):
    """At once, where its capture was seen; at the third step that tells of it, where it was not."""
    state, expected = build(0, capturable=True), {}
    with everstep.Checkpointer(store, state, **chosen(**options)) as checkpointer:
        for step in range(1, 4):
            train(state)
            checkpointer.step(step)
            expected[step] = state_bytes(state)
        checkpointer.wait("captured")
        graphed = Graphed(state, with_update=True)

        def go_on():
            for step in range(4, 7):
                graphed.step()
                checkpointer.step(step)

        with pytest.raises(everstep.Unsupported, match="went into a CUDA graph"):
            go_on()
    saved = everstep.Store(store).steps()
    assert saved
    check_steps(store, build(1, capturable=True), {step: expected[step] for step in saved})


def test_a_graph_that_nobody_saw_is_refused_by_a_log(store):
    state, expected = build(0, capturable=True), {}
    graphed = Graphed(state, with_update=True)
    with everstep.Checkpointer(store, state, strategy="log") as checkpointer:
        for step in range(1, 4):
            graphed.step()
            checkpointer.step(step)
            expected[step] = state_bytes(state)
        graphed.step()
        with pytest.raises(everstep.Unsupported, match="changes them outside of step"):
            checkpointer.step(4)
    check_steps(store, build(1, capturable=True), expected)


def test_parts_of_a_capturable_log_are_refused(store):
    """They would be replayed on the CPU, where torch steps no such optimizer."""
    state = build(0, capturable=True)
    with everstep.Checkpointer(store, state, strategy=everstep.Log(base_every=100)) as checkpointer:
        for step in range(1, 6):
            train(state)
            checkpointer.step(step)
    with everstep.Checkpointer(store, build(1, capturable=True)) as checkpointer:
        with pytest.raises(everstep.Unsupported, match="capturable"):
            checkpointer.restore(5, only="model")
        assert checkpointer.restore(5) == 5


@pytest.mark.slow
def test_gradients_of_a_compiled_graph_are_copied(store):
    """They lie in the graph's own memory, and the next replay overwrites it, whoever holds them."""

    def build_compiled(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    state, expected = build_compiled(0), {}
    compiled = torch.compile(state["model"], mode="reduce-overhead")
    with everstep.Checkpointer(store, state, strategy=everstep.Log(base_every=100)) as checkpointer:
        for step in range(1, 13):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            state["optimizer"].step()
            torch.cuda._sleep(50_000_000)
            checkpointer.step(step)
            state["optimizer"].zero_grad()
            if step % 3 == 0:
                expected[step] = state_bytes(state)
    check_steps(store, build_compiled(1), expected)
