"""From a trained model to text: a windowed cache of keys and values, the choice of tokens, the text.

`decode.py` reads tokens one at a time and returns the logits of a pass over the whole text; `generate.py`
samples tokens with it, and the room `serve` for many requests. Nothing here touches the global random
state.
"""
