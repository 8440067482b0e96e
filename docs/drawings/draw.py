"""Draws the figures of "How it works": `python docs/drawings/draw.py` writes the SVG files beside it.

The mask is computed by the package, and so is which layers of `softcap` have what. Colors follow the reader's
preference for light or dark; nothing is loaded from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hotlap.attention.mask import Mask, block_lists, first_visible_keys
from hotlap.recipes import resolve

HERE = Path(__file__).parent
STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 11.5px } .middle { text-anchor: middle } .end { text-anchor: end }
  .line { stroke: #6e7781; fill: none } .faint { stroke: #d0d7de; fill: none }
  .box { fill: #eaeef2; stroke: #6e7781 }
  .a { fill: #5b8def } .b { fill: #e0833a } .c { fill: #4fa36c } .pale { fill: #b9d0fa }
  .a-line { stroke: #3f76e0; fill: none } .b-line { stroke: #d0732c; fill: none }
  .on { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .line { stroke: #9aa4ae } .faint { stroke: #3d444d } .box { fill: #2a3038; stroke: #9aa4ae }
    .a { fill: #4a7fe0 } .b { fill: #c9712d } .c { fill: #3f8f5c } .pale { fill: #2f4d85 }
    .a-line { stroke: #7aa2f7 } .b-line { stroke: #e8965a }
  }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
  <path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>
"""


class Drawing:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
            f"<title>{title}</title>\n{STYLE}"
        ]

    def rect(self, x: float, y: float, width: float, height: float, kind: str, corner: float = 0) -> None:
        round_ = f' rx="{corner:g}"' if corner else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{round_} class="{kind}"/>\n'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>\n')

    def path(self, steps: str, kind: str = "line", *, arrow: bool = False) -> None:
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path d="{steps}" class="{kind}"{tip} stroke-width="1.5"/>\n')

    def content(self) -> str:
        return "".join([*self.parts, "</svg>\n"])


