"""The command ``fusedce``: run, audit, plan, doctor.

Each command imports only the modules it needs, so that ``--help`` does not wait for torch. Findings
go to standard output, as text or with ``--json`` as one JSON value and nothing else; errors
go to standard error. Exit status: 0 success, 2 a mistake in the call, 1 the check failed or
could not be finished.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import fusedce

try:
    import click
except ModuleNotFoundError:
    sys.exit("fusedce's commands need click: pip install 'fusedce[cli]'")

from .tools import script
from .tools.model_sizes import UserError

_EXTRAS = {
    "transformers": "fusedce[transformers]",
    "hypothesis": "fusedce[testing]",
}
# JSON value, text and exit status.
Answer = tuple[dict[str, Any], str, int]
Command = TypeVar("Command", bound=Callable[..., Any])


class _Group(click.Group):
    """Commands, of which some run a script of the user's, whose exceptions are not ours to word."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; what a script raised goes on to the interpreter as it is."""
        try:
            return super().main(*args, **kwargs)
        except script.Raised as wrapped:
            error = wrapped.error
        raise error


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(fusedce.__version__, message="fusedce %(version)s")
def main() -> None:
    """Commands of fusedce: the loss of a language model in chunks of its logits."""


def _command(function: Command, **settings: Any) -> Callable[[Command], click.Command]:
    """Make a subcommand of a function that returns its JSON value, its text and its exit status.

    A user's mistake is printed as one line, without a traceback. Exit status: 2 for a mistake in
    the call; 1 for a full disk, too little memory, a missing permission or a missing package.
    """

    @functools.wraps(function)
    def called(*args: Any, as_json: bool, **kwargs: Any) -> None:
        try:
            value, text, status = function(*args, **kwargs)
        except UserError as mistake:
            raise click.UsageError(str(mistake)) from None
        except ModuleNotFoundError as missing:
            package = (missing.name or "").partition(".")[0]
            raise click.ClickException(
                f"{package} is missing: pip install {_EXTRAS.get(package, package)!r}"
            ) from None
        except OSError as problem:
            raise click.ClickException(str(problem)) from None
        except (MemoryError, RuntimeError) as problem:
            said = str(problem).partition("\n")[0]
            # Torch says "out of memory", "can't allocate memory" or "Storage size ... overflowed".
            if isinstance(problem, RuntimeError) and not re.search(
                "(of|allocate) memory|Storage size", said
            ):
                raise
            raise click.ClickException(f"this machine's memory does not hold it: {said}") from None
        if not script.is_first_rank():  # a status of theirs would end the first one early
            return
        click.echo(json.dumps(value, indent=1) if as_json else text)
        if status:
            sys.exit(status)

    summary = (function.__doc__ or "").partition("\n")[0]
    json_option = click.option(
        "--json", "as_json", is_flag=True, help="One JSON value on standard output."
    )
    return main.command(short_help=summary, **settings)(json_option(called))


# What comes after the script belongs to the script, options included.
_OF_SCRIPT = {"ignore_unknown_options": False, "allow_interspersed_args": False}
_module_option = click.option(
    "-m", "module", is_flag=True, help="SCRIPT is a module, as for python."
)


@main.command(context_settings=_OF_SCRIPT, short_help="Run SCRIPT, unchanged, with fused losses.")
@click.option("--report", type=click.Path(dir_okay=False), metavar="FILE",
              help="Write what was and was not touched to FILE, as JSON.")  # fmt: skip
