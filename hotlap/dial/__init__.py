"""From minutes and a text to a configuration: `hotlap train --minutes 5`.

`measure.py` times steps on this machine; `choose.py` looks up what measured laps of that much compute on that
much text have shown to be best, in `laps.json`, which `python -m bench dial --write` writes.
"""
