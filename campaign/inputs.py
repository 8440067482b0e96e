"""Damaged inputs: for every file that Hotlap reads, a command that reads it and ways to damage it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from campaign import formats, results
from campaign.commands import Limits, run
from campaign.damage import ON_BYTES, ON_JSON, ON_JSON_LINES, Damage
from campaign.outcomes import Outcome, Verdict, is_refusal, mistake, refusal
from campaign.results import Observe, Result
from campaign.stage import train_words

SEALED: tuple[Damage, ...] = (*ON_BYTES, *ON_JSON, *ON_JSON, formats.sealed_again, formats.sealed_again)
JSON: tuple[Damage, ...] = (*ON_BYTES, *ON_JSON, *ON_JSON)
TENSORS: tuple[Damage, ...] = (
    *ON_BYTES,
    formats.tensors_header,
    formats.tensors_header,
    formats.tensors_not_finite,
)
SHARD: tuple[Damage, ...] = (*ON_BYTES, formats.shard_header, formats.shard_header, formats.shard_tokens)
VALID_AGAIN = ("sealed_again",)
PREPARE = ["data", "prepare", "--vocab", "300", "--val-fraction", "0", "--out", "out"]
FREE = ("page.html", "table.csv", "texts.zip", "texts.tar.gz", "text.docx")
FIXED_CHECKSUM = 0.3  # share of the trials in which the manifest beside a file is made to fit the damage


@dataclass
class DamagedInput:
    """One file of the stage, damaged, and the command that reads it."""

    stage: Path
    root: Path
    name: str
    file: str  # in the stage
    words: Sequence[str]
    observe: Observe
    damages: tuple[Damage, ...]
    trials: int
    needs: Sequence[str]  # what is copied from the stage
    writes: Sequence[str] = ()  # removed after each trial; what is needed as well is copied again
    others: Sequence[str] = ()  # files that it is swapped with
    plain: Callable[[Path], Result | None] | None = None  # an independent reading of the damaged file
    in_manifest: bool = False  # a manifest beside it has its checksum
    is_free: bool = False  # a text without a checksum, in a format that nothing else here reads
    part: str = field(default="inputs", init=False)

    @property
    def place(self) -> Path:
        return self.root / self.name.replace(" ", "-").replace("/", "-")

    @functools.cached_property
    def reference(self) -> Result:
        """What the command gives for the undamaged file."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        self._copy(self.needs)
        ended = run(self.words, self.place, self.root, Limits(wait_seconds=1800))
        if ended.code:
            raise RuntimeError(f"{self.name}: {' '.join(self.words)} ends with {ended.code}\n{ended.err}")
        found = self.observe(self.place, ended)
        self._clean()
        return found

    def run(self, _number: int, chance: Random) -> Verdict:
        expected = self.reference
        path = self.place / self.file
        original = path.read_bytes()
        kind, content = self._damaged(original, chance)
        manifest = path.with_name("manifest.json")
        sealed = manifest.read_bytes() if self.in_manifest else b""
        try:
            path.write_bytes(content)
            fixed = self.in_manifest and chance.random() < FIXED_CHECKSUM
            if fixed:
                formats.sha256_in_manifest(path.parent, path.name)
            is_valid = fixed or self.is_free or kind in VALID_AGAIN
            return self._judge(kind + (", checksum made to fit" if fixed else ""), expected, is_valid)
        finally:
            path.write_bytes(original)
            if self.in_manifest:
                manifest.write_bytes(sealed)
            self._clean()

    def _damaged(self, original: bytes, chance: Random) -> tuple[str, bytes]:
        for _ in range(10):
            if self.others and chance.random() < 0.08:
                other = chance.choice(self.others)
                kind, content = f"swapped with {other}", (self.stage / other).read_bytes()
            else:
                damage = chance.choice(self.damages)
                kind, content = damage.__name__, damage(original, chance)
            if content != original:
                break
        return kind, content

    def _judge(self, kind: str, expected: Result, is_valid: bool) -> Verdict:
        ended = run(self.words, self.place, self.root)
        if (found := mistake(ended)) is not None:
            return Verdict(found[0], kind, found[1])
        if is_refusal(ended):
            left = [name for name in self.writes if name not in self.needs and (self.place / name).exists()]
            if left:
                return Verdict(Outcome.LOST, kind, f"refused, but {left[0]} was left behind")
            return Verdict(Outcome.REFUSED, kind, refusal(ended))
        result = self.observe(self.place, ended)
        if self.plain is not None:
            plain = self.plain(self.place / self.file)
            same = plain is not None and plain == result
            return Verdict(
                Outcome.AS_WRITTEN if same else Outcome.WRONG,
                kind,
                "" if same else results.difference(plain or {}, result),
            )
        if result == expected:
            return Verdict(Outcome.HARMLESS, kind)
        detail = results.difference(expected, result)
        if is_valid:
            return Verdict(Outcome.AS_WRITTEN, kind, detail)
        noted = result.get("notes") != expected.get("notes")
        return Verdict(Outcome.NOTED if noted else Outcome.WRONG, kind, detail)

    def _copy(self, names: Sequence[str]) -> None:
        for name in names:
            source, target = self.stage / name, self.place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy2(source, target)

    def _clean(self) -> None:
        for name in self.writes:
            path = self.place / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._copy([name for name in self.needs if name in self.writes])


