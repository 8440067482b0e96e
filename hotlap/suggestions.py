"""What to answer to an option that a command does not have.

It may be the name that another trainer uses, an option of another command, or a slip of spelling, and is
looked for in this order: the nearest spelling alone would answer `--batch_size` with `--block-size`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.settings import full_name, settings_of

# What others call it → what it is called here, in options and settings; those that a command has are named.
# Of nanoGPT, modded-nanogpt, nanochat, llm.c, the Trainer of transformers, PyTorch Lightning and torchrun.
PEERS = {
    ("batch_size", "total_batch_size", "global_batch_size", "train_batch_size"): "batch.tokens-per-step",
    ("device_batch_size", "per_device_train_batch_size", "micro_batch_size"): "batch.micro-sequences",
    ("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"): "batch.micro-sequences",
    ("block_size", "context_length", "seq_len", "max_seq_len", "n_ctx"): "batch.sequence-tokens",
    ("max_iters", "num_iterations", "max_steps", "num_steps", "epochs", "num_train_epochs"): "steps",
    ("learning_rate", "max_lr", "matrix_lr"): "optim.muon.lr optim.adam.embed-lr optim.adam.head-lr",
    ("embedding_lr", "unembedding_lr"): "optim.adam.embed-lr optim.adam.head-lr",
    ("min_lr", "final_lr_frac"): "schedule.final-lr-fraction",
    ("warmup_iters", "warmup_ratio", "warmup"): "schedule.warmup-steps",
    ("warmdown_iters", "warmdown_ratio", "lr_decay_iters"): "schedule.cooldown-fraction",
    ("lr_scheduler_type", "scheduler"): "schedule.kind",
    ("grad_clip", "max_grad_norm", "gradient_clip_val"): "optim.clip-norm",
    ("optimizer",): "optim.matrices",
    ("n_layer", "n_layers", "depth", "num_hidden_layers"): "model.num-layers",
    ("n_embd", "d_model", "model_dim", "hidden_size", "dim"): "model.width",
    ("n_head", "n_heads", "num_attention_heads"): "model.num-heads",
    ("n_kv_head", "num_key_value_heads"): "model.num-kv-heads",
    ("eval_interval", "eval_every", "eval_steps", "val_loss_every"): "evaluation.every-steps",
    ("eval_iters", "eval_tokens", "val_tokens"): "evaluation.tokens",
    ("early_stopping_patience", "early_stopping"): "patience",
    ("save_every", "save_steps", "save_interval"): "checkpoint.every-steps",
    ("save_total_limit",): "checkpoint.keep",
    ("out_dir", "output_dir", "run_name"): "name runs",
    ("dataset", "data_dir", "train_data", "input_bin", "data"): "data data.source",
    ("init_from", "resume_from_checkpoint", "ckpt_path"): "resume checkpoint",
    ("dtype", "bf16", "fp16"): "precision",
    ("use_wandb", "wandb", "wandb_log", "report_to"): "log",
    ("nproc_per_node", "num_gpus", "devices", "world_size"): "procs gpus",
    ("time_budget", "time_limit", "max_time", "max_train_minutes", "minutes", "budget"): "minutes budget",
    ("attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout_rate"): "model.dropout",
    ("max_new_tokens", "max_tokens", "n_predict", "length"): "tokens",
    ("num_samples", "num_return_sequences"): "samples",
    ("start", "text", "input"): "prompt",
}


def unknown_option(
    command: str, option: str, own: Collection[str], others: Mapping[str, Collection[str]], *, settings: bool
) -> ConfigError:
    """The answer to `--option`, which `command` does not know.

    `own`: its options without dashes; `others`: those of each other command; `settings`: whether it takes
    settings as well.
    """
    return ConfigError(
        expected=f"an option of `hotlap {command}`" + (" or a setting" if settings else ""),
        found=f"`--{option}`",
        do=_advice(command, option, own, others, settings=settings),
    )


def is_setting(name: str) -> bool:
    """Whether a command that takes settings knows it; also if it is one of several."""
    try:
        full_name(Config, name)
    except ConfigError as mistake:
        return mistake.expected == "an unambiguous setting name"
    return True


def _advice(
    command: str, option: str, own: Collection[str], others: Mapping[str, Collection[str]], *, settings: bool
) -> str:
    dashed = option.replace("_", "-").lower()
    if dashed in own:
        return f"write `--{dashed}`"
    known = {name: f"--{name}" for name in own}
    if settings:
        known |= {
            item.name.replace("_", "-"): f"--{item.name.replace('_', '-')}" for item in settings_of(Config)
        }
    here = [name for name in _ours(dashed) if name in known or (settings and is_setting(name))]
    if "minutes" not in own:  # a setting as well, which is for `hotlap train` to choose
        here = [name for name in here if name != "minutes"]
    if here:
        return "here it is " + " or ".join(f"`--{name}`" for name in here)
    homes = [name for name, options in others.items() if dashed in options and name != command]
    if homes:
        return "it belongs to " + ", ".join(f"`hotlap {name}`" for name in homes)
    if not settings and (is_setting(option) or _ours(dashed)):
        return "settings are given to `hotlap train`"
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}  # the command's own come first
    matches = difflib.get_close_matches(dashed, [*known, *leaves], n=1, cutoff=0.6)
    if matches:
        return f"did you mean `--{leaves.get(matches[0], matches[0])}`?"
    return f"`hotlap {command} --help` lists all of them"


def _ours(dashed: str) -> list[str]:
    name = dashed.replace("-", "_")
    return next((ours.split() for theirs, ours in PEERS.items() if name in theirs), [])
