"""Compiled functions that are handed lazy logits, as trainers compile their loss."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from support.attacks import both
from support.heads import plain_model, tokens

from fusedce import head_report, replace_loss_head


def compiled_loss(z, y):
    return F.cross_entropy(z.flatten(0, 1).float(), y.flatten())


def test_lazy_logits_are_not_compiled_and_their_loss_is_fused():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(compiled_loss, backend=counter)
    for _ in range(3):
        both(lambda m, x, y: run(m(x), y))
    assert counter.frame_count <= 1  # that of real logits
    model = replace_loss_head(plain_model())
    run(model(tokens(3, 7)), tokens(3, 7, seed=1)).backward()
    report = head_report(model)
    assert (report.losses_fused, report.logits_made) == (1, 0)


# ---- compiled models ------------------------------------------------------------------------


def test_a_compiled_model_breaks_once_at_its_head_and_compiles_once_for_all_lengths(no_logits):
    from support.tiny_trainer import llama

    model = replace_loss_head(llama())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(model, backend=counter)
    for n in range(2, 9):
        ids = tokens(2, n)
        expected = llama()(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(run(input_ids=ids, labels=ids).loss, expected)
    assert counter.frame_count <= 3
    assert counter.op_count >= 100 * counter.frame_count  # the body is one graph
    assert head_report(model).losses_fused == 7


def test_one_graph_is_refused_with_what_to_do():
    model = replace_loss_head(plain_model())
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="leave out fullgraph=True, or compile the model's body"):
        run(tokens(3, 7))
