"""The example in docs/optimizers.md runs as printed, and learns."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parent.parent / "docs" / "optimizers.md"


def test_the_example_of_muon_in_a_plain_loop_runs_and_learns():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    setup, loop = example.split("\nfor step", maxsplit=1)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(setup, names)
    before = torch.nn.functional.mse_loss(names["model"](names["inputs"]), names["targets"]).item()
    exec("for step" + loop, names)
    assert names["loss"].item() < before / 2
    trained_by_muon = [name for name, _ in names["matrices"]]
    assert trained_by_muon == ["0.weight", "2.weight"]
    assert len(names["others"]) == 4
