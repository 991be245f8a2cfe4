"""Three steps of a small model under DeepSpeed's ZeRO, on gloo: printed as JSON by rank 0.

python -m torch.distributed.run --nproc-per-node 2 deepspeed_steps.py STAGE REPLACED UNEQUAL

UNEQUAL: whether rank 0 has one chunk of tokens and rank 1 four.
"""

import json
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from torch import nn

from fusedce import head_report, replace_loss_head
from fusedce.backends import plan

V, H = 50, 16
# Compiled for minutes, and gloo does without.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(V, H), nn.Linear(H, H)
        self.lm_head = nn.Linear(H, V, bias=False)

    def forward(self, ids):
        z = self.lm_head(torch.tanh(self.body(self.embedding(ids))))
        return F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main(stage, replaced, unequal):
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    if unequal:
        plan.CPU_BUDGET = 1  # chunks of 16 tokens
    torch.manual_seed(0)
    model = Model()
    if replaced:
        replace_loss_head(model)
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses, gradients = [], []
    for step in range(3):
        rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
        length = 31 if unequal and dist.get_rank() else 7
        loss = engine(torch.randint(0, V, (2, length), generator=rng))
        engine.backward(loss)
        found = {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
        gradients.append({n: g.flatten().tolist() for n, g in found.items()})
        engine.step()
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        report = head_report(model)
        counts = {"fused": report.losses_fused, "made": report.logits_made}
        print(json.dumps({"losses": losses, "gradients": gradients} | counts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1")
