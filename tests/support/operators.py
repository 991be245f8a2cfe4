"""The operators of torch that a piece of code calls."""

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """``[(operator, its arguments, its result)]`` of what is called inside, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.seen.append((operator, args, out))
        return out
