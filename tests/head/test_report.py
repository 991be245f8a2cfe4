"""The report of a replaced head."""

from pathlib import Path

import torch
from support.heads import V, ce, plain_model, tokens

from fusedce import head_report, replace_loss_head, restore_loss_head


def test_a_report_names_each_place_that_made_logits():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    report = head_report(model)
    assert (report.active, report.since) == (False, None)
    assert "the model's own" in str(report)
    replace_loss_head(model)
    ce(model(x), y).backward()
    for _ in range(2):
        model(x).argmax(-1)  # this line
    model(x)[:, -1].softmax(-1)
    report = head_report(model)
    assert report.active
    assert "not active now" not in str(report)
    assert "not active now" in str(report._replace(active=False))
    assert (report.losses_fused, report.logits_made) == (1, 3)
    argmax, softmax = report.places
    assert (argmax.operation, argmax.times) == ("aten.argmax.default", 2)
    assert (argmax.shape, argmax.bytes) == ((3, 7, V), 4 * 21 * V)
    file, line = argmax.line.rsplit(":", 1)
    assert file == __file__
    assert "# this line" in Path(file).read_text().splitlines()[int(line) - 1]
    assert softmax.operation == "aten._softmax.default"
    assert "2 x aten.argmax.default" in str(report)
    assert "3.0 MiB" in str(report._replace(places=(argmax._replace(bytes=3 * 2**20),)))
    restore_loss_head(model)
    assert not head_report(model).active


def test_a_report_says_why_the_original_head_runs():
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    torch.func.functional_call(model, dict(model.named_parameters()), x)
    torch.vmap(lambda h: model[1](h))(model[0](x))
    (note,) = head_report(model).notes
    assert "a transform of torch.func runs it" in note or "its input is not" in note


def test_a_report_of_nothing_says_that_nothing_ran():
    model, x, y = plain_model(), tokens(3, 7), tokens(3, 7, seed=1)
    replace_loss_head(model)
    assert "the head has not run since it was replaced" in str(head_report(model))
    z = model(x)
    assert "nothing has used its logits" in str(head_report(model))
    ce(z, y)
    assert "nothing" not in str(head_report(model))


def test_logits_that_the_heads_own_code_makes_are_counted():
    """As those of a float8 head."""

    class Head(torch.nn.Linear):
        def forward(self, x):
            return (x.unsqueeze(-2) * self.weight).sum(-1)

    model = torch.nn.Sequential(torch.nn.Embedding(V, 16), Head(16, V))
    replace_loss_head(model)
    ce(model(tokens(3, 7)), tokens(3, 7))
    report = head_report(model)
    assert (report.losses_fused, report.logits_made) == (0, 1)
    assert "no product with a weight of the head" in str(report)


def test_explain_prints_each_place_once(monkeypatch, capsys):
    monkeypatch.setenv("FUSEDCE_EXPLAIN", "1")
    model, x = replace_loss_head(plain_model()), tokens(3, 7)
    for _ in range(3):
        model(x).argmax(-1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "logits (3, 7, 50), 0.0 MiB, for aten.argmax.default at" in lines[0]
    assert "test_report.py" in lines[0]


def test_a_report_adds_up_several_heads():
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.ModuleDict({"first": linear(16, V), "second": linear(16, V)})
    replace_loss_head(model, head=model["first"])
    replace_loss_head(model, head=model["second"])
    x, y = torch.randn(3, 7, 16), tokens(3, 7)
    first, second = model["first"](x), model["second"](x)
    (ce(first, y) + ce(second, y)).backward()
    first.argmax(-1), second.argmax(-1)
    report = head_report(model)
    assert (report.active, report.losses_fused, report.logits_made) == (True, 2, 2)
    assert head_report(model["first"]).losses_fused == 1
