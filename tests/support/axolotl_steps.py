"""Three steps of Axolotl on a CPU, from YAML to the trained model: what it logs, as a line of JSON.

    python -P axolotl_steps.py '{"gradient_accumulation_steps": 4, ...}'

The argument holds keys of the YAML. ``"audited": true`` audits a run without the plug-in.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}

import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.core.builders import HFCausalTrainerBuilder
from axolotl.train import train

import fusedce
from support.tiny_trainer import Seen, V, llama, word_tokenizer


def main(audited=False, **keys):
    seen, report = Seen(), None

    def created(self, trainer):
        nonlocal report
        trainer.add_callback(seen)
        if audited:
            report = fusedce.audit(trainer.model)
            trainer.add_callback(report.callback())
        return trainer

    HFCausalTrainerBuilder.hook_post_create_trainer = created
    with tempfile.TemporaryDirectory() as folder:
        model = llama()
        model.lm_head.weight.data *= 30  # losses far from each other
        model.save_pretrained(folder)
        word_tokenizer(V - 3).save_pretrained(folder)
        rng = torch.Generator().manual_seed(1)
        rows = [
            torch.randint(V - 3, (n,), generator=rng) for n in (60, 3, 25, 7, 48, 5, 12, 33) * 8
        ]
        texts = [{"text": " ".join(f"w{i}" for i in row.tolist())} for row in rows]
        data = Path(folder, "data.jsonl")
        data.write_text("".join(json.dumps(text) + "\n" for text in texts))
        settings = {
            "base_model": folder, "output_dir": f"{folder}/out", "sequence_len": 64,
            "dataset_prepared_path": f"{folder}/prepared", "val_set_size": 0,
            "datasets": [{"path": str(data), "ds_type": "json", "type": "completion"}],
            "micro_batch_size": 2, "max_steps": 3, "num_epochs": 1, "learning_rate": 0.01,
            "lr_scheduler": "constant", "warmup_steps": 0, "optimizer": "adamw_torch",
            "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "seed": 1,
            "bf16": False, "fp16": False, "tf32": False, "attn_implementation": "eager",
            "dataloader_num_workers": 0, "dataset_num_proc": 1,
        } | keys  # fmt: skip
        path = Path(folder, "config.yml")
        path.write_text(yaml.safe_dump(settings))
        cfg = load_cfg(str(path))
        trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))[2]
    heads = fusedce.head_report(trainer.model)
    print(json.dumps({
        "trainer": type(trainer).__name__, "norms": seen.norms,
        "losses": [log["loss"] for log in seen.logs if "loss" in log],
        "fused": heads.losses_fused, "made": heads.logits_made,
        "verdict": report and report.verdict(),
    }))  # fmt: skip


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
