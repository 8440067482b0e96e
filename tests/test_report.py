import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import hotlap
from hotlap.cli import dispatch
from hotlap.errors import HotlapError, ReportError
from hotlap.report.analysis import analyze, label_runs, pairing_holds, to_json, waits_of
from hotlap.report.curves import MOST_POINTS, mean_and_range
from hotlap.report.figures import build_figures
from hotlap.report.page import render_page, write_report
from hotlap.report.picture import write_picture
from hotlap.report.samples_section import with_changes
from hotlap.report.stats import median_wait
from hotlap.runs.reader import load_run, load_runs
from tests.command import complaint
from tests.command import hotlap as run_hotlap
from tests.synthetic_runs import append_metrics, end_without_finite_loss, make_race, make_run

CLEAR = {"sparse-value-embeds": [3.30, 3.31, 3.32], "softcap": [3.20, 3.21, 3.19]}


def labelled(path):
    return label_runs(load_runs([path]))


def text_of(page: str) -> str:
    """What a reader sees, without scripts and styles."""
    parts: list[str] = []

    class Reader(HTMLParser):
        skipped = False

        def handle_starttag(self, tag, attrs):  # noqa: ARG002
            self.skipped = tag in ("script", "style")

        def handle_endtag(self, tag):  # noqa: ARG002
            self.skipped = False

        def handle_data(self, data):
            if not self.skipped:
                parts.append(data)

    Reader().feed(page)
    return " ".join(" ".join(parts).split())


def test_runs_that_differ_in_the_seed_only_share_a_label(tmp_path):
    make_race(
        tmp_path,
        {"softcap": [3.3, 3.3], "softcap:lr": [3.2, 3.2], "adamw": [3.5]},
        {"softcap:lr": {"optim.muon.lr": 0.03}},
    )
    groups = labelled(tmp_path)
    assert list(groups) == ["softcap", "softcap:optim.muon.lr=0.03", "adamw"]
    assert [run.config.seed for run in groups["softcap"]] == [0, 1]


def test_labels_stay_apart_however_many_settings_differ(tmp_path):
    same = {"optim.muon.lr": 0.03, "model.softcap": 9.0}
    for name, changes in (
        ("a", {}),
        ("b", {**same, "optim.adam.eps": 1e-7}),
        ("c", {**same, "optim.adam.eps": 1e-6}),
    ):
        make_run(tmp_path / name, changes=changes)
    labels = list(labelled(tmp_path))
    assert len(labels) == len(set(labels)) == 3
    assert "and 1 more" in labels[1]


def test_the_first_label_is_compared_with_and_the_verdict_is_in_words(tmp_path):
    analysis = analyze(labelled(make_race(tmp_path, CLEAR)))
    first, second = analysis.rows
    assert (first.label, first.verdict) == ("sparse-value-embeds", None)
    assert analysis.metric.key == "bpb"
    assert second.verdict.words.startswith("helps (−0.0385 bits/byte, 95 % CI −0.0")
    assert second.values["loss"].mean == pytest.approx(3.2)


def test_the_metric_follows_from_the_set_up(tmp_path):
    make_race(tmp_path / "bpb", CLEAR)
    make_race(tmp_path / "loss", CLEAR, has_bpb=False)
    target = {"evaluation.target_loss": 3.32}
    make_race(tmp_path / "target", CLEAR, dict.fromkeys(CLEAR, target))
    make_race(tmp_path / "mixed", CLEAR, {"softcap": target})
    keys = {
        name: analyze(labelled(tmp_path / name)).metric.key for name in ("bpb", "loss", "target", "mixed")
    }
    assert keys == {"bpb": "bpb", "loss": "loss", "target": "train_s", "mixed": "bpb"}
    assert analyze(labelled(tmp_path / "bpb"), "loss").metric.key == "loss"
    with pytest.raises(ReportError, match="a metric"):
        analyze(labelled(tmp_path / "bpb"), "train_s")


def test_the_same_recipe_twice_gives_no_evidence(tmp_path):
    losses = np.random.default_rng(0).normal(3.3, 0.01, (2, 5)).tolist()
    make_race(tmp_path, {"softcap": losses[0]})
    runs = labelled(tmp_path)["softcap"]
    other = [
        load_run(make_run(tmp_path / f"b-{i}", seed=10 + i, final_loss=x)) for i, x in enumerate(losses[1])
    ]
    (_, row) = analyze({"A": runs, "B": other}).rows
    assert row.verdict.words.startswith("no evidence either way")
    # Bit-identical runs of the same seeds.
    (_, row) = analyze({"A": runs, "B": runs}).rows
    assert row.verdict.outcome == "no evidence"


