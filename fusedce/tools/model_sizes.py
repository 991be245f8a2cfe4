"""Turn the MODEL of a command line into sizes, or a configuration.

``MODEL`` is a folder that holds ``config.json``, such a file itself, the name of a class of
transformers (``LlamaForCausalLM``) or of a model type (``llama``); where sizes are enough, ``H,V``.
The name of a model on the Hugging Face hub (``org/name``) works where huggingface_hub is installed
and online: its config.json alone is downloaded.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class UserError(ValueError):
    """A mistake of the user: the command line prints its message without a traceback."""


def sizes(model: str) -> tuple[int, int]:
    """H and V of ``model``; only those of a configuration need transformers.

    Raises:
        UserError: there is no such model, its configuration names no sizes, or one is 0.
    """
    if re.fullmatch(r"\d+[,x]\d+", model):
        H, V = map(int, re.split("[,x]", model))
        if not (H and V):
            raise UserError(f"H,V must be integers, each at least 1, with commas, got {model!r}")
        return H, V
    of_text: Any = config_of(model).get_text_config(decoder=True)
    if not getattr(of_text, "hidden_size", None) or not getattr(of_text, "vocab_size", None):
        raise UserError(
            f"the configuration of {model} names no hidden size and vocabulary: give them as H,V, "
            f"such as 4096,128256"
        )
    return of_text.hidden_size, of_text.vocab_size


def config_of(model: str) -> PretrainedConfig:
    """The configuration of ``model`` as transformers reads it.

    Raises:
        UserError: there is no such model, or transformers cannot read it.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    if "/" in model or model.endswith(".json") or (model and Path(model).exists()):
        return _read_config(model)
    if model in CONFIG_MAPPING_NAMES:
        return getattr(transformers, CONFIG_MAPPING_NAMES[model])()
    config_class = getattr(getattr(transformers, model, None), "config_class", None)
    if config_class is None:
        near = difflib.get_close_matches(model, {*names.values(), *names}, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"{model!r} is no folder, file, class or model type of transformers "
            f"{transformers.__version__}{hint}"
        )
    return config_class()


def _read_config(model: str) -> PretrainedConfig:
    """The configuration in a folder or file, or of a model on the hub."""
    from transformers import AutoConfig

    here = Path(model).exists()
    if not here and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        raise UserError(f"there is no folder or file {model!r} here")
    try:
        return AutoConfig.from_pretrained(model, local_files_only=here, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as problem:
        why = str(problem).strip().split("\n")[0]
        if here:
            raise UserError(f"transformers cannot read {model}: {why}") from None
        raise UserError(
            f"there is no folder or file {model!r} here, and its config.json was not found on the "
            f"Hugging Face hub ({why}). Where the hub can be reached: "
            f"hf download {model} config.json --local-dir {Path(model).name}; then give that folder"
        ) from None
