from _eager import loss


class LigerFusedLinearCrossEntropySM90Function:
    @staticmethod
    def apply(_input, weight, target, ignore_index=-100, reduction="mean"):
        return loss(_input, weight, target)