def test_pairs_are_a_matter_of_design(tmp_path):
    five = [3.3, 3.31, 3.32, 3.33, 3.34]
    make_race(
        tmp_path,
        {
            "softcap": five,
            "softcap:lr": [x - 0.01 for x in five],
            "softcap:width": five,
            "softcap:few": five[:4],
        },
        {
            "softcap:lr": {"optim.muon.lr": 0.03},
            "softcap:width": {"model.softcap": 20.0},
            "softcap:few": {"optim.muon.lr": 0.02},
        },
    )
    base, lr, width, few = labelled(tmp_path).values()
    assert pairing_holds(base, lr)
    assert not pairing_holds(base, width)
    assert not pairing_holds(base, few)
    assert not pairing_holds(few, few)
    assert not pairing_holds(base, lr[::-1])
    make_run(tmp_path / "z-last", seed=9, final_loss=3.35, changes={"optim.muon.lr": 0.03}, started="2027")
    other_seeds = [*lr[1:], load_run(tmp_path / "z-last")]
    assert not pairing_holds(base, other_seeds)
    (tmp_path / "z-last" / "config.json").unlink()
    tests = {row.label: row.verdict.difference.test for row in analyze(labelled(tmp_path)).rows[1:]}
    assert tests["softcap:model.softcap=20"] == "Welch"
    assert tests["softcap:optim.muon.lr=0.03"] == "paired t"


def test_runs_without_the_target_are_censored_where_they_stand_or_if_over_after_all_others(tmp_path):
    changes = {"evaluation.target_loss": 3.4}
    reached = load_run(make_run(tmp_path / "reached", final_loss=3.3, changes=changes))
    others = [
        load_run(make_run(tmp_path / str(status), final_loss=3.6, changes=changes, status=status, steps=20))
        for status in ("finished", "diverged", "interrupted", None)
    ]
    target = analyze({"a": [reached]}).target
    waits = waits_of([reached, *others], target, "train_s", longest=99.0)
    assert waits.reached.tolist() == [True, False, False, False, False]
    hit = np.flatnonzero(reached.validation["val_loss"] <= 3.4)[0]
    assert waits.until.tolist() == pytest.approx([reached.validation["train_s"][hit], 99.0, 99.0, 2.0, 2.0])


def test_to_finish_early_without_the_target_is_to_lose(tmp_path):
    changes = {"evaluation.target_loss": 3.4}
    for seed in range(5):
        for name, step_s, loss in (("slow", 4.0, 3.3), ("quick", 2.0, 3.5)):
            make_run(
                tmp_path / name / str(seed),
                seed=seed,
                changes=changes,
                step_s=step_s + 0.1 * seed,
                final_loss=loss,
            )
    runs = {name: load_runs([tmp_path / name]) for name in ("slow", "quick")}
    analysis = analyze(runs)
    slow, quick = analysis.rows
    assert quick.verdict.words.startswith("hurts (target reached by 0 of 5 runs against 5 of 5")
    # The plot shows each run where it ended, whatever the test counts.
    marks = build_figures(runs, analysis)["target"]["data"][1]
    assert marks["x"] == pytest.approx([50 * (2.0 + 0.1 * seed) for seed in range(5)])
    assert marks["text"][0] == "0, seed 0: not reached in 100.0 s"
    # Two of seven are no half, however early the others stopped.
    mixed = analyze({"mixed": [*runs["quick"], *runs["slow"][:2]]}).rows[0]
    assert median_wait(mixed.waits["train_s"])[0] == np.inf
    assert median_wait(slow.waits["train_s"])[0] < np.inf


def test_a_target_gets_the_one_sided_test(tmp_path):
    changes = {label: {"evaluation.target_loss": 3.25} for label in CLEAR}
    first, second = analyze(labelled(make_race(tmp_path, CLEAR, changes))).rows
    assert first.below_target_p > 0.9
    assert second.below_target_p < 0.01


def test_a_run_that_stops_at_the_target_is_no_evidence_that_the_mean_is_below_it(tmp_path):
    changes = {"evaluation.target_loss": 3.25}
    for seed, status in enumerate(["finished", "finished", "target"]):
        make_run(
            tmp_path / str(seed), seed=seed, changes=changes, final_loss=3.2 + 0.01 * seed, status=status
        )
    runs = load_runs([tmp_path])
    assert analyze({"one stopped": runs}).rows[0].below_target_p is None
    assert analyze({"none stopped": runs[:2]}).rows[0].below_target_p is not None


