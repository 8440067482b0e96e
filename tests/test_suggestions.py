"""Options that a command does not have: names of other trainers, of other commands, and slips."""

import pytest

from hotlap.cli import COMMANDS, command_parser, options_of
from hotlap.suggestions import PEERS, is_setting
from tests.command import complaint, hotlap_here


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("train softcap --batch_size 8", "here it is `--batch.tokens-per-step`"),
        ("train softcap --max_iters 100", "here it is `--steps`"),
        ("train softcap --learning_rate=0.1", "here it is `--optim.muon.lr` or `--optim.adam.embed-lr`"),
        ("train softcap --n_layer 3", "here it is `--model.num-layers`"),
        ("train softcap --seeds 3", "it belongs to `hotlap race`"),
        ("train softcap --prompt Once", "it belongs to `hotlap sample`"),
        ("train softcap --early-stopping 3", "here it is `--patience`"),
        ("train softcap --time-limit 5", "here it is `--minutes`"),
        ("train softcap --minute 5", "did you mean `--minutes`"),
        ("train softcap --resid_pdrop 0.1", "here it is `--model.dropout`"),
        ("race softcap --max_time 5", "here it is `--budget`"),
        ("train softcap --dry_run", "write `--dry-run`"),
        ("train softcap --optim.muon.lrr 1", "did you mean `--optim.muon.lr`"),
        ("race softcap adamw --epochs 3", "here it is `--steps`"),
        ("sample runs/lap --max_new_tokens 5", "here it is `--tokens`"),
        ("sample runs/lap --top_k 5", "write `--top-k`"),
        ("sample runs/lap --steps 5", "settings are given to `hotlap train`"),
        ("report runs/lap --budget 5", "it belongs to `hotlap race`"),
        ("data prepare texts --val_fraction 0.1", "write `--val-fraction`"),
        ("doctor --nonsense", "`hotlap doctor --help` lists all of them"),
    ],
)
def test_the_answer_names_what_it_is_called_here(words, advice):
    assert advice in complaint(hotlap_here(*words.split()))


def test_every_name_of_ours_exists_and_no_name_of_a_peer_is_a_setting_that_means_something_else():
    ours = {name for names in PEERS.values() for name in names.split()}
    options = set().union(*(options_of(command_parser(command)) for command in COMMANDS))
    assert [name for name in sorted(ours - options) if not is_setting(name)] == []


def test_what_a_command_has_is_never_refused():
    for command in ("train", "race", "plan"):
        for name in options_of(command_parser(command)):
            assert "-" not in name[:1]
    assert is_setting("lr")
    assert is_setting("weight_decay")  # one of two, which the command asks about
    assert not is_setting("weigth_decay")