def mask() -> str:
    """Queries down, keys to the right: three documents, a window of three blocks of four tokens."""
    lengths, block, cell, left, top = (11, 14, 7), 4, 11, 110, 60
    documents = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
    made = Mask(documents, torch.tensor(3, dtype=torch.int32), "blocks", block)
    tokens, first, lists = len(documents), first_visible_keys(made), block_lists(made)
    side = tokens * cell
    drawing = Drawing(640, top + side + 40, "Which key a query sees")
    full = {
        (row, column)
        for row in range(tokens // block)
        for column in lists.full_indices[row, : int(lists.full_counts[row])].tolist()
    }
    for row, column in sorted(full):
        place = left + column * block * cell, top + row * block * cell
        drawing.rect(*place, block * cell, block * cell, "a")
    for query in range(tokens):
        for key in range(int(first[query]), query + 1):
            if (query // block, key // block) not in full:
                drawing.rect(left + key * cell, top + query * cell, cell, cell, "pale")
    for line in range(0, tokens + 1, block):
        at = line * cell
        drawing.path(f"M{left + at} {top}V{top + side}M{left} {top + at}H{left + side}", "faint")
    start = 0
    for number, length in enumerate(lengths):
        x, y, size = left + start * cell, top + start * cell, length * cell
        drawing.path(f"M{x} {top - 8}v-6h{size}v6M{left - 8} {y}h-6v{size}h6")
        drawing.text(x + size / 2, top - 20, f"document {number + 1}", "middle")
        drawing.text(left - 20, y + size / 2 + 4, f"document {number + 1}", "end small")
        start += length
    drawing.text(left + side / 2, top + side + 24, "keys: what is looked at", "middle small")
    legend = left + side + 24
    drawing.rect(legend, top + 8, 14, 14, "a")
    drawing.text(legend + 20, top + 20, "full block:", "small")
    drawing.text(legend + 20, top + 36, "no mask applied", "small")
    drawing.rect(legend, top + 60, 14, 14, "pale")
    drawing.text(legend + 20, top + 72, "partial block:", "small")
    drawing.text(legend + 20, top + 88, "mask applied", "small")
    drawing.path(f"M{legend} {top + 112}h14v14h-14z", "faint")
    drawing.text(legend + 20, top + 124, "never visited", "small")
    return drawing.content()


def unet() -> str:
    """`softcap` at `small`: the encoder half goes down on the left, the decoder half up on the right."""
    config = resolve("softcap", "small").model
    layers, half = config.num_layers, config.num_layers // 2
    row, left, right, top, width, height = 46, 170, 390, 70, 130, 32
    bottom = top + (half - 1) * row
    drawing = Drawing(640, bottom + 110, "The blocks of softcap as a U-Net")
    for layer in range(layers):
        encodes = layer < half
        x = left if encodes else right
        y = top + layer * row if encodes else bottom - (layer - half) * row
        drawing.rect(x, y, width, height, "box", 5)
        has_attention = layer not in config.attention_free_layers
        drawing.text(x + width / 2, y + 14, f"block {layer}", "middle")
        drawing.text(x + width / 2, y + 27, "attention, MLP" if has_attention else "MLP only", "middle small")
        if config.value_table_of_layer[layer] is not None:
            side = x - 46 if encodes else x + width + 14
            drawing.rect(side, y + 5, 32, 22, "b", 4)
            drawing.text(side + 16, y + 20, f"V{config.value_table_of_layer[layer]}", "middle on")
            drawing.path(
                f"M{side + 32 if encodes else side} {y + 16}H{x if encodes else x + width}", "b-line"
            )
        if encodes:
            if layer:
                drawing.path(f"M{x + width / 2} {y - row + height}V{y - 2}", arrow=True)
            drawing.path(f"M{left + width} {y + 16}H{right - 3}", "a-line", arrow=True)
        elif layer > half:
            drawing.path(f"M{x + width / 2} {y + row}V{y + height + 2}", arrow=True)
    middle = bottom + height + 24
    drawing.path(
        f"M{left + width / 2} {bottom + height}V{middle}H{right + width / 2}V{bottom + height + 2}",
        arrow=True,
    )
    drawing.text(left + width / 2, top - 44, "embedding, norm = x0", "middle")
    drawing.path(f"M{left + width / 2} {top - 36}V{top - 2}", arrow=True)
    drawing.path(f"M{right + width / 2} {top}V{top - 34}", arrow=True)
    drawing.text(right + width / 2, top - 44, "norm, head, loss", "middle")
    drawing.text(left + width + 45, top - 8, "skip", "middle small")
    drawing.text(320, middle + 22, "x0 is mixed into the stream again at every block", "middle small")
    drawing.text(320, middle + 40, "V: a table of value embeddings, looked up by token", "middle small")
    return drawing.content()


def muon() -> str:
    """Four chunks on one rank: what it computes, and what the network does meanwhile."""
    compute, apply, gather, unit, left = 1.0, 0.35, 1.15, 92, 100
    lanes = {"compute": 62, "network": 120}
    drawing = Drawing(700, 190, "Muon's exchange: each gather runs while the next chunk is computed")
    done: list[float] = []  # when the gather of a chunk ends
    now, network_free = 0.0, 0.0

    def bar(lane: str, start: float, end: float, text: str, kind: str) -> None:
        drawing.rect(left + start * unit, lanes[lane], (end - start) * unit - 2, 34, kind, 4)
        drawing.text(left + (start + end) / 2 * unit - 1, lanes[lane] + 22, text, "middle small on")

    chunks = 4
    for chunk in range(chunks + 1):
        if chunk < chunks:
            bar("compute", now, now + compute, f"compute {chunk}", "a")
            now += compute
            begins = max(now, network_free)
            network_free = begins + gather
            done.append(network_free)
            bar("network", begins, network_free, f"all-gather {chunk}", "b")
            x = left + now * unit
            drawing.path(f"M{x - 1} {lanes['compute'] + 34}V{lanes['network'] - 2}", arrow=True)
        if chunk:
            now = max(now, done[chunk - 1])
            bar("compute", now, now + apply, f"{chunk - 1}", "c")
            now += apply
    drawing.text(left - 12, lanes["compute"] + 22, "this rank", "end")
    drawing.text(left - 12, lanes["network"] + 22, "network", "end")
    drawing.rect(left, 20, 12, 12, "c")
    drawing.text(left + 18, 31, "apply the updates of a chunk, from all ranks", "small")
    drawing.path(f"M{left} 174H{left + 560}", "faint", arrow=True)
    drawing.text(left + 572, 178, "time", "small")
    return drawing.content()


DRAWINGS = {"mask.svg": mask, "unet.svg": unet, "muon.svg": muon}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
