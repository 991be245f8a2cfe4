from _eager import loss


def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, reduction="mean", tuned=True):
    return loss(x, weight, target)
