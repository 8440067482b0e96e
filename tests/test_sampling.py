"""Reading with a cache against reading everything at once; choosing tokens against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.attention import plan_batch
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import NO_TOKEN, Mask, document_ids
from hotlap.attention.visibility import Visibility
from hotlap.config import Config
from hotlap.corpus.tokenizer import train_tokenizer
from hotlap.errors import CheckpointError, ConfigError
from hotlap.inference.choose import choose
from hotlap.inference.decode import Decoder, prompt_plan, uncached_logits
from hotlap.inference.generate import TextStream, encode_prompt, generate, sample_text, samples
from hotlap.inference.options import SampleOptions
from hotlap.model import build_model
from hotlap.model.rotary import Rotary
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.masking import Masking

END = 0
VOCABULARY = 100  # not a multiple of 128: the head has rows that stand for no token


def tiny(recipe: str, **changes) -> Config:
    small = {
        "model.width": 32,
        "model.vocab_size": VOCABULARY,
        "batch.sequence_tokens": 384,
        "batch.tokens_per_step": 384,
        "data.chunk_tokens": 384,
        **changes,
    }
    return updated(resolve(recipe, "pico"), small)


def randomised(config: Config, dtype=torch.float32, scale=0.15):
    """A model in which nothing is zero: as built, attention would write nothing."""
    torch.manual_seed(0)
    model = build_model(config.model, config.batch.sequence_tokens, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return model


def text_of(count: int, *, ends: tuple[int, ...] = (), seed: int = 1) -> torch.Tensor:
    tokens = torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    tokens[[0, *ends]] = END
    return tokens


def cached_logits(model, visibility, tokens, prompt_tokens: int) -> torch.Tensor:
    decoder = Decoder(model, visibility)
    rows = [decoder.start(tokens[:prompt_tokens])]
    rows += [decoder.step(token[None]) for token in tokens[prompt_tokens:]]
    return torch.cat(rows)


WINDOWED = [
    ("flex-attention", {"schedule.window_start_tokens": 192, "schedule.window_end_tokens": 192}),
    ("flex-attention", {"model.num_kv_heads": 1, "schedule.window_start_tokens": 64}),
    ("unet-value-embeds", {}),
    ("unet-value-embeds", {"schedule.window_start_tokens": 192, "schedule.window_end_tokens": 192}),
    ("softcap", {}),
    ("softcap", {"schedule.window_end_tokens": 128}),
    ("softcap", {"model.bigram_rows": 512}),
]


@pytest.mark.parametrize("recipe, changes", WINDOWED)
@pytest.mark.parametrize(
    "prompt_tokens, dtype, tolerance", [(1, torch.float64, 1e-9), (300, torch.float32, 1e-5)]
)
def test_cached_logits_equal_uncached_ones_beyond_the_window(
    recipe, changes, prompt_tokens, dtype, tolerance
):
    config = tiny(recipe, **changes)
    model = randomised(config, dtype)
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    tokens = text_of(prompt_tokens + 300)
    assert len(tokens) > visibility.window_tokens + 32
    whole = uncached_logits(model, visibility, tokens)[prompt_tokens - 1 :]
    cached = cached_logits(model, visibility, tokens, prompt_tokens)
    torch.testing.assert_close(cached, whole, rtol=0, atol=tolerance)
    assert whole.std(dim=0).mean() > 0.1  # they do depend on what was read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe, changes", [*WINDOWED[:2], *WINDOWED[4:], ("adamw", {})])
def test_a_row_is_the_same_bits_alone_and_among_others_that_come_and_go(recipe, changes, dtype):
    config = tiny(recipe, **changes)
    model = randomised(config, dtype)
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    lengths = [1, 60, 120, 126, 200, 300]  # of the prompts; some reach the next group of slots
    begins = [0, 2, 2, 5, 9, 0]  # the steps at which rows are started
    together = Decoder(model, visibility, num_samples=len(lengths))
    alone = [Decoder(model, visibility) for _ in lengths]
    tokens = torch.randint(1, VOCABULARY, (20, len(lengths)), generator=torch.Generator().manual_seed(2))
    for step in range(20):
        if step == 12:  # a row ends, and another text takes its place
            together.release(1)
            begins[1], alone[1] = 14, Decoder(model, visibility)
        for row, length in enumerate(lengths):
            if step == begins[row]:
                prompt = text_of(length, seed=step)
                first = together.start(prompt, [row])
                assert torch.equal(first, alone[row].start(prompt))
        used = [row for row, begin in enumerate(begins) if step >= begin]
        given = torch.tensor([tokens[step, row] if row in used else NO_TOKEN for row in range(len(lengths))])
        found = together.step(given)
        for row in used:
            assert torch.equal(found[row], alone[row].step(given[row][None])[0]), (step, row)


def test_uncached_logits_are_those_of_the_plain_mask():
    config = tiny("softcap")
    model = randomised(config)
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    tokens = text_of(384, ends=(50, 200))
    window = torch.tensor(visibility.window_tokens // 128, dtype=torch.int32)
    plan = plan_batch(DenseBackend(), Mask(document_ids(tokens, END), window, "blocks"))
    with torch.no_grad():
        plain = model.logits(model.hidden(tokens, [plan] * config.model.num_layers))
    torch.testing.assert_close(uncached_logits(model, visibility, tokens), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize(
    "recipe, changes",
    [
        ("softcap", {}),
        ("softcap", {"model.bigram_rows": 512}),
        ("unet-value-embeds", {"schedule.window_end_tokens": 64}),
    ],
)
def test_reading_sees_what_training_sees(recipe, changes, document_mask):
    config = tiny(recipe, **{"attention.document_mask": document_mask, **changes})
    model = randomised(config)
    tokens = text_of(200, ends=(30, 90))
    masking = Masking(config, DenseBackend(), END, torch.device("cpu"))
    masking.set_step(config.schedule.steps)
    with torch.no_grad():
        in_training = model.logits(model.hidden(tokens, masking.plans(tokens, None)))
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    torch.testing.assert_close(uncached_logits(model, visibility, tokens), in_training, rtol=0, atol=1e-5)
    cached = cached_logits(model, visibility, tokens, 60)
    torch.testing.assert_close(cached, in_training[59:], rtol=0, atol=1e-5)


def test_gpt2_cached_logits_equal_uncached_ones_up_to_its_context():
    config = tiny("adamw")
    model = randomised(config)
    visibility = Visibility.at_step(config, 0, END)
    tokens = text_of(config.batch.sequence_tokens, ends=(100,))
    with torch.no_grad():
        whole = model.logits(model.hidden(tokens))
    for prompt_tokens in (1, 80):
        cached = cached_logits(model, visibility, tokens, prompt_tokens)
        torch.testing.assert_close(cached, whole[prompt_tokens - 1 :], rtol=0, atol=1e-5)


def test_gpt2_goes_on_with_half_of_a_full_context():
    config = tiny("adamw", **{"batch.sequence_tokens": 128, "data.chunk_tokens": 128})
    model = randomised(config)
    decoder = Decoder(model, Visibility.at_step(config, 0, END), num_samples=2)
    texts = torch.stack([text_of(300, seed=1), text_of(300, seed=2)])
    texts[1, :100] = texts[0, :100]
    decoder.start(texts[0, :100])
    seen = 100
    for count in range(101, 301):
        logits = decoder.step(texts[:, count - 1])
        seen = seen + 1 if seen < 128 else 65
        for row in range(2):
            with torch.no_grad():
                plain = model.logits(model.hidden(texts[row, count - seen : count]))[-1]
            torch.testing.assert_close(logits[row], plain, rtol=0, atol=1e-5)


def test_gpt2_reads_the_last_half_context_of_a_longer_prompt():
    config = tiny("adamw", **{"batch.sequence_tokens": 128, "data.chunk_tokens": 128})
    model = randomised(config)
    tokens = text_of(129)
    logits = Decoder(model, Visibility.at_step(config, 0, END)).start(tokens)
    with torch.no_grad():
        torch.testing.assert_close(logits, model.logits(model.hidden(tokens[-64:]))[-1:])


@pytest.mark.parametrize("changes", [{}, {"model.bigram_rows": 512}])
def test_a_document_that_ends_while_reading_is_forgotten(changes):
    config = tiny("softcap", **changes)
    model = randomised(config)
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    tokens = text_of(200, ends=(30, 90))
    whole = uncached_logits(model, visibility, tokens)[59:]
    torch.testing.assert_close(cached_logits(model, visibility, tokens, 60), whole, rtol=0, atol=1e-5)


def test_reading_goes_beyond_the_precomputed_positions():
    config = tiny("softcap", **{"batch.sequence_tokens": 128, "data.chunk_tokens": 128})

    model = randomised(config)
    long_model = build_model(config.model, 1024)
    long_model.load_state_dict(model.state_dict())
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    tokens = text_of(700)
    plans = [prompt_plan(visibility, tokens)] * config.model.num_layers
    with torch.no_grad():
        whole = long_model.logits(long_model.hidden(tokens, plans))  # by its table
    torch.testing.assert_close(cached_logits(model, visibility, tokens, 400), whole[399:], rtol=0, atol=1e-5)


def test_angles_are_position_times_frequency_within_the_table_and_beyond():
    rotary = Rotary(head_dim=8, kind="full", base=10000.0, max_tokens=16)
    found = rotary.at(torch.tensor([3, 5000, 0]), torch.float32)
    for row, position in enumerate([3, 5000, 0]):
        angles = [position * 10000.0 ** -(pair / 4) for pair in range(4)]
        torch.testing.assert_close(found.cos[row, 0], torch.tensor(angles).cos(), rtol=0, atol=1e-3)
        torch.testing.assert_close(found.sin[row, 0], torch.tensor(angles).sin(), rtol=0, atol=1e-3)
    assert torch.equal(rotary(16, torch.float32).cos[3], found.cos[0])


def test_the_cache_holds_the_window_and_no_more():
    config = tiny("softcap")
    model = randomised(config)
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    decoder = Decoder(model, visibility, num_samples=3)
    decoder.start(text_of(1000))
    for token in text_of(300):
        decoder.step(token.expand(3))
    keys_and_values_bytes = 2 * 4 * config.model.width
    assert (
        decoder.cache_bytes == keys_and_values_bytes * 3 * config.model.num_layers * visibility.window_tokens
    )


@pytest.mark.parametrize("step, window", [(0, 128), (50, 128), (100, 256)])
def test_the_window_is_that_of_the_step(step, window):
    assert Visibility.at_step(tiny("softcap"), step, END).window_tokens == window


def whole_samples(model, visibility, prompt, *, known=VOCABULARY, **options):
    asked = SampleOptions(**{"max_tokens": 60, **options})
    return samples(generate(model, visibility, prompt, asked, known_tokens=known), asked)


def test_samples_side_by_side_are_those_made_alone_and_differ_from_each_other():
    config = tiny("softcap")
    model = randomised(config, torch.float64)
    visibility = Visibility.at_step(config, config.schedule.steps, END)
    prompt = text_of(40).tolist()
    together = whole_samples(model, visibility, prompt, num_samples=4)
    assert len({tuple(sample.tokens) for sample in together}) == 4
    assert whole_samples(model, visibility, prompt, num_samples=2) == together[:2]
    assert whole_samples(model, visibility, prompt, num_samples=1) == together[:1]
    assert whole_samples(model, visibility, prompt, num_samples=4) == together
    assert whole_samples(model, visibility, prompt, num_samples=1, seed=1) != together[:1]


def test_greedy_takes_the_likeliest_each_time():
    config = tiny("unet-value-embeds")
    model = randomised(config, torch.float64)
    visibility = Visibility.at_step(config, 50, END)
    (sample,) = whole_samples(model, visibility, [END], max_tokens=150, temperature=0)
    tokens = torch.tensor([END, *sample.tokens])
    likeliest = uncached_logits(model, visibility, tokens).argmax(-1)
    assert likeliest[:-1].tolist() == sample.tokens
    if sample.ended:
        assert likeliest[-1] == END


def test_a_sample_stops_at_the_end_of_text():
    config = tiny("softcap")
    model = randomised(config)
    with torch.no_grad():
        model.head.weight.zero_()  # every token is as likely as any other
    visibility = Visibility.at_step(config, 0, END)
    made = whole_samples(model, visibility, [END], max_tokens=100, num_samples=8, temperature=1)
    assert any(sample.ended for sample in made)
    for sample in made:
        assert END not in sample.tokens
        assert sample.ended == (len(sample.tokens) < 100)


def test_ids_that_stand_for_no_token_are_never_drawn():
    config = tiny("softcap")
    model = randomised(config)
    with torch.no_grad():
        model.head.weight.zero_()
    visibility = Visibility.at_step(config, 0, END)
    drawn = [
        t
        for s in whole_samples(model, visibility, [END], num_samples=20, known=10, temperature=1)
        for t in s.tokens
    ]
    assert set(drawn) == set(range(1, 10))
    drawn = [
        t for s in whole_samples(model, visibility, [END], num_samples=60, temperature=1) for t in s.tokens
    ]
    assert set(drawn) == set(range(1, VOCABULARY))
    assert config.model.padded_vocab_size > VOCABULARY


def plainly_chosen(logits: list[float], options: SampleOptions, uniform: float) -> int:
    """The definition of a draw, one token after the other."""
    tokens = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if options.temperature == 0:
        return tokens[0]
    weights = {t: math.exp((logits[t] - max(logits)) / options.temperature) for t in tokens}
    tokens = tokens[: options.top_k]
    if options.top_p is not None:
        total, kept, mass = sum(weights[t] for t in tokens), [], 0.0
        for token in tokens:
            if mass / total >= options.top_p:
                break
            kept.append(token)
            mass += weights[token]
        tokens = kept
    total, mass = sum(weights[t] for t in tokens), 0.0
    for token in tokens:
        mass += weights[token]
        if mass / total > uniform:
            return token
    return tokens[-1]


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, 2.5]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    # Of no round probabilities, so that rounding decides nothing.
    top_p=st.sampled_from([None, 1e-9, 0.3137, 0.9123, 1.0]),
    uniform=st.floats(0, 0.999),
)
def test_choosing_follows_its_definition(logits, temperature, top_k, top_p, uniform):
    options = SampleOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    found = choose(torch.tensor([logits]), options, torch.tensor([uniform], dtype=torch.float64))
    expected = plainly_chosen(logits, options, uniform)
    if found.item() != expected:  # only where the draw lies within rounding of a border
        near = {plainly_chosen(logits, options, min(0.9999, max(0.0, uniform + d))) for d in (-1e-9, 1e-9)}
        assert found.item() in near


def test_draws_have_the_probabilities_of_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 3.0])
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = choose(logits.expand(4000, -1), SampleOptions(temperature=2), uniform)
    shares = tokens.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, (logits / 2).softmax(0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, value, 2.0]])
    with pytest.raises(CheckpointError, match="diverged"):
        choose(logits, SampleOptions(temperature=temperature), torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_a_temperature_near_zero_is_greedy_and_a_draw_of_one_stays_inside():
    logits = torch.tensor([[0.0, 30.0, 29.0]])
    one = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert choose(logits, SampleOptions(temperature=1e-300), one).item() == 1
    assert choose(logits, SampleOptions(temperature=1, top_k=2), one).item() == 2
    assert choose(logits, SampleOptions(temperature=1, top_p=0.5), one).item() == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"seed": -1},
        {"max_tokens": 0},
        {"num_samples": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        SampleOptions(**wrong)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Grüße, 日本語 and words and more words; words again."] * 3, 280)


def test_a_stream_shows_each_character_when_it_is_whole(tokenizer):
    text = "日本 Grüße 🎉!"
    tokens = tokenizer.encode(text).tolist()
    stream = TextStream(tokenizer)
    shown = [stream.add(token) for token in tokens]
    assert "".join(shown) == text
    assert "" in shown  # a token that ends inside a character shows nothing yet
    assert stream.close() == ""
    cut = TextStream(tokenizer)
    assert [cut.add(token) for token in tokenizer.encode("🎉").tolist()[:2]] == ["", ""]
    assert cut.close() == "\ufffd"


@pytest.mark.parametrize("recipe", ["softcap", "adamw"])
@pytest.mark.parametrize("prompt", ["", "words and", "words and more " * 200])
def test_sample_text_is_the_same_each_time_and_leaves_the_random_numbers_alone(recipe, prompt, tokenizer):
    config = tiny(recipe, **{"model.vocab_size": 300})
    model = randomised(config)
    torch.manual_seed(7)
    expected_next = torch.rand(3)
    torch.manual_seed(7)
    first = sample_text(model, config, tokenizer, 3, prompt=prompt, max_tokens=30)
    assert torch.equal(torch.rand(3), expected_next)
    assert first.startswith(prompt)
    assert len(first) > len(prompt)
    assert sample_text(model, config, tokenizer, 3, prompt=prompt, max_tokens=30) == first
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_prompt_is_read_as_the_start_of_a_document(tokenizer):
    assert encode_prompt(tokenizer, "") == [tokenizer.end_of_text]
    assert encode_prompt(tokenizer, "words")[1:] == tokenizer.encode("words").tolist()
