"""A mixin that makes the Trainer of transformers, and TRL's SFTTrainer, count tokens right.

The model's own forward and loss code run unchanged; only the denominator of the mean in its fused
``F.cross_entropy`` is replaced. For ``M`` micro-batches on each of ``R`` ranks that denominator is
``sum of n_valid / (M * R)``. Trainer then divides by ``M`` and averages over ranks, which gives
``sum of loss_sum / sum of n_valid``. Auxiliary losses (MoE routers) become their mean over
micro-batches and ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .accumulate.engines import AccelerateEngine, token_ranks_of
from .accumulate.meter import LossMeter
from .contract.checks import check_flag, memory_budget_of
from .head.model_loss import (
    LabelCount,
    find_label_count,
    forget_label_count,
    known_label_count,
    loss_of,
)
from .head.observe import LossObserver
from .head.replace import replace_loss_head
from .logged_stats import MONITORED, LoggedStats
from .packing import document_starts, leak_across_documents, leak_message

logger = logging.getLogger(__name__)

# Classes whose loss the mixin replaces, and one whose loss runs behind it: it ends in Trainer's.
_CROSS_ENTROPY = (("transformers", "Trainer"), ("trl", "SFTTrainer"))
_RUNS_BEHIND = (("axolotl", "AxolotlTrainer"),)


class FusedTrainerMixin:
    """``class MyTrainer(FusedTrainerMixin, Trainer)``: the fused loss, one denominator per step.

    It works with ``transformers.Trainer``, ``trl.SFTTrainer`` and Axolotl's ``AxolotlTrainer``
    (whose ``compute_loss`` runs, but for ``orpo_alpha``), and changes the following for every
    model whose loss is one ``F.cross_entropy`` of its output head:

    * the head is replaced (:func:`fusedce.replace_loss_head`): no logits in training or evaluation;
    * the gradient of an optimizer step is that of ``sum of loss_sum / sum of n_valid`` over its
      micro-batches and ranks. Tokens are counted as the model's own loss counts them, after its
      shift if it has one (two extra forwards find that out), and also for models that take no
      ``num_items_in_batch`` or ignore it;
    * auxiliary losses in the model's loss are averaged over micro-batches and ranks;
    * ``loss`` in the logs is in nats per token over the logging interval and all ranks, without
      auxiliary losses; ``train_loss`` the same over the whole run;
    * evaluation and prediction report sum / count over all tokens, whatever the batch size; samples
      that are repeated to fill the last batch of a distributed evaluation are not counted twice;
    * in packed batches (``position_ids`` that restart, without ``attention_mask``) no token is
      trained across a document's border. At the first packed batch the model runs twice more, to
      find out whether its attention crosses borders; a warning says so.

    ``label_smoothing_factor``, and SFTTrainer's ``loss_type="dft"`` (dynamic fine-tuning), are part
    of the fused loss.

    Any other mean over labels is counted as well, with a warning that says why nothing is saved:
    DoRA and other adapters of the head, several losses, models without an output head
    (classification). Each micro-batch's own loss, times its labels, is divided by those of the
    step. Terms that are no mean over these labels (auxiliary losses, heads that predict other
    tokens) are then weighed by labels, too; with one micro-batch the loss is the model's own.

    TRL's SFTTrainer installs a fused head of its own, which bypasses the model's loss and guesses
    its scales from the configuration; here the model's own loss runs instead. ``entropy`` (nats),
    ``mean_token_accuracy``, ``num_tokens`` and a router's ``aux_loss`` are logged as it logs them,
    from the pass of the loss. Other trainers log the first three if ``log_token_stats`` is set, as
    sum / count over all tokens of the interval: the entropy of the distributions, the share of
    labels that were the likeliest class, and the number of tokens without padding. The backward
    pass then computes the logits once more: four products instead of three.

    Attributes:
        log_token_stats: whether to log these statistics (a class attribute, ``False``); TRL's
            SFTTrainer always does.
        memory_budget: bytes that the loss may hold, as in :func:`fusedce.fused_ce` (a class
            attribute, ``None``).

    Raises (when training begins):
        TypeError: an attribute has another type.
        ValueError: the model's loss is a sum, or does not depend on its labels; or a setting
            defines another loss: ``compute_loss_func``, TRL's ``loss_type`` other than "nll" and
            "dft", or "dft" where the loss is not one fused cross-entropy.
        RuntimeError: several GPUs in one process (``nn.DataParallel``); before the first optimizer
            step and at each logging step, the model's loss has counted other tokens than the labels
            hold.

    Examples:
        >>> class MyTrainer(FusedTrainerMixin, Trainer):
        ...     pass
        >>> MyTrainer(model=model, args=args, train_dataset=dataset).train()
    """

    log_token_stats: bool = False
    memory_budget: int | None = None
    _runs_behind: bool = False

    if TYPE_CHECKING:  # attributes of the Trainer behind the mixin

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise ``TypeError`` if the mixin has no effect, or hides a user's ``compute_loss``."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        behind = order[order.index(FusedTrainerMixin) + 1 :]
        before = order[1 : order.index(FusedTrainerMixin)]
        others = [kind for kind in before if not issubclass(kind, FusedTrainerMixin)]
        bases = [base.__module__ for kind in others for base in kind.__mro__]
        if any(name.startswith("transformers.trainer") for name in bases):
            raise TypeError(
                f"FusedTrainerMixin must stand before the Trainer, or it does nothing: write "
                f"class {cls.__name__}(FusedTrainerMixin, {cls.__bases__[0].__name__})"
            )
        for kind in behind:
            library = kind.__module__.split(".")[0]
            cls._runs_behind |= (library, kind.__name__) in _RUNS_BEHIND
            known = (*_CROSS_ENTROPY, *_RUNS_BEHIND)
            if "compute_loss" not in vars(kind) or (library, kind.__name__) in known:
                continue
            remedy = (
                "its loss is another one (distillation, preferences): leave the mixin out"
                if library in ("transformers", "trl", "axolotl")
                else "write it in a class before the mixin, and call super().compute_loss there, "
                "or leave the mixin out"
            )
            raise TypeError(
                f"{kind.__name__} has a compute_loss of its own, which would never run behind "
                f"FusedTrainerMixin: {remedy}"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_behind(self)
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Make a trainer that is otherwise ready count tokens; ``fusedce run`` calls it alone."""
        check_flag("log_token_stats", self.log_token_stats)
        _refuse_other_settings(self)
        if hasattr(self.args, "loss_type"):
            logger.warning(
                "FusedTrainerMixin replaces the fused head of TRL's SFTTrainer: the loss is the "
                "model's own, computed by fusedce."
            )
        memory_budget_of(self.memory_budget)
        self._replace_head()
        # The model's loss is always a mean, and Trainer divides it by its micro-batches.
        self.model_accepts_loss_kwargs = False
        cast(Any, self).loss_is_scaled_for_ga = False
        self._eval_totals: LossMeter | None = None
        self._is_packing_known = False  # whether packed batches were tried
        self._evaluated: Any = None  # outputs of an evaluation's last forward
        self._begin_run()

    # ---- training ---------------------------------------------------------------------------

    def _begin_run(self) -> None:
        """Start the totals and statistics of a training run."""
        self._train_totals = self._new_meter()
        self._declared: Tensor | int = 0  # valid tokens of the micro-batches that have run
        self._coming: list[Tensor] = []  # those of the window's other micro-batches
        self._is_inside = False  # whether micro-batches have run since the last optimizer step
        self._run_sum, self._run_count, self._is_first_step = 0.0, 0, True
        self._train_stats = self._stats = self._new_stats()
        forget_label_count(self.model)

    def _new_meter(self) -> LossMeter:
        return LossMeter(process_group=token_ranks_of(self.accelerator))

    def _new_stats(self) -> LoggedStats | None:
        """Empty statistics; ``None`` if the trainer logs none."""
        stats = LoggedStats(self)
        return stats if self.log_token_stats or stats.of_trl else None

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> Tensor | None:
        """All valid tokens of an optimizer step, over its micro-batches and ranks.

        Collectives: one all-reduce of one int64, on all ranks.
        """
        if self._eval_totals is not None or not batch_samples:
            return None
        if self._is_inside:
            self._leave_out_the_rest()
        labels = self._labels_of(batch_samples[0])
        self._coming = []
        for batch in batch_samples:
            _mask_borders(batch, self._labels_of)
            self._coming.append(labels.of(batch).to(device))
            self._check_packing(batch)
        return self._sum_over_ranks(torch.stack(self._coming).sum())

    def _leave_out_the_rest(self) -> None:
        """Drop the gradients of a window that has ended without an optimizer step.

        Trainer keeps them where data of unknown length end inside a window: the next step would
        add up two windows, each divided by its own tokens.
        """
        self.model.zero_grad()
        self._is_inside = False
        logger.warning(
            "the data have ended inside a window of gradient accumulation, without an optimizer "
            "step: FusedTrainerMixin leaves its micro-batches out, whose gradients Trainer would "
            "have added to those of the next step"
        )

    def _check_packing(self, batch: dict[str, Any]) -> None:
        """Warn, once, if attention crosses the borders of the documents in the first packed batch.

        Alone, the first whose documents are several; on several ranks the first that tells of any,
        so that all ranks run the model.
        """
        ids = batch.get("input_ids")
        if self._is_packing_known or not isinstance(ids, Tensor):
            return
        starts = document_starts(batch, ids)
        if starts is None or not (self.accelerator.num_processes > 1 or starts.any()):
            return
        self._is_packing_known = True
        with self.compute_loss_context_manager():
            change = leak_across_documents(self.model, self._prepare_inputs(dict(batch)))
        if change:
            logger.warning("%s", leak_message(type(self.model).__name__, change))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's loss; in training, its mean is over the optimizer step's denominator."""
        denominator = None
        if self._eval_totals is None and num_items_in_batch is not None:
            steps = self.current_gradient_accumulation_steps
            items = torch.as_tensor(num_items_in_batch)  # a count of a user's own may be an int
            denominator = items.clamp(min=1) / (steps * self._n_ranks())
        if getattr(self, "aux_loss_enabled", False):  # SFTTrainer's switch for MoE models
            inputs = {**inputs, "output_router_logits": True}
        _mask_borders(inputs, self._labels_of)
        if self._by_labels and self._eval_totals is None:
            counted = denominator is not None
            inputs_ = self._labels_of(inputs).given(inputs) if counted else inputs
            outputs = self._outputs_of(model, inputs_)
            loss = self._by_count(self._mean_of(outputs, inputs), inputs, denominator)
            return (loss, outputs) if return_outputs else loss
        outer = LossObserver.current.get()  # of prediction_step, which counts what it has seen
        with (
            self._observed(denominator) if outer is None else contextlib.nullcontext(outer) as (
                observer
            )
        ):
            outputs = self._outputs_of(model, inputs)
        if outer is not None:
            self._evaluated = outputs
        elif self._eval_totals is not None or denominator is not None:
            self._count(observer, inputs, outputs)
        if denominator is not None and not observer.losses:
            raise RuntimeError(
                f"the loss of {type(model).__name__} has not run through its output head, so that "
                f"no token was counted: code that patches the model's forward bypasses the head. "
                f"Was it patched by Liger (apply_liger_kernel_to_...)? Leave its patch out"
            )
        loss = self._mean_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _outputs_of(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """The model's outputs; where a trainer's own loss runs behind the mixin, from that."""
        if not self._runs_behind:
            return model(**inputs)
        # It would take the model's loss away of labels that Trainer smoothes.
        smoother: Any = self.label_smoother
        self.label_smoother: Any = None
        try:
            return super().compute_loss(model, dict(inputs), return_outputs=True)[1]  # type: ignore[misc]
        finally:
            self.label_smoother = smoother

    def _by_count(
        self, mean: Tensor, inputs: Mapping[str, Any], denominator: Tensor | None = None
    ) -> Tensor:
        """Count the mean of a loss that is not fused, times its tokens; that over ``denominator``.

        Without one, as in a call of a user's own, it is the mean.
        """
        total, n = self._labels_of(dict(inputs)).sum_of(mean, inputs)
        evaluating = self._eval_totals is not None
        if evaluating or denominator is not None:
            totals = self._eval_totals if self._eval_totals is not None else self._train_totals
            totals.update((total.detach(), n))
            self._has_evaluated = evaluating
            if self._stats is not None:
                self._stats.add(None, inputs, None)
        return mean if denominator is None else total / denominator.to(mean.device)

    def _observed(self, denominator: Tensor | None = None) -> LossObserver:
        return LossObserver(
            denominator,
            monitor=MONITORED if self._stats else (),
            label_smoothing=0.0 if self.label_smoother is None else self.label_smoother.epsilon,
            token_scaled=self._is_token_scaled(),
        )

    def _is_token_scaled(self) -> bool:
        """Whether TRL's settings ask for dynamic fine-tuning, which has no label smoothing."""
        return getattr(self.args, "loss_type", None) == "dft"

    def _mean_of(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The model's own loss, or that of Trainer's label smoother where it is not fused."""
        if self.label_smoother is None or not self._by_labels or "labels" not in inputs:
            return loss_of(outputs)
        shift = bool(self._labels_of(dict(inputs)).shift)
        return cast(Tensor, self.label_smoother(outputs, inputs["labels"], shift_labels=shift))

    def _count(self, observer: LossObserver, inputs: Mapping[str, Any], outputs: Any) -> None:
        """Add the losses of a forward to the totals, and to the statistics if there are any."""
        totals = self._train_totals if self._eval_totals is None else self._eval_totals
        for loss_sum, n_valid, _ in observer.losses:
            totals.update((loss_sum, n_valid))
            self._has_evaluated = self._eval_totals is not None
        if self._stats is not None:
            self._stats.add(observer, inputs, outputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the loss per token in place of Trainer's."""
        of_interval = "loss" in logs and "learning_rate" in logs  # Trainer's own, not a callback's
        of_run = "train_loss" in logs and "total_flos" in logs
        if of_interval or of_run:
            metrics = self._train_totals.compute()
            self._train_totals.reset()
            n_tokens = int(metrics["n_tokens"])
            if n_tokens:
                self._run_sum += metrics["loss"] * n_tokens
                self._run_count += n_tokens
            self._check_count(n_tokens)
            self._declared = 0
            if of_interval:
                logs["loss"] = metrics["loss"]
                logs |= {} if self._stats is None else self._stats.logged()
            if of_run:
                logs["train_loss"] = self._run_sum / max(self._run_count, 1)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's step; the first optimizer step is made if its tokens were counted right.

        Collectives: in the first optimizer step of a run, two all-reduces on all ranks.
        """
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._coming:  # (none where a user's loop calls this)
            self._declared = self._declared + self._coming.pop(0)
        self._is_inside = not self.accelerator.sync_gradients
        if self._is_first_step and self.accelerator.sync_gradients:
            self._is_first_step = False
            self._check_count(int(self._train_totals.compute()["n_tokens"]))
        return loss

    def _check_count(self, n_tokens: int) -> None:
        """Raise ``RuntimeError`` unless losses have counted as many tokens as their labels hold."""
        declared = int(self._sum_over_ranks(torch.as_tensor(self._declared)))
        if declared == n_tokens:
            return
        owner = next(kind for kind in type(self).__mro__ if "compute_loss" in vars(kind))
        hint = (
            f": {owner.__name__}.compute_loss must call super().compute_loss, and hand on "
            f"num_items_in_batch"
        )
        hint = "" if owner is FusedTrainerMixin else hint
        raise RuntimeError(
            f"the model's loss has counted {n_tokens} tokens since the last logging step, "
            f"but its labels hold {declared} (after the model's shift): the loss "
            f"would be divided by a wrong number{hint}"
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; the returned ``training_loss`` is in nats per token as well."""
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        return output._replace(training_loss=output.metrics["train_loss"])

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's loop, which starts again with smaller batches if memory runs out."""
        self._begin_run()
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    # ---- evaluation -------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run Trainer's loop; the loss is sum / count over all tokens, NaN without any.

        It stays Trainer's own where no loss was seen.
        """
        with self._evaluating() as totals:
            kwargs["metric_key_prefix"] = metric_key_prefix
            output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
            metrics = totals.compute()
            stats = {} if self._stats is None else self._stats.logged(f"{metric_key_prefix}_")
        if (name := f"{metric_key_prefix}_loss") in output.metrics and self._has_evaluated:
            output.metrics[name] = metrics["loss"]
            output.metrics.update(stats)
        return output

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[LossMeter]:
        """Count losses for evaluation, in totals of their own."""
        self._eval_totals = totals = self._new_meter()
        self._stats, self._has_evaluated = self._new_stats(), False
        try:
            yield totals
        finally:
            self._eval_totals, self._stats = None, self._train_stats

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's step, without the samples that fill up the last batch.

        With ``predict_with_generate``, Seq2SeqTrainer's step calls the model by itself and not
        ``compute_loss``; so losses are observed here.
        """
        if self._eval_totals is None:  # called by a loop of the user's own
            with self._evaluating():
                return FusedTrainerMixin.prediction_step(self, model, inputs, *args, **kwargs)
        if "labels" in inputs or "shift_labels" in inputs:
            inputs = dict(AccelerateEngine(self.accelerator).mask_repeated_samples(inputs))
            _mask_borders(inputs, self._labels_of)
        if self.label_smoother is not None and "labels" in inputs:
            self._labels_of(inputs)  # before losses are observed
        self._evaluated = None
        with self._observed() as observer:
            predicted = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        loss = predicted[0]
        # Without training before it, the model's loss is not known yet.
        if loss is not None and observer.reductions != ["mean"]:
            self._labels_of(inputs)
        if self._by_labels and loss is not None:
            self._by_count(loss, inputs)
        else:
            self._count(observer, inputs, self._evaluated)
        self._evaluated = None
        return predicted

    # ---- the model's labels, the ranks ------------------------------------------------------

    @property
    def _by_labels(self) -> bool:
        """Whether labels are counted, since the loss is not one fused loss."""
        found = known_label_count(self.model)
        return found is not None and found.note is not None

    def _labels_of(self, batch: dict[str, Any]) -> LabelCount:
        """How the model's labels are counted, found out at the first batch."""
        found = known_label_count(self.model)
        if found is None:
            if "labels" not in batch and "shift_labels" not in batch:
                raise ValueError(f"the batches must hold labels, got {sorted(batch)}")
            self._replace_head()  # a `model_init` makes another model for each run
            with self.compute_loss_context_manager():
                # The whole batch, since image tensors are not divided into its rows.
                found = find_label_count(self.model, self._prepare_inputs(dict(batch)))
        if found.note is not None and self._is_token_scaled():
            raise ValueError(f"loss_type='dft' needs a fused loss, but fusedce {found.note}")
        return found

    def _replace_head(self) -> None:
        with contextlib.suppress(TypeError, ValueError):  # a warning will say why
            replace_loss_head(self.model, memory_budget=self.memory_budget)

    def _parallel_size(self, *kinds: str) -> int:
        """The product of the sizes of these kinds of parallelism, as Trainer tells them."""
        return math.prod(getattr(self, f"get_{kind}_size", lambda: 1)() for kind in kinds)

    def _n_ranks(self) -> int:
        """Number of ranks whose gradients are averaged; a tensor-parallel group counts once."""
        return int(self.accelerator.num_processes // self._parallel_size("tp"))

    def _sum_over_ranks(self, count: Tensor) -> Tensor:
        """The sum over ranks of a count of whole batches; ranks that share a batch count once."""
        total = self.accelerator.reduce(count.to(self.args.device), reduction="sum")
        return total // self._parallel_size("tp", "cp", "sp")


def _check_behind(trainer: FusedTrainerMixin) -> None:
    """Raise ``TypeError`` if there is no trainer behind the mixin."""
    kind = type(trainer)
    if kind.__mro__[kind.__mro__.index(FusedTrainerMixin) + 1 :] == (object,):
        name = "MyTrainer" if kind is FusedTrainerMixin else kind.__name__
        raise TypeError(
            f"FusedTrainerMixin is no trainer by itself: write "
            f"class {name}(FusedTrainerMixin, Trainer)"
        )


def _refuse_other_settings(trainer: Any) -> None:
    """Raise for another loss than the model's own, and for several GPUs in one process."""
    settings = trainer.args
    loss_type = getattr(settings, "loss_type", None)
    other = "asks for another loss: leave it out, or use the Trainer without the mixin"
    found = {
        "use_liger_kernel=True": (
            _has_ligers_loss(settings),
            "patches the model's forward with Liger's fused loss: set use_liger_kernel=False, or "
            "keep Liger's other kernels by liger_kernel_config="
            '{"fused_linear_cross_entropy": False, "cross_entropy": False}',
        ),
        "orpo_alpha": (bool(getattr(settings, "orpo_alpha", None)), other),
        "compute_loss_func": (trainer.compute_loss_func is not None, other),
        f"loss_type={loss_type!r}": (
            loss_type not in (None, "nll", "dft"),
            "patches the model's forward for TRL's way without logits: set loss_type='nll'"
            if loss_type == "chunked_nll"
            else other,
        ),
    }
    for name, (is_set, remedy) in found.items():
        if is_set:
            raise ValueError(
                f"FusedTrainerMixin computes the model's own cross-entropy through its output "
                f"head, but {name} {remedy}"
            )
    if settings.n_gpu > 1:
        raise RuntimeError(
            f"FusedTrainerMixin does not work with nn.DataParallel, which Trainer uses for "
            f"{settings.n_gpu} GPUs in one process: start one process per GPU with torchrun"
        )


def _has_ligers_loss(settings: Any) -> bool:
    """Whether Liger replaces the loss, and not only norms, activations and rotations."""
    if not getattr(settings, "use_liger_kernel", False):
        return False
    config = getattr(settings, "liger_kernel_config", None) or {}
    return bool(
        config.get("fused_linear_cross_entropy", True) or config.get("cross_entropy", False)
    )


def _mask_borders(batch: dict[str, Any], labels_of: Callable[[dict[str, Any]], LabelCount]) -> None:
    """Ignore, in place, the label that crosses the border between two packed documents.

    In ``labels`` this is a document's first position, in ``shift_labels`` the position before it.
    """
    labels = batch.get("labels", batch.get("shift_labels"))
    if "attention_mask" in batch or labels is None:
        return
    starts = document_starts(batch, labels)
    if starts is None:
        return
    if "shift_labels" not in batch and not labels_of(batch).shift:
        return
    for name, where in (("labels", starts), ("shift_labels", starts.roll(-1, 1))):
        if name in batch:
            batch[name] = batch[name].masked_fill(where, -100)
