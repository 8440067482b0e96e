import torch

from hotlap.recipes import resolve
from hotlap.settings import updated
from tests.tiny import END_OF_TEXT, make_masking


def first_keys(config, chunk_tokens=None) -> list[int]:
    """The first key that each of 256 tokens sees; a document starts at token 100."""
    tokens = torch.full((256,), END_OF_TEXT + 1, dtype=torch.int32)
    tokens[100] = END_OF_TEXT
    (plan, *_) = make_masking(config, step=config.schedule.steps).plans(tokens, chunk_tokens)
    return plan.layout.first_key.tolist()


def test_tokens_see_their_own_document_only():
    assert first_keys(resolve("softcap", "pico"))[99:102] == [0, 100, 100]


def test_without_a_document_mask_only_chunks_part_the_tokens():
    config = updated(resolve("softcap", "pico"), {"attention.document_mask": False})
    assert set(first_keys(config)) == {0}
    assert first_keys(config, chunk_tokens=128)[127:129] == [0, 128]


def test_the_window_moves_only_when_the_schedule_does():
    config = resolve("softcap", "pico")
    masking = make_masking(config)
    window = masking._window
    for step in range(config.schedule.steps + 1):
        masking.set_step(step)
    assert masking._window is window
    assert (masking.window_tokens, int(window)) == (256, 2)