def damaged_inputs(stage: Path, root: Path) -> list[DamagedInput]:
    newest = f"runs/lap/checkpoints/{sorted((stage / 'runs/lap/checkpoints').iterdir())[-1].name}"
    train = sorted(path.name for path in (stage / "data").glob("*train*.bin"))[0]
    val = sorted(path.name for path in (stage / "data").glob("*val*.bin"))[0]
    make = functools.partial(DamagedInput, stage, root)
    sample = ["sample", "runs/lap", "--temperature", "0", "--tokens", "12"]
    export_sample = ["sample", "exported", "--temperature", "0", "--tokens", "12"]
    report = ["report", "runs/lap", "--json", "--out", "page.html"]
    race_report = ["report", "runs/race", "--json", "--out", "page.html"]
    race_run = sorted(path.parent.name for path in (stage / "runs/race").glob("*/summary.json"))[0]
    resume = train_words("lap", 6, "--resume", "--allow-change")
    subjects = []

    def add(names: str, words: list[str], observe: Observe, trials: int, **more: object) -> None:
        """One subject per `file: damages` of `names`; see the table below."""
        for line in names.strip().splitlines():
            file, kind, share = line.split()
            damages = {
                "sealed": SEALED,
                "json": JSON,
                "lines": (*ON_BYTES, *ON_JSON_LINES),
                "tensors": TENSORS,
            }
            damages |= {"shard": SHARD, "bytes": ON_BYTES}
            others = [other for other in swaps(file) if (stage / other).is_file()]
            subjects.append(
                make(
                    f"{words[0]} {file}",
                    file,
                    words,
                    observe,
                    damages[kind],
                    round(trials * float(share)),
                    others=others,
                    **more,  # type: ignore[arg-type]
                )
            )

    def swaps(file: str) -> list[str]:
        other_run, other_export = (
            file.replace("runs/lap", "runs/other"),
            file.replace("exported/", "exported-other/"),
        )
        sisters = [
            str(path.relative_to(stage))
            for path in (stage / file).parent.iterdir()
            if path.suffix == Path(file).suffix
        ]
        return [name for name in {other_run, other_export, *sisters} if name != file]

    shards = f"data/{train} shard .6\ndata/{val} shard .4"
    add(
        shards, ["data", "inspect", "data", "--json"], results.printed, 1000, needs=["data"], in_manifest=True
    )
    add(
        "data/manifest.json sealed .7\ndata/tokenizer.json json .3",
        ["data", "inspect", "data", "--json"], results.printed, 1200, needs=["data"],
    )  # fmt: skip
    add(
        f"bare/{train} shard 1", ["data", "inspect", "bare", "--json"], results.inspected, 400,
        needs=["bare"], plain=results.plain_shards,
    )  # fmt: skip
    add(
        f"{newest}/model.safetensors tensors .5\n{newest}/state.json json .5",
        sample, results.printed, 1000, needs=["runs/lap"], in_manifest=True,
    )  # fmt: skip
    add(
        f"{newest}/manifest.json sealed .3\nruns/lap/environment.json json .2\n"
        "runs/lap/tokenizer.json json .3\nruns/lap/config.json json .2",
        sample, results.printed, 1800, needs=["runs/lap"],
    )  # fmt: skip
    add(
        "exported/config.json sealed .4\nexported/model.safetensors tensors .3\n"
        "exported/tokenizer.json json .3",
        export_sample, results.printed, 1400, needs=["exported"],
    )  # fmt: skip
    add(
        "runs/lap/metrics.jsonl lines .4\nruns/lap/config.json json .2\nruns/lap/environment.json json .2\n"
        "runs/lap/summary.json sealed .2",
        report, results.page("page.html"), 1500, needs=["runs/lap"], writes=["page.html"],
    )  # fmt: skip
    add(
        f"runs/race/race.json sealed .6\nruns/race/{race_run}/summary.json sealed .2\n"
        f"runs/race/{race_run}/metrics.jsonl lines .2",
        race_report, results.page("page.html"), 600, needs=["runs/race"], writes=["page.html"],
    )  # fmt: skip
    add(
        f"runs/race/race.json sealed .7\nruns/race/{race_run}/summary.json sealed .3",
        ["race", "--resume", "runs/race"], results.race("runs/race"), 150,
        needs=["runs/race", "data"], writes=["runs/race"],
    )  # fmt: skip
    add(
        f"{newest}/optimizer.safetensors tensors .25\n{newest}/random.safetensors tensors .25\n"
        f"{newest}/state.json json .5",
        resume, results.training("runs/lap"), 240,
        needs=["runs/lap", "data"], writes=["runs/lap"], in_manifest=True,
    )  # fmt: skip
    add(
        f"{newest}/manifest.json sealed .2\nruns/lap/config.json json .2\nruns/lap/environment.json json .2\n"
        "runs/lap/metrics.jsonl lines .2\nruns/lap/summary.json sealed .1\n"
        f"data/{train} shard .05\ndata/manifest.json sealed .05",
        resume, results.training("runs/lap"), 300, needs=["runs/lap", "data"], writes=["runs/lap", "data"],
    )  # fmt: skip
    return subjects + text_inputs(stage, root)