def test_unfinished_runs_are_shown_but_have_no_final_loss(tmp_path):
    make_race(tmp_path, CLEAR)
    make_run(tmp_path / "going", recipe="softcap", seed=3, final_loss=9.0, status=None)
    analysis = analyze(labelled(tmp_path))
    assert analysis.rows[1].runs == 4 or analysis.rows[0].runs == 4
    softcap = next(row for row in analysis.rows if row.label == "softcap")
    assert softcap.values["loss"].count == 3
    assert "softcap: running: going (has no final loss yet)" in analysis.notes


def test_a_run_that_finished_on_nothing_finite_is_noted_as_diverged(tmp_path):
    run = make_run(tmp_path / "a")
    end_without_finite_loss(run)
    (note,) = analyze(labelled(tmp_path)).notes
    assert note == "softcap: diverged: a (counts with its last finite validation)"


def test_seeds_that_ran_twice_are_noted(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, seed=1)
    assert any("not independent" in note for note in analyze(labelled(tmp_path)).notes)


def test_statistics_as_json_are_strict_and_whole(tmp_path):
    changes = {label: {"evaluation.target_loss": 3.25} for label in CLEAR}
    data = to_json(analyze(labelled(make_race(tmp_path, CLEAR, changes))))
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again["target"] == {"kind": "loss", "value": 3.25}
    assert again["rows"][0]["to_target"]["train_s"]["reached"] == 0
    assert again["rows"][1]["to_target"]["train_s"]["mean"]["count"] == 3
    assert again["rows"][1]["verdict"]["outcome"] in ("helps", "hurts", "no evidence")


def test_mean_and_range_cover_what_all_runs_have(tmp_path):
    runs = [
        load_run(make_run(tmp_path / "a", final_loss=3.0, steps=50)),
        load_run(make_run(tmp_path / "b", final_loss=3.2, steps=30)),
    ]
    grid, mean, low, high = mean_and_range(runs, "step", "val_loss")
    assert grid.tolist() == [0, 10, 20, 30]
    a = np.interp(grid, runs[0].validation["step"], runs[0].validation["val_loss"])
    b = runs[1].validation["val_loss"]
    assert mean == pytest.approx((a + b) / 2)
    assert low == pytest.approx(np.minimum(a, b))
    assert high == pytest.approx(np.maximum(a, b))


def test_figures_of_a_long_run_are_thinned(tmp_path):
    figures = build_figures(runs := labelled(make_run(tmp_path / "a", steps=2000)), analyze(runs))
    xs = figures["loss"]["loss"]["step"]["data"][-1]["x"]
    assert len(xs) == MOST_POINTS
    assert (xs[0], xs[-1]) == (1, 2000)
    assert figures["target"] is None


def test_curves_carry_the_values_of_the_metrics(tmp_path):
    run = make_run(tmp_path / "a", clips=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    figures = build_figures(runs := labelled(run), analyze(runs))
    for x in ("step", "tokens", "train_s"):
        of_panels = {field: by_axis[x] for field, by_axis in figures["panels"].items()}
        for field, figure in {**of_panels, "loss": figures["loss"]["loss"][x]}.items():
            (curve,) = figure["data"]
            assert curve["x"] == pytest.approx([line[x] for line in trained], rel=1e-8), (x, field)
            assert curve["y"] == pytest.approx([line[field] for line in trained], rel=1e-8), (x, field)


def test_what_no_run_has_recorded_has_no_panel(tmp_path):
    make_run(tmp_path / "clips", recipe="adamw", clips=True)
    other = labelled(make_run(tmp_path / "other"))
    assert build_figures(other, analyze(other))["panels"]["grad_norm"] is None
    both = labelled(tmp_path)
    curves = build_figures(both, analyze(both))["panels"]["grad_norm"]["step"]["data"]
    assert {curve["meta"]: len(curve["y"]) for curve in curves} == {"adamw": 50, "softcap": 0}


def test_a_page_begins_with_what_came_out_in_words(tmp_path):
    def head(*runs, **changes):
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for number, values in enumerate(runs):
            make_run(directory / str(number), seed=number, **{**changes, **values})
        return text_of(render_page(labelled(directory), "t")).partition("Loss validation loss")[0]

    assert (
        "pico · 1.2 M parameters · A processor <of note> · float32 · 2026-01-01 "
        "Finished: 1.1550 bits per byte after 5.0 s of training." in head({"final_loss": 3.3})
    )
    assert "Training: 1.1550 bits per byte after" in head({"final_loss": 3.3, "status": None})
    assert "Finished: 3.3000 nats of validation loss after" in head({"has_bpb": False})
    assert "softcap : final bits/byte 1.1900 ± 0.0495 over 2 runs." in head(
        {"final_loss": 3.3}, {"final_loss": 3.5}
    )
    assert "softcap : none of 2 runs has ended yet." in head({}, {}, status=None)
    words = head({"recipe": "adamw", "final_loss": 3.5}, {"final_loss": 3.3})
    assert "Final bits/byte, compared with adamw : softcap no evidence either way" in words


def test_a_sample_shows_what_changed_since_the_milestone_before(tmp_path):
    assert with_changes("We the people", "We the <people>") == (
        "We the<del> people</del><ins> &lt;people&gt;</ins>"
    )
    assert with_changes("a b", "a b c") == "a b<ins> c</ins>"
    run = make_run(tmp_path / "a", status=None, sample="The Union is strong.")
    append_metrics(run, [{"kind": "sample", "step": 60, "text": "The Union is very strong."}])
    page = render_page(labelled(run), "t")
    newest, oldest = re.findall(r"<h4>(step \d+)</h4><pre>(.*?)</pre>", page)
    assert newest == ("step 60", "The Union is<ins> very</ins> strong.")
    assert oldest == ("step 50", "The Union is strong.")


def test_parameters_are_counted_by_what_trains_them(tmp_path):
    run = make_run(tmp_path / "a")
    text = text_of(render_page(labelled(run), "t"))
    assert "Parameters recipe all muon adam softcap 1,234,567 16,384 32,768" in text
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "routing": [], "model": {"parameters": "x"}}))
    assert "Parameters recipe all softcap – every parameter" in text_of(render_page(labelled(run), "t"))


