"""From a trained model to text: a windowed cache of keys and values, the choice of tokens, the text.

`Decoder` reads tokens one at a time and gives the logits that a pass over all of them would give. `generate`
draws tokens with it, `sample_text` turns them into text. Nothing here touches the global random state.
"""

from hotlap.sampling.choose import Choice
from hotlap.sampling.decoder import Decoder
from hotlap.sampling.generate import Sample, TextStream, encode_prompt, generate, sample_text, samples
from hotlap.sampling.visibility import Visibility, uncached_logits

__all__ = [
    "Choice",
    "Decoder",
    "Sample",
    "TextStream",
    "Visibility",
    "encode_prompt",
    "generate",
    "sample_text",
    "samples",
    "uncached_logits",
]
