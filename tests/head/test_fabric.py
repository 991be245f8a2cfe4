"""Lightning's Fabric, which puts hooks on whatever a model returns."""

import pytest
import torch
from support.heads import ce, plain_model, tokens

from fusedce import head_report, replace_loss_head

fabric_of = pytest.importorskip("lightning_fabric", reason="Lightning is not installed")


def three_steps(model, precision, loss_inside):
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1, precision=precision)
    x, y = tokens(3, 7), tokens(3, 7, seed=1)

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            z = self.model(x)
            return {"loss": ce(z, y), "logits": z}

    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    run, optimizer = fabric.setup(WithLoss() if loss_inside else model, optimizer)
    losses, gradients = [], []
    for _ in range(3):
        out = run(x, y) if loss_inside else run(x)
        loss = out["loss"] if loss_inside else ce(out, y)
        fabric.backward(loss)
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, gradients


@pytest.mark.parametrize("loss_inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_without_logits(precision, loss_inside):
    expected = three_steps(plain_model(), precision, loss_inside)
    model = replace_loss_head(plain_model())
    got = three_steps(model, precision, loss_inside)
    report = head_report(model)
    assert (report.losses_fused, report.logits_made) == (3, 0), str(report)
    near = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 0.05, "atol": 1e-3}
    torch.testing.assert_close(got, expected, **near)