def test_a_single_run_shows_the_gap_to_training_and_marks_its_best_validation(tmp_path):
    run = make_run(tmp_path / "a", steps=60)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "validation" and line["step"] > 30:
            line["val_loss"] += 1
            line["val_bpb"] += 0.5
            line["comparable_loss"] = line["val_loss"]
    lines.append({"kind": "warning", "step": 60, "text": "validation is rising"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = labelled(run)
    for y in ("val_loss", "val_bpb"):
        traces = build_figures(runs, analyze(runs))["loss"][y]["step"]["data"]
        training, validation, best = traces
        assert (training["name"], best["name"]) == ("training", "best")
        assert (best["x"], best["marker"]["symbol"]) == ([30.0], "star")
        assert best["y"] == [dict(zip(validation["x"], validation["y"], strict=True))[30.0]]
        # In the unit of the axis: at the start both curves are at the same loss.
        assert training["y"][0] == pytest.approx(validation["y"][0], rel=0.1)
    (one,) = load_runs([run])
    assert one.best == 3
    assert "validation is rising" in one.notes
    text = text_of(render_page(runs, "a"))
    assert "bits/byte at step 30" in text
    assert "validation is rising" in text


def test_a_spike_of_the_training_loss_leaves_the_curves_their_room(tmp_path):
    runs = labelled(make_run(tmp_path / "a"))
    calm = build_figures(runs, analyze(runs))["loss"]
    runs["softcap"][0].train["loss"][5] = 50.0  # step 6, about a tenth of the run
    spiked = build_figures(runs, analyze(runs))["loss"]
    for y in ("val_loss", "loss"):
        before, after = (figures[y]["step"]["layout"]["yaxis"]["range"] for figures in (calm, spiked))
        assert after == pytest.approx(before, rel=0.05)


def test_a_run_that_is_best_at_its_end_has_no_star(tmp_path):
    runs = labelled(make_run(tmp_path / "a"))
    names = [
        trace["name"] for trace in build_figures(runs, analyze(runs))["loss"]["val_loss"]["step"]["data"]
    ]
    assert names == ["training", "softcap"]


def test_a_page_shows_every_part(tmp_path):
    changes = {label: {"evaluation.target_loss": 3.4} for label in CLEAR}
    page = render_page(labelled(make_race(tmp_path, CLEAR, changes)), "A race", metric="bpb")
    text = text_of(page)
    for part in (
        "A race",
        "compared with",
        "Time to target",
        "softcap helps",
        "p (Holm)",
        "effect size g",
        "model.softcap",
        "blocks.0.mlp.up",
        "The state of the Union is strong.",
        "A processor <of note>",
        "OMP_NUM_THREADS",
    ):
        assert part in text, part
    assert "better" not in text
    for plot in ("loss", "target", "window", "lr", "momentum", "tokens_per_s", "memory_mib", "grad_norm"):
        assert f'id="{plot}"' in page


def test_a_single_run_and_an_empty_one_have_sensible_pages(tmp_path):
    text = text_of(render_page(labelled(make_run(tmp_path / "a")), "one"))
    assert "No statistics for a single run" in text
    assert "No verdict" in text
    started = make_run(tmp_path / "b", status=None)
    (started / "metrics.jsonl").unlink()
    (started / "environment.json").unlink()
    text = text_of(render_page(labelled(started), "begun"))
    for part in (
        "running",
        "0 of 50",
        "No samples yet",
        "has not been recorded",
        "routing has not been recorded",
    ):
        assert part in text, part


def test_text_of_runs_cannot_become_markup(tmp_path):
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">$title'
    directory = make_run(tmp_path / "<i>run", sample=evil, changes={"recipe": "<b>x</b>"})
    make_run(tmp_path / "other", changes={"recipe": "plain"})
    page = render_page(labelled(tmp_path), evil)
    shell = render_page(labelled(tmp_path / "other"), "t")
    for tag in ("<script", "</script", "<img", "<b>x", "<i>run"):
        # Plotly's own code has some of these, in every page alike.
        assert page.count(tag) == shell.count(tag), tag
    assert directory.name == "<i>run"
    assert evil in text_of(page)


def test_a_page_names_no_folder_of_this_machine(tmp_path):
    run = make_run(tmp_path / "a", changes={"data.source": "/home/jo/jos-folder/texts"})
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    environment["data"] = {"source": "/home/jo/jos-folder/texts", "directory": "~/jos-folder/texts"}
    path.write_text(json.dumps(environment))
    other = make_run(tmp_path / "b", changes={"data.source": "/home/jo/jos-folder/others"})
    page = render_page(label_runs([load_run(run), load_run(other)]), "title")
    assert "jos-folder" not in page
    assert "data.source=others" in page


def test_a_page_loads_nothing_from_elsewhere(tmp_path):
    page = render_page(labelled(make_run(tmp_path / "a")), "t")
    shell = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(?!data:)\S*//""", shell)
    assert "url(" not in shell
    assert "connect-src 'none'" in page


@pytest.mark.parametrize(
    "cause, seen",
    [
        (OSError(28, "No space left on device"), pytest.raises(ReportError, match="No space left")),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
    ],
)
def test_a_report_replaces_the_old_one_whole_or_not_at_all(tmp_path, monkeypatch, cause, seen):
    runs = labelled(make_run(tmp_path / "a"))
    out = tmp_path / "new" / "report.html"
    write_report(runs, out, "first")
    assert "<title>first</title>" in out.read_text()

    def fail(*_):
        raise cause

    monkeypatch.setattr("os.replace", fail)
    with seen:
        write_report(runs, out, "second")
    assert "<title>first</title>" in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_a_picture_is_a_png_and_the_same_each_time(tmp_path):
    runs = labelled(make_race(tmp_path / "race", CLEAR))
    for name in ("a.png", "b.png"):
        write_picture(runs, tmp_path / name, "costs $5 & more")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_command_writes_page_and_picture_and_prints_the_verdict(tmp_path, capsys):
    race = make_race(tmp_path / "race", CLEAR)
    result = run_hotlap("report", str(race), "--png", str(tmp_path / "race.png"))
    assert result.returncode == 0, result.stderr
    assert "softcap: helps (−0.0385 bits/byte" in result.stdout
    assert (race / "report.html").is_file()
    assert (tmp_path / "race.png").is_file()
    capsys.readouterr()
    assert dispatch(["report", str(race), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in data["rows"]] == list(CLEAR)


def test_wrong_input_gets_one_line(tmp_path):
    damaged = make_run(tmp_path / "damaged")
    file = damaged / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss"', '"lossy"', 1))
    line = complaint(run_hotlap("report", str(damaged)))
    assert "metrics.jsonl:2" in line
    assert not (damaged / "report.html").exists()
    good = make_run(tmp_path / "good")
    (tmp_path / "file").write_text("")
    for arguments, part in (
        ([str(tmp_path / "nowhere")], "no directory"),
        ([], "RUN"),
        ([str(good), "--metric", "speed"], "a metric"),
        ([str(good), "--out", str(tmp_path / "file" / "x.html")], "to write"),
    ):
        with pytest.raises(HotlapError, match=part):
            dispatch(["report", *arguments])
    assert dispatch(["report", str(good)]) == 0


def test_reports_need_no_torch(tmp_path):
    run = make_run(tmp_path / "a")
    code = (
        f"import sys; from hotlap.cli import dispatch; dispatch(['report', {str(run)!r}]);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(hotlap.__file__).parents[1]
    )
    assert result.returncode == 0, result.stderr
