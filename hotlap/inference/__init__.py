"""From a trained model to text: a windowed cache of keys and values, the choice of tokens, the text.

`decoder.py` reads tokens one at a time and gives the logits that a pass over all of them (`visibility.py`)
would give; `generate.py` draws tokens with it. Nothing here touches the global random state.
"""
