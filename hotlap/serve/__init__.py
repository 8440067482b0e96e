"""`hotlap serve`: an OpenAI-compatible server for trained models, and a page to play with them.

A request's way: `guard.py` (who may ask, how much) → `app.py` → `fields.py` (what is asked) → `engine.py`
(rows of a batch, one thread per model) → `choice.py` (one text while it is written) → `answers.py` (JSON).
"""
