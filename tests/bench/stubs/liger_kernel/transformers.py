import torch
from _eager import loss


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def forward(self, lin_weight, _input, target):
        return loss(_input, lin_weight, target)
