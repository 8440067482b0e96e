"""Hotlap's models in EleutherAI's harness (https://github.com/EleutherAI/lm-evaluation-harness).

`scoring.py` computes log-likelihoods and needs nothing of the harness; `backend.py` is the harness's model,
`tasks.py` evaluates tasks for `hotlap eval --tasks`, and `python -m hotlap.harness` is the harness's own
command with the model `hotlap`.
"""