def text_inputs(stage: Path, root: Path) -> list[DamagedInput]:
    kinds: dict[str, tuple[tuple[Damage, ...], int]] = {
        "text.txt": (ON_BYTES, 120),
        "page.md": (ON_BYTES, 60),
        "lines.jsonl": ((*ON_BYTES, *ON_JSON_LINES, *ON_JSON_LINES), 400),
        "text.txt.gz": ((*ON_BYTES, *formats.inside("txt", formats.gzip_of), formats.gzip_bomb), 250),
        "text.txt.zst": ((*ON_BYTES, *formats.inside("txt", formats.zstd_of)), 250),
        "lines.jsonl.gz": ((*ON_BYTES, *formats.inside("jsonl", formats.gzip_of)), 100),
        "lines.jsonl.zst": ((*ON_BYTES, *formats.inside("jsonl", formats.zstd_of)), 100),
        "page.html": (ON_BYTES, 100),
        "table.csv": (ON_BYTES, 100),
        "texts.zip": (ON_BYTES, 150),
        "texts.tar.gz": ((*ON_BYTES, *formats.inside("tar", formats.gzip_of)), 150),
        "text.docx": ((*ON_BYTES, formats.zip_member, formats.zip_member), 150),
        "table.parquet": ((*ON_BYTES, *ON_BYTES, formats.parquet_table, formats.parquet_table), 500),
    }

    def plain(path: Path) -> Result | None:
        texts = results.plainly_read(path)
        return None if texts is None else {"documents": texts}

    return [
        DamagedInput(
            stage,
            root,
            f"prepare {name}",
            f"inputs/{name}",
            [*PREPARE, f"inputs/{name}", *(() if name in FREE else ("--encoding", "utf-8"))],
            results.prepared,
            damages,
            trials,
            needs=[f"inputs/{name}"],
            writes=["out"],
            plain=None if name in FREE else plain,
            is_free=name in FREE,
        )
        for name, (damages, trials) in kinds.items()
    ]
