"""`ddrp definitions report` on small checkpoints of one table."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import logsumexp

from ddrp_jax import cli
from ddrp_jax.config import Config, ModelConfig, as_dict
from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.interop.huggingface import ImportedState
from ddrp_jax.training.checkpoint import Checkpoints

WORDS = [f"{first}{second}" for first in "bcdfg" for second in ("ab", "ed", "ig", "op", "un")]
SPECIAL = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZE = len(SPECIAL) + len(WORDS)
FIRST = len(SPECIAL)
FILES = {"report.json", "report.txt", "spectrum.png", "projection.png"}


def write_tokenizer(folder, words):
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words, ""]))
    return load_tokenizer(folder)


def write_checkpoint(folder, table, tokenizer, name="word"):
    """Saves a model of one table, whose rows are padded as a training's are."""
    rows, size = table.shape
    # Rows that no token has: were they measured, every figure would be far off.
    padded = np.concatenate([table, np.full((128 - rows, size), 1e6)]).astype(np.float32)
    checkpoints = Checkpoints(
        folder / "checkpoints",
        config=as_dict(Config(model=ModelConfig(vocab_size=rows, hidden_size=size))),
        tokenizer=tokenizer,
        keep_last=1,
        keep_best=0,
    )
    params = {"encoder": {"embeddings": {name: padded}}}
    checkpoints.save(ImportedState(params, {}), step=0, progress={})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    tokenizer = write_tokenizer(folder / "tokenizer", WORDS)
    draw = np.random.default_rng(0)
    before = draw.standard_normal((SIZE, 12)).astype(np.float32) + 0.5
    after = before.copy()
    after[FIRST + 20 :] = 0.1 * draw.standard_normal((len(WORDS) - 20, 12))
    write_checkpoint(folder / "before", before, tokenizer)
    write_checkpoint(folder / "after", after, tokenizer)
    # The vocabulary's last words are the most frequent.
    corpus = " ".join(word for n, word in enumerate(WORDS) for _ in range(n))
    (folder / "corpus.txt").write_text(corpus)
    pairs = [(WORDS[n], WORDS[n + 7], n % 4) for n in range(15)]
    (folder / "pairs.txt").write_text(
        "word1\tword2\tscore\r\n" + "".join(f"{a}\t{b}\t{s}\r\n" for a, b, s in pairs)
    )
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, before=before, after=after)


def report(made, output, *arguments, before="before", after="after"):
    return cli.main(
        [
            *("definitions", "report"),
            *("--before", str(made.folder / before), "--after", str(made.folder / after)),
            *("--output", str(output), *map(str, arguments)),
        ]
    )


