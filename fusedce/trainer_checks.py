"""What the trainer's mixin refuses, because it would be lost or divided by a wrong number."""

from __future__ import annotations

from typing import Any


def refuse_other_settings(trainer: Any) -> None:
    """Raise for settings that replace the model's loss by another one, or its process by threads.

    Raises:
        ValueError: another loss.
        RuntimeError: several GPUs in one process.
    """
    settings = trainer.args
    loss_type = getattr(settings, "loss_type", None)
    found = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoothing_factor": settings.label_smoothing_factor != 0,
        f"loss_type={loss_type!r}": loss_type not in (None, "nll"),
    }
    for name, is_set in found.items():
        if is_set:
            raise ValueError(
                f"FusedTrainerMixin computes the model's own cross-entropy, but {name} asks for "
                f"another loss: leave it out, or use the Trainer without the mixin"
            )
    if settings.n_gpu > 1:
        raise RuntimeError(
            f"FusedTrainerMixin does not work with nn.DataParallel, which Trainer uses for "
            f"{settings.n_gpu} GPUs in one process: start one process per GPU with torchrun"
        )


def check_counted(owner: type, n_tokens: int, declared: int, shift: int | None) -> None:
    """Raise RuntimeError where the loss has counted other tokens than the labels hold.

    Args:
        owner: the class whose ``compute_loss`` runs.
        n_tokens: what the fused losses have counted since the last logging step.
        declared: labels that the model's loss can see, over the same batches.
        shift: how many labels of a row it leaves out.
    """
    if not n_tokens and declared and owner.__name__ != "FusedTrainerMixin":
        raise RuntimeError(
            f"{owner.__name__}.compute_loss has not computed the model's loss through "
            f"super().compute_loss, so that no token was counted: call it, or leave "
            f"FusedTrainerMixin out"
        )
    if declared != n_tokens:
        raise RuntimeError(
            f"the model's loss has counted {n_tokens} tokens since the last logging step, but its "
            f"labels hold {declared} (after a shift by {shift}): the loss would be divided by a "
            f"wrong number"
        )


def owner(trainer: Any, method: str) -> type:
    """The class that a method comes from."""
    return next(kind for kind in type(trainer).__mro__ if method in vars(kind))
