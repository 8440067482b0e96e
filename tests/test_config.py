import pytest

from hotlap.config import Config, ModelConfig
from hotlap.errors import ConfigError
from hotlap.settings import updated


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"model.width": 100}, "`width` divisible by `num_heads`"),
        ({"model.num_kv_heads": 4}, "`num_heads` divisible by `num_kv_heads`"),
        ({"model.num_kv_heads": 0}, "`num_heads` divisible by `num_kv_heads`"),
        ({"model.num_heads": 0}, "`num_heads` above 0"),
        ({"model.width": 42, "model.num_heads": 6}, "head dimension"),
        ({"model.num_layers": 11, "model.values": "mirrored"}, "even number of layers"),
        ({"model.num_layers": 1}, "at least two layers"),
        ({"model.architecture": "gpt2", "model.num_kv_heads": 1}, "because gpt2 supports none of them"),
        ({"model.architecture": "gpt2", "model.bigram_rows": 64}, "because gpt2 supports none of them"),
        ({"model.bigram_rows": -1}, "`bigram_rows` of at least 0"),
        ({"model.softcap": -1.0}, "`softcap` of at least 0"),
        ({"batch.sequence_tokens": 1000, "batch.tokens_per_step": 1000}, "multiple of block_size"),
        ({"batch.tokens_per_step": 100_000}, "multiple of sequence_tokens"),
        ({"optim.muon.lr": -0.1}, "`lr` above 0"),
        ({"optim.muon.lr": float("nan")}, "`lr` above 0"),
        ({"optim.adam.beta1": 1.0}, "`beta1` in [0, 1)"),
        ({"optim.adam.beta2": 1.5}, "`beta2` in [0, 1)"),
        ({"optim.muon.momentum_end": 1.0}, "`momentum_end` in [0, 1)"),
        ({"schedule.cooldown_steps": 3, "schedule.cooldown_fraction": 0.5}, "steps or as a fraction"),
        ({"schedule.cooldown_steps": 1000, "schedule.warmup_steps": 900}, "that fit in the run"),
        ({"schedule.cooldown_fraction": 0.5, "schedule.warmup_steps": 876}, "that fit in the run"),
        ({"optim.muon.lr_factors": {"head": -1.0}}, "`lr_factors` of at least 0; found head=-1"),
        ({"optim.muon.lr_factors": {"head": float("nan")}}, "`lr_factors` of at least 0"),
        ({"optim.muon.lr_factors": {"mlp": 1.0, "head": float("inf")}}, "found head=inf"),
        ({"schedule.window_start_tokens": 32}, "window of at least"),
        ({"attention.window_unit": "blocks"}, "when window_unit is blocks"),
        ({"data.order": "shuffled", "data.chunk_tokens": 100}, "multiple of chunk_tokens"),
        ({"data.source": ""}, "data source"),
        ({"attention.window_unit": "unlimited"}, "any other window_unit for speedrun"),
        ({"model.architecture": "gpt2"}, "window_unit unlimited"),
        ({"evaluation.tokens": 0}, "`tokens` above 0"),
        ({"data.order": "shuffled", "data.tail": "drop"}, "data.tail carry with data.order shuffled"),
        ({"evaluation.validation_sequence_tokens": 0}, "`validation_sequence_tokens` above 0"),
        ({"evaluation.validation_sequence_tokens": 200}, "validation_sequence_tokens as a multiple of block"),
        (
            {
                "model.architecture": "gpt2",
                "attention.window_unit": "unlimited",
                "attention.document_mask": False,
                "evaluation.validation_sequence_tokens": 2 * 65_536,
            },
            "at most 65536 for gpt2",
        ),
        ({"checkpoint.end_only_from_ranks": -1}, "`end_only_from_ranks` of at least 0"),
        ({"evaluation.target_loss": 3.3, "evaluation.target_bpb": 1.2}, "a loss or in bits per byte"),
        ({"checkpoint.keep": 0}, "`keep` above 0"),
        ({"runtime.threads": -1}, "`threads` of at least 0"),
        ({"seed": -1}, "`seed` in [0, 2**63)"),
        ({"seed": 2**63}, "`seed` as whole number"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(changes, expected):
    with pytest.raises(ConfigError) as caught:
        updated(Config(), changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize("warmup_steps, fraction", [(875, 0.5), (1225, 0.3), (0, 1.0), (1750, 0.0)])
def test_warm_up_and_cooldown_may_fill_the_run(warmup_steps, fraction):
    changes = {"schedule.warmup_steps": warmup_steps, "schedule.cooldown_fraction": fraction}
    assert updated(Config(), changes).schedule.steps == 1750


def test_vocabulary_is_padded_up_to_the_multiple():
    assert ModelConfig(vocab_size=50257).padded_vocab_size == 50304
    assert ModelConfig(vocab_size=4096).padded_vocab_size == 4096


@pytest.mark.parametrize(
    "values, num_layers, tables",
    [
        ("plain", 4, (None,) * 4),
        ("first-layer", 4, (None,) * 4),
        ("per-layer", 4, (0, 1, 2, 3)),
        ("mirrored", 6, (0, 1, 2, 2, 1, 0)),
        ("outer", 12, (0, 1, 2, *(None,) * 6, 0, 1, 2)),
        ("outer", 4, (0, None, None, 0)),
        ("outer", 3, (None, None, None)),
    ],
)
def test_value_tables_follow_from_the_pattern_and_the_depth(values, num_layers, tables):
    assert ModelConfig(values=values, num_layers=num_layers).value_table_of_layer == tables


def test_a_layer_without_attention_has_no_value_table_of_its_own():
    config = ModelConfig(num_layers=4, values="per-layer", drop_attention=True)
    assert config.attention_free_layers == (2,)
    assert config.value_table_of_layer == (0, 1, None, 2)


@pytest.mark.parametrize("num_layers, layer", [(12, 7), (4, 2), (16, 9)])
def test_the_layer_without_attention_follows_from_the_depth(num_layers, layer):
    assert ModelConfig(num_layers=num_layers).attention_free_layers == ()
    assert ModelConfig(num_layers=num_layers, drop_attention=True).attention_free_layers == (layer,)