def strict(path):
    """JSON as the standard has it, without Python's NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def isotropy(rows):
    rows = np.asarray(rows, np.float64)
    directions = np.linalg.eigh(rows.T @ rows)[1]
    log_z = np.concatenate([logsumexp(sign * rows @ directions, axis=0) for sign in (1, -1)])
    return np.exp(log_z.min() - log_z.max())


def test_the_report(made, tmp_path, capsys):
    out = tmp_path / "report"
    arguments = ["--frequency", f"text:{made.folder / 'corpus.txt'}"]
    arguments += ["--word-similarity", made.folder / "pairs.txt", "--baseline", "all-but-the-top"]
    assert report(made, out, *arguments) == 0
    shown = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == FILES
    written = strict(out / "report.json")
    assert list(written["tables"]) == ["before", "after", "all-but-the-top"]
    assert written["vocabulary"] == {
        "total": SIZE,
        "measured": 25,
        "changed": 5,
        "changed_by_group": {"frequent": 5, "medium": 0, "rare": 0},
    }
    # Most frequent first, and never a special row.
    ranked = np.arange(SIZE)[: FIRST - 1 : -1]
    groups = {"frequent": ranked[:8], "medium": ranked[8:20], "rare": ranked[20:]}
    centred = made.before[ranked].astype(np.float64)
    centred -= centred.mean(axis=0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    baseline = np.zeros(made.before.shape)
    baseline[ranked] = (u[:, 10:] * s[10:]) @ vt[10:]
    tables = {"before": made.before, "after": made.after, "all-but-the-top": baseline}
    for name, table in tables.items():
        result = written["tables"][name]
        for part, ids in [(result, ranked), *((result["groups"][g], groups[g]) for g in groups)]:
            rows = table[ids].astype(np.float64)
            unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            cosines = (unit @ unit.T)[np.triu_indices(len(ids), 1)]
            longer = np.linalg.norm(made.before[ids], axis=1).mean()
            longer /= np.linalg.norm(rows, axis=1).mean()
            assert part["rows"] == len(ids)
            assert part["isotropy"] == pytest.approx(isotropy(rows), rel=1e-5)
            assert part["isotropy_at_original_norm"] == pytest.approx(
                isotropy(rows * longer), rel=1e-5
            )
            assert part["mean_cosine"] == pytest.approx(cosines.mean(), abs=1e-6)
        np.testing.assert_allclose(
            result["singular_values"],
            np.linalg.svd(table[ranked].astype(np.float64), compute_uv=False),
            atol=1e-4,
        )
        similar = result["word_similarity"]["pairs"]
        assert similar["single_tokens"] == similar["mean_of_pieces"]
        assert (similar["single_tokens"]["pairs"], similar["single_tokens"]["used"]) == (15, 15)
        assert f"{similar['single_tokens']['spearman']:.4g}" in shown
        assert f"{result['isotropy']:.4g}" in shown
    lines = shown.splitlines()
    assert "5 rows differ (5 frequent, 0 medium, 0 rare); ranked by text:" in shown
    assert "its first line was taken as a header: word1\tword2\tscore" in shown
    assert next(line for line in lines if line.startswith("      ")).split() == list(tables)
    assert (out / "report.txt").read_text().splitlines() == lines[: lines.index("", 7)]


def test_the_figures_show_the_tables(made, tmp_path):
    from matplotlib.image import imread

    assert report(made, tmp_path / "changed") == 0
    assert report(made, tmp_path / "same", after="before") == 0
    for name in ("spectrum.png", "projection.png"):
        changed, same = (imread(tmp_path / kind / name) for kind in ("changed", "same"))
        assert changed.shape == same.shape
        assert (changed != same).any()
    points = [imread(tmp_path / kind / "projection.png") for kind in ("changed", "same")]
    middle = points[0].shape[1] // 2
    assert (points[0][:, middle:] != points[1][:, middle:]).any()


def test_without_a_corpus_the_vocabulary_ranks(made, tmp_path, capsys):
    assert report(made, tmp_path / "report") == 0
    assert "ranked by the vocabulary's own order" in capsys.readouterr().out
    written = strict(tmp_path / "report" / "report.json")
    assert written["vocabulary"]["changed_by_group"] == {"frequent": 0, "medium": 0, "rare": 5}
    assert list(written["tables"]) == ["before", "after"]
    rare = isotropy(made.after[FIRST + 20 :])
    assert written["tables"]["after"]["groups"]["rare"]["isotropy"] == pytest.approx(rare, rel=1e-5)


def test_what_is_not_defined_is_null_and_said_so(made, tmp_path, capsys):
    (tmp_path / "odd.txt").write_text("nothing\tknown\t1\nbab\tzzz\t2\n")
    assert report(made, tmp_path / "report", "--word-similarity", tmp_path / "odd.txt") == 0
    captured = capsys.readouterr()
    assert "odd, single tokens: no rank correlation, only 0 of its 2 pairs" in captured.err
    assert "undefined" in captured.out
    written = strict(tmp_path / "report" / "report.json")
    similar = written["tables"]["before"]["word_similarity"]["odd"]
    assert similar["single_tokens"] == {"pairs": 2, "used": 0, "spearman": None}


def test_a_finished_report_is_kept_unless_told(made, tmp_path, capsys):
    out = tmp_path / "report"
    assert report(made, out) == 0
    old = (out / "report.json").read_bytes()
    assert report(made, out, after="before") == 2
    assert "pass --overwrite to replace it" in capsys.readouterr().err
    assert report(made, out, "--overwrite", after="missing") == 2
    assert (out / "report.json").read_bytes() == old
    assert report(made, out, "--overwrite", after="before") == 0
    assert strict(out / "report.json")["vocabulary"]["changed"] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    assert report(made, tmp_path / "mine", "--overwrite") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "report"]


@pytest.fixture(scope="module")
def others(made):
    """Checkpoints that cannot be held against the first."""
    folder, draw = made.folder, np.random.default_rng(1)
    other = write_tokenizer(folder / "other_tokenizer", WORDS[::-1])
    nan = made.after.copy()
    nan[FIRST + 3, 2] = np.nan
    write_checkpoint(folder / "reversed", made.after, other)
    write_checkpoint(folder / "narrow", draw.standard_normal((SIZE, 11)), made.tokenizer)
    write_checkpoint(folder / "longer", draw.standard_normal((SIZE + 1, 12)), made.tokenizer)
    write_checkpoint(folder / "nan", nan, made.tokenizer)
    write_checkpoint(folder / "nameless", made.after, made.tokenizer, name="position")
    write_checkpoint(folder / "eight", made.before[:, :8], made.tokenizer)
    damaged = shutil.copytree(folder / "after" / "checkpoints" / "0", folder / "damaged")
    (damaged / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ({"after": "reversed"}, 2, "their rows stand for different tokens"),
        ({"after": "narrow"}, 2, f"a word table of {SIZE} x 12 and '"),
        ({"after": "longer"}, 2, f"of {SIZE + 1} x 12; name two checkpoints of the same model"),
        ({"after": "nan"}, 1, "its word table holds values that are not finite"),
        ({"after": "nameless"}, 2, "no word table (encoder/embeddings/word"),
        ({"after": "damaged"}, 1, "config.json has"),
        ({"before": "nowhere"}, 2, "no such folder"),
        ({"before": "tokenizer"}, 2, "no checkpoint there"),
        (["--frequency", "text:nowhere.txt"], 2, "no file or folder 'nowhere.txt'"),
        (["--frequency", "corpus.txt"], 2, "not a source"),
        (["--word-similarity", "nowhere.txt"], 2, "word similarity 'nowhere.txt': no such file"),
        (["--baseline", "all-but-the-bottom"], 2, "did you mean 'all-but-the-top'?"),
        (
            {"before": "eight", "after": "eight", "more": ["--baseline", "all-but-the-top"]},
            2,
            "10 components: expected fewer than the 8 dimensions",
        ),
    ],
)
def test_bad_requests_leave_nothing(made, others, tmp_path, capsys, arguments, status, message):
    named = dict(arguments) if isinstance(arguments, dict) else {"more": arguments}
    more = named.pop("more", [])
    assert report(made, tmp_path / "report", *more, **named) == status
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_two_sets_of_one_name(made, tmp_path, capsys):
    (tmp_path / "pairs.txt").write_text("bab\tbed\t1\n")
    sets = ["--word-similarity", made.folder / "pairs.txt", tmp_path / "pairs.txt"]
    assert report(made, tmp_path / "report", *sets) == 2
    assert "two files are called 'pairs'" in capsys.readouterr().err
