"""Scripts that are run in processes of their own, as users run them."""

import os
import subprocess
import sys
from pathlib import Path

import fusedce

TESTS = Path(__file__).parents[1]
PACKAGE = Path(fusedce.__file__).parents[1]  # that of this process: mutants are copies
TWO = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]


def python(folder, *arguments):
    """A finished process of Python in ``folder``.

    On two ranks it is tried again if it hangs: where a script destroys its process group first, its
    DDP may wait for ever when it is freed.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{TESTS}{os.pathsep}{PACKAGE}", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
    }  # fmt: skip
    tries = 3 if list(arguments[:2]) == TWO[:2] else 1
    for last in (i == tries for i in range(1, tries + 1)):
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=100)
            break
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends the ranks that it has started
            process.wait()
            if last:
                raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# Trainer with evaluation and checkpoints; the argument is the number of micro-batches of a step.
TRAINER = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

def main(accumulate, rows):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=1, eos_token_id=2,
    )
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        "out", per_device_train_batch_size=1, gradient_accumulation_steps=accumulate, max_steps=4,
        logging_steps=1, save_steps=1, eval_strategy="steps", eval_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, per_device_eval_batch_size=1,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    logged = trainer.state.log_history
    torch.manual_seed(0)
    again = Trainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=rows, eval_dataset=rows,
    )
    again.train(resume_from_checkpoint="out/checkpoint-2")
    if trainer.is_world_process_zero():
        print(json.dumps([logged, again.state.log_history]))

rng = torch.Generator().manual_seed(1)
rows = []
for n in (4, 30, 9, 60, 5, 22, 3, 48):
    ids = torch.randint(3, 61, (n,), generator=rng)
    rows.append({"input_ids": ids, "labels": ids})
if __name__ == "__main__":
    main(int(sys.argv[1]), rows)
"""
