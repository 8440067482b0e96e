"""`python -m hotlap.harness`: the command `lm_eval`, with the model `hotlap`.

Versions of the harness that look for entry points find the model by themselves (pyproject.toml names it);
for the others it is registered here.
"""

from __future__ import annotations

import sys

from hotlap.errors import USER_MISTAKE, HotlapError


def main() -> None:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if model_registry.get("hotlap", None) is None:
        model_registry.register("hotlap", target="hotlap.harness.backend:HotlapLM")
    try:
        cli_evaluate()
    except HotlapError as mistake:
        print(f"hotlap: {mistake}", file=sys.stderr)  # noqa: T201
        sys.exit(USER_MISTAKE)


main()
