"""The program of SFT that TRL installs: a model, data and arguments for it, on a disk."""

import json

from support.tiny_trainer import V, llama, word_tokenizer


def words(n, seed):
    return " ".join(f"w{(7 * seed + 3 * i) % (V - 3)}" for i in range(n))


def rows(name):
    """What the program reads, of answers of different lengths."""
    for i in range(8):
        pair = {"prompt": words(3, i), "completion": " " + words(2 + i, i + 1)}
        yield pair if "completions" in name else {"text": words(3 + 4 * (i % 4), i)}


def write(folder):
    """A model and its tokenizer."""
    llama(pad_token_id=0).save_pretrained(folder / "model")
    word_tokenizer(V - 3).save_pretrained(folder / "model")


def arguments(name, folder, more=""):
    """The command line of TRL's SFT, plain or in a variant, whose data this writes."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows(name))))
    return (
        f"--model_name_or_path {folder}/model --dataset_name {folder}/data "
        f"--output_dir {folder}/out --dtype float32 --max_steps 2 --per_device_train_batch_size 2 "
        "--learning_rate 0.3 --optim sgd --lr_scheduler_type constant --logging_steps 1 "
        "--report_to none --use_cpu --bf16 False --gradient_checkpointing False "
        "--disable_tqdm True --save_strategy no --max_grad_norm 0 "
        f"{more}"
    ).split()