@_module_option
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(report: str | None, module: bool, target: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT, unchanged, with fused losses.

    Each model of transformers with an output head has it replaced when it is made. Each Trainer,
    Seq2SeqTrainer and SFTTrainer gets FusedTrainerMixin. Nothing else changes: output, tracebacks
    and exit status are the script's. One line on standard error says at the end what was touched,
    and what was not and why.

    On several processes: torchrun ... -m fusedce run SCRIPT, or the same with accelerate launch.
    """
    from .tools import run as tool

    try:
        tool.run(target, arguments, module=module, report=report)
    except UserError as mistake:
        raise click.UsageError(str(mistake)) from None


_TORCHS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPE: dict[str, Any] = {
    "type": click.Choice([*_TORCHS.values(), *_TORCHS]),
    "callback": lambda *given: _TORCHS.get(given[2], given[2]),
}


@_command
@click.argument("model")
@click.option("--tokens", type=click.IntRange(1, 2**31 - 1), default=8192, show_default=True,
              help="Tokens of a micro-batch on one device.")  # fmt: skip
@click.option("--dtype", **_DTYPE, default="bf16", show_default=True)
@click.option("--device", default="H200", show_default=True,
              help="cpu, A100, H100, H200, B200, MI300X or 'RTX 4090'.")  # fmt: skip
def plan(model: str, tokens: int, dtype: str, device: str) -> Answer:
    """Count the memory of the loss of MODEL without running it.

    MODEL is a folder with config.json, a configuration file, a class (LlamaForCausalLM) or a model
    type (llama) of transformers, or two sizes: H,V such as 4096,128256 (or 4096x128256).
    """
    from .tools import plan as tool

    found = tool.plan(model, tokens=tokens, dtype=dtype, device=device)
    return found, tool.text(found), 0


@_command
def doctor() -> Answer:
    """Report versions, devices, and what would run there and why, for a bug report."""
    from .tools.doctor import report

    lines = report()
    return {"lines": lines}, "\n".join(lines), 0


@functools.partial(_command, context_settings=_OF_SCRIPT)
@click.option("--steps", type=click.IntRange(1), metavar="N",
              help="Optimizer steps to audit; the script ends there (default: 10).")  # fmt: skip
@click.option("--model", metavar="CLASS",
              help="Class of the model to audit; default: the first that is called.")  # fmt: skip
@click.option("--picture", is_flag=True, help="Draw the weight of the tokens of each micro-batch.")
@_module_option
@click.argument("target", metavar="[SCRIPT]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def audit(
    steps: int | None, model: str | None, picture: bool, module: bool, target: str | None,
    arguments: tuple[str, ...],
) -> Answer:  # fmt: skip
    """Run SCRIPT, unchanged, and find how much each token weighs in each optimizer step.

    Without SCRIPT, the findings in a loop that averages means, and in a right one.

    Exit status: 0 every token weighs the same; 1 the loop is wrong, as the verdict says; 3 it
    cannot be judged. Under torchrun it is 0 for each of them. With --json, what the script prints
    goes to standard error.
    """
    from .tools import audit as tool

    if target is not None:
        output = sys.stderr if click.get_current_context().params["as_json"] else sys.stdout
        report, remedy = tool.audit(
            target, arguments, module=module, model=model, steps=steps or 10, output=output
        )
        value = tool.value(report)
        text = tool.picture(report) + str(report) if picture else str(report)
        if remedy is not None and script.is_first_rank():
            atexit.register(print, f"fusedce audit: {remedy}", file=sys.stderr)  # the last line
        # Torchrun would print a failure's traceback below a verdict.
        status = 0 if script.is_launched() else {True: 0, False: 1, None: 3}[report.right()]
        return value, text, status
    loops = {"loss.mean() / accumulation_steps": True, "sum of losses / tokens of the step": False}
    found, texts = {}, []
    for name, averaged in loops.items():
        report = _audited(steps or 3, averaged)
        found[name] = {"text": str(report)} | tool.value(report)
        texts.append(f"== {name}\n{tool.picture(report) if picture else ''}{report}\n")
    return found, "\n".join([*texts, "Your own: fusedce audit SCRIPT [ARGUMENTS]"]), 0


def _audited(steps: int, averaged: bool) -> Any:
    """The report of an audit around an ordinary loop over lines of Python's documentation."""
    from pydoc_data.topics import topics

    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    lines = [x for x in "\n".join(topics.values()).encode().splitlines() if len(x) > 1]
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fusedce.audit(model) as report:
        for _ in range(steps):
            drawn = torch.randint(len(lines), (8,)).tolist()
            batches = [torch.tensor(list(lines[i])) for i in drawn]
            tokens, logged = sum(len(ids) - 1 for ids in batches), 0.0
            for ids in batches:
                total = F.cross_entropy(model(ids[:-1]), ids[1:], reduction="sum")
                loss = total / (len(ids) - 1) / len(batches) if averaged else total / tokens
                loss.backward()
                logged += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            report.log(logged)
    return report
