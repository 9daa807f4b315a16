"""PEFT's LoRA on a Llama, in a loop of one's own, on the default strategy."""

from importlib.util import find_spec

import pytest
import torch

import everstep
from harness import check_resumes, random_seed

pytestmark = [
    pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore"),  # transformers' and PEFT's own
]
STEPS = 16


def adapted():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = get_peft_model(model, lora)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.01)


def train(model, optimizer):
    tokens = torch.randint(0, 200, (2, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def trains(store, trace):
    model, optimizer = adapted()
    state = {"model": model, "optimizer": optimizer}
    checkpointer = everstep.Checkpointer(store, state) if store else None
    start = checkpointer.restore() if checkpointer else 0
    trace.resumed(start)
    for step in range(start + 1, STEPS + 1):
        trace.note("loss", step, train(model, optimizer))
        if checkpointer:
            checkpointer.step(step)
    if checkpointer:
        checkpointer.close()
    trace.end(**state)


def test_a_killed_run_resumes(tmp_path):
    check_resumes(trains, tmp_path, steps=STEPS, epoch=8, seed=random_seed())


def test_a_record_is_smaller_than_adapters_and_moments(tmp_path):
    """Nothing is named, and the frozen base is written with the one base alone."""
    model, optimizer = adapted()
    handles = []
    with everstep.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        for step in range(1, 41):
            train(model, optimizer)
            handles.append(checkpointer.step(step))
    trained = [each for each in model.parameters() if each.requires_grad]
    moments = [each for kept in optimizer.state.values() for each in kept.values()]
    own = sum(each.nbytes for each in trained + moments)
    sizes = [handle.bytes for handle in handles]
    assert max(sizes[1:]) <= 1.3 * own
    assert [step for step, size in enumerate(sizes, 1) if size > 1.3 * own] == [1]
    assert everstep.Store(tmp_path).manifest(40).capture["strategy"] == "log"
