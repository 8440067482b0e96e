"""What the trials work on: small texts, prepared data, two trained runs, a race and an export, made once."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

from campaign.commands import Limits, run

WORDS = "time people government state law peace war labor trade naïve café 日本 Grüße Congress power"
VOCABULARY = "300"
PICO = [
    *("--size", "pico", "--vocab-size", VOCABULARY, "--precision", "float32", "--device", "cpu"),
    *("--compile", "off", "--threads", "1", "--evaluation.tokens", "1024", "--evaluation.every-steps", "4"),
]
PREPARE = ["data", "prepare", "texts", "--vocab", VOCABULARY, "--out", "data", "--workers", "1"]
RUN_STEPS = 4
RACE = ["race", "softcap", "softcap:optim.muon.lr=0.03", "--seeds", "2", "--name", "race", *PICO]


def train_words(name: str, steps: int, *more: str) -> list[str]:
    saves = ["--checkpoint.every-steps", "2", "--checkpoint.keep", "2"]
    return [
        "train",
        "softcap",
        "--name",
        name,
        "--steps",
        str(steps),
        "--data.source",
        "data",
        *PICO,
        *saves,
        *more,
    ]


def documents(count: int, words: int, seed: int = 0) -> list[str]:
    chance, known = random.Random(seed), WORDS.split()
    endings = ["", "s", "ing", ".", ","]
    return [
        " ".join(chance.choice(known) + chance.choice(endings) for _ in range(words)) for _ in range(count)
    ]


def make_stage(stage: Path) -> Path:
    """Make the stage, unless an earlier session has made it."""
    if stage.exists():
        return stage
    work, scratch = stage.with_name(stage.name + ".unfinished"), stage.parent
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_texts(work)
    succeed(PREPARE, work, scratch)
    bare = work / "bare"
    bare.mkdir()
    for shard in (work / "data").glob("*.bin"):
        shutil.copy(shard, bare)
    succeed(train_words("lap", RUN_STEPS), work, scratch)
    succeed(train_words("other", RUN_STEPS, "--seed", "1"), work, scratch)
    succeed([*RACE, "--steps", "3", "--data.source", "data"], work, scratch)
    succeed(["export", "runs/lap", "exported"], work, scratch)
    succeed(["export", "runs/other", "exported-other"], work, scratch)
    work.rename(stage)
    return stage


def write_texts(work: Path) -> None:
    (work / "texts").mkdir()
    for number, text in enumerate(documents(40, 400)):
        (work / "texts" / f"{number:03}.txt").write_text(text, encoding="utf-8")
    inputs = work / "inputs"
    inputs.mkdir()
    texts = documents(30, 40, seed=1)
    text = "\n\n".join(texts).encode()
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    contents = {
        "text.txt": text,
        "page.md": text,
        "lines.jsonl": lines,
        "text.txt.gz": gzip.compress(text, mtime=0),
    }
    contents |= {"text.txt.zst": zstandard.compress(text), "lines.jsonl.gz": gzip.compress(lines, mtime=0)}
    contents |= {"lines.jsonl.zst": zstandard.compress(lines)}
    contents |= other_formats(texts)
    for name, content in contents.items():
        (inputs / name).write_bytes(content)
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, inputs / "table.parquet", row_group_size=7)


def other_formats(texts: list[str]) -> dict[str, bytes]:
    """Formats with a structure of their own: a page, a table, archives, a document."""
    page = "".join(f"<h1>{text[:20]}</h1><p>{text}</p>" for text in texts)
    table = "id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    paragraphs = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in texts)
    document = f'<w:document xmlns:w="{word}"><w:body>{paragraphs}</w:body></w:document>'
    members = {f"{i:02}.txt": text.encode() for i, text in enumerate(texts)}
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return {
        "page.html": f'<html><head><meta charset="utf-8"></head><body>{page}</body></html>'.encode(),
        "table.csv": table.encode(),
        "texts.zip": zip_of(members),
        "texts.tar.gz": gzip.compress(tar.getvalue(), mtime=0),
        "text.docx": zip_of({"word/document.xml": document.encode()}),
    }


def zip_of(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def succeed(words: Sequence[str], place: Path, scratch: Path) -> str:
    ended = run(words, place, scratch, Limits(cpu_seconds=600, wait_seconds=1800, extra_mib=None))
    if ended.code:
        raise RuntimeError(f"hotlap {' '.join(words)}: exit code {ended.code}\n{ended.out}{ended.err}")
    return ended.out
