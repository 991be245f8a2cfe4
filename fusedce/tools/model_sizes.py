"""Turn the MODEL of a command line into sizes, a configuration, a class or a model.

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
    from torch import nn
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


def load(model: str) -> nn.Module:
    """The model in a folder, of the class that its configuration names, with its weights.

    Raises:
        UserError: ``model`` is no folder with weights.
    """
    folder = Path(model)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"--full loads weights, and there are none in {model}")
    kind: Any = class_of(model, config_of(model))
    try:
        return kind.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as problem:
        why = str(problem).strip().split("\n")[0]
        raise UserError(f"cannot load {model}: {why}") from None


def class_of(model: str, config: PretrainedConfig) -> type[nn.Module]:
    """The causal language model's class for ``config``."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    named = [model] if hasattr(transformers, model) else list(config.architectures or ())
    for name in named:
        found = getattr(transformers, name, None)
        if found is not None and hasattr(found, "config_class") and "Config" not in name:
            return found
    if config.model_type not in names:
        raise UserError(f"transformers has no causal language model of type {config.model_type!r}")
    return getattr(transformers, names[config.model_type])
