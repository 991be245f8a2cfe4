"""`fusedce check`: whether a model keeps its loss and gradients with a replaced head.

A model is run natively and with :func:`fusedce.replace_loss_head`, in training and in evaluation.
In float32 both must agree to rounding. In bf16 and fp16, which round, the error of each is taken
against the float32 model: ours may be at most twice the native one's, plus a few roundings.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedce.head.replace import head_report, replace_loss_head
from fusedce.tools.model_sizes import UserError, class_of, config_of, load
from fusedce.tools.tiny_models import attempts, batch, build

LOSS_ERROR, GRAD_ERROR = 1e-6, 1e-5  # relative, in float32
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Check:
    """Findings of :func:`check`. Errors are relative; the gradients' is one norm over all."""

    model: str
    model_class: str
    dtype: str
    peft: bool
    compiled: bool
    parameters: int  # of the model that was run
    loss: float  # native, nats per token
    loss_error: float
    eval_error: float
    grad_error: float
    native_errors: tuple[float, float, float] | None  # of the native model; None in fp32
    fused: bool
    why_not: tuple[str, ...]  # code that needed logits, or why the head was not replaced
    equal: bool

    def data(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def check(
    model: str, *, dtype: str = "fp32", peft: bool = False, compiled: bool = False,
    full: bool = False,
) -> Check:  # fmt: skip
    """Run ``model`` before and after its head is replaced.

    Args:
        model: folder, configuration, class or model type; see :mod:`fusedce.tools.model_sizes`.
        dtype: "fp32", "bf16" or "fp16", of all parameters.
        peft: with a LoRA adapter on every linear layer, the head included.
        compiled: through ``torch.compile``.
        full: load the folder's weights instead of building the model small with random ones.

    Raises:
        UserError: the model cannot be found, built, or run on a few random tokens.
    """
    with _quietly():
        if full:
            module = load(model).float()
        else:
            module = _small(model)
        if peft:
            module = _with_lora(module)
        return _compare(model, module, dtype, peft, compiled)


def _small(model: str) -> nn.Module:
    config = config_of(model)
    model_class = class_of(model, config)
    named = model in (model_class.__name__, config.model_type)
    first = None
    for attempt in attempts(config.model_type):
        try:
            # A class has its own default values; scales and caps show a wrong loss.
            module = build(model_class, config, attempt, steps=named)
            _run(module, batch(module.config))  # type: ignore[arg-type]
        except Exception as problem:  # model code may fail at such small sizes
            first = first or f"{type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"
            continue
        with torch.no_grad():  # a new head gives nearly flat logits
            head = module.get_output_embeddings()  # type: ignore[operator]
            if isinstance(getattr(head, "weight", None), Tensor):
                head.weight.mul_(10)
        return module
    raise UserError(
        f"{model_class.__name__} could not be built small: {first}. With weights in a folder, "
        f"fusedce check FOLDER --full runs the model as it is"
    )


def _with_lora(module: nn.Module) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise UserError("--peft needs peft: pip install peft") from None
    names = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise UserError("--peft: the model has no nn.Linear to put an adapter on")
    torch.manual_seed(3)
    # Adapters start at zero by default, which would hide a wrong gradient of theirs.
    lora = LoraConfig(r=4, target_modules=names, init_lora_weights=False, lora_dropout=0.0)
    return get_peft_model(module, lora)


def _compare(model: str, module: nn.Module, dtype: str, peft: bool, compiled: bool) -> Check:
    inputs = batch(module.config)  # type: ignore[arg-type]
    exact = _run(module, inputs)
    low = copy.deepcopy(module).to(_DTYPES[dtype])
    native = exact if dtype == "fp32" and not compiled else _run(low, inputs, compiled)
    why: tuple[str, ...] = ()
    try:
        replace_loss_head(low)
    except (TypeError, ValueError) as refused:
        why = (str(refused),)
    ours = _run(low, inputs, compiled)
    report = head_report(low)
    if not why:
        why = tuple(f"{p.operation} at {p.line} needed logits {p.shape}" for p in report.places)
        why += report.notes
        if not compiled and report.losses_fused == 0:
            why += ("no F.cross_entropy of the head's logits was seen",)
    errors = _errors(ours, exact if dtype != "fp32" else native)
    before = None if dtype == "fp32" else _errors(native, exact)
    return Check(
        model=model,
        model_class=type(module).__name__,
        dtype=dtype,
        peft=peft,
        compiled=compiled,
        parameters=sum(p.numel() for p in module.parameters()),
        loss=float(native[0]),
        loss_error=errors[0],
        eval_error=errors[1],
        grad_error=errors[2],
        native_errors=before,
        fused=not why and report.logits_made == 0,
        why_not=why,
        equal=all(e <= b for e, b in zip(errors, _bounds(before, dtype), strict=True)),
    )


def _bounds(native: tuple[float, float, float] | None, dtype: str) -> tuple[float, float, float]:
    if native is None:
        return LOSS_ERROR, LOSS_ERROR, GRAD_ERROR
    floor = 4 * torch.finfo(_DTYPES[dtype]).eps
    a, b, c = (2 * error + floor for error in native)
    return a, b, c


Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]


def _run(module: nn.Module, inputs: dict[str, Tensor], compiled: bool = False) -> Outcome:
    """Loss in training, loss in evaluation, and gradients, from the same seed each time."""
    if compiled:
        torch.compiler.reset()
    call = torch.compile(module) if compiled else module
    module.zero_grad()
    module.train()
    torch.manual_seed(2)
    loss = call(**inputs).loss
    loss.backward()
    grads = {n: p.grad.float() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    module.eval()
    torch.manual_seed(2)
    with torch.no_grad():
        evaluated = call(**inputs).loss
    return loss.detach().float(), evaluated.float(), grads


def _errors(ours: Outcome, truth: Outcome) -> tuple[float, float, float]:
    if ours[2].keys() != truth[2].keys():
        return float("nan"), float("nan"), float("nan")  # other parameters have gradients
    norm = torch.cat([g.flatten() for g in truth[2].values()]).norm()
    difference = torch.cat([(ours[2][n] - g).flatten() for n, g in truth[2].items()]).norm()
    return (
        float(abs(ours[0] - truth[0]) / abs(truth[0])),
        float(abs(ours[1] - truth[1]) / abs(truth[1])),
        float(difference / norm),
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the warnings of transformers about small configurations."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
