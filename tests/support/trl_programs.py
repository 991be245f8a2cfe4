"""The programs that TRL installs: a model, data and arguments for them, on a disk."""

import json

from support.tiny_trainer import V, llama, word_tokenizer

_OF_GRPO = (
    "--reward_funcs trainer_rewards.different_words --num_generations 4 --beta 0.05 "
    "--max_completion_length 6 --per_device_train_batch_size 4 --temperature 0.9"
)


def words(n, seed):
    return " ".join(f"w{(7 * seed + 3 * i) % (V - 3)}" for i in range(n))


def rows(name):
    """What each program reads, of answers of different lengths."""
    for i in range(8):
        prompt, good, bad = words(3, i), " " + words(2 + i, i + 1), " " + words(9 - i, i)
        if name.startswith("sft"):
            pair = {"prompt": prompt, "completion": good}
            yield pair if "completions" in name else {"text": words(3 + 4 * (i % 4), i)}
        elif name.startswith("dpo"):
            yield {"prompt": prompt, "chosen": good, "rejected": bad}
        elif name.startswith("kto"):
            yield {"prompt": prompt, "completion": good, "label": i % 2 == 0}
        else:
            yield {"prompt": prompt}


def write(folder):
    """A model, its tokenizer and a reward."""
    llama(pad_token_id=0).save_pretrained(folder / "model")
    word_tokenizer(V - 3).save_pretrained(folder / "model")
    reward = "def different_words(completions, **_):\n"
    reward += "    return [float(len(set(c.split()))) for c in completions]\n"
    (folder / "trainer_rewards.py").write_text(reward)


def arguments(name, folder, more=""):
    """The command line of a program, "sft" or "sft, a variant", whose data this writes."""
    program = name.split(",")[0]
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows(name))))
    return (
        f"--model_name_or_path {folder}/model --dataset_name {folder}/data "
        f"--output_dir {folder}/out --dtype float32 --max_steps 2 --per_device_train_batch_size 2 "
        "--learning_rate 0.3 --optim sgd --lr_scheduler_type constant --logging_steps 1 "
        "--report_to none --use_cpu --bf16 False --gradient_checkpointing False "
        "--disable_tqdm True --save_strategy no --max_grad_norm 0 "
        f"{_OF_GRPO if program in ('grpo', 'rloo') else ''} {more}"
    ).split()
