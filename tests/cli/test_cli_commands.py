"""The command line without torch: exit codes, one sentence a fault, documents that parse, and no traceback."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.cli import commands, main
from fasttrain.cli.commands import tree
from fasttrain.cli.signals import stop_on_signals
from fasttrain.errors import EXIT_BUG, EXIT_INTERRUPTED, DataError, StorageError
from fasttrain.recipe import bundled_recipes, resolve

COMMANDS = [
    [], ["train"], ["resume"], ["tune-batch"], ["tune"], ["search"], ["search", "run"],
    ["search", "status"], ["search", "best"], ["check"], ["doctor"], ["drill"], ["evaluate"], ["predict"], ["export"],
    ["recipes"], ["recipes", "list"], ["recipes", "show"], ["recipes", "keys"], ["recipes", "copy"], ["recipes", "validate"],
    ["data"], ["data", "fetch"], ["data", "cache"], ["data", "import"], ["data", "import", "openkbp"],
    ["recipes", "suggest"], ["monitor"], ["report"], ["runs"], ["runs", "list"], ["runs", "compare"], ["profile"], ["ablate"],
]  # fmt: skip
GROUPS = ([], ["recipes"], ["data"], ["data", "import"], ["runs"], ["search"])


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def sentence(self) -> str:
        """The one line on stderr, without its beginning."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("fasttrain: "), self.err
        return lines[0].removeprefix("fasttrain: ")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTTRAIN_DATA", raising=False)
    environ = dict(os.environ)

    def called(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        if "--debug" not in arguments:
            assert "Traceback" not in out + err
        return Answer(ended.value.code or 0, out, err)

    yield called
    # A command sizes thread pools through the environment
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(call, command: list[str], flag: str) -> None:
    answer = call(*command, flag)
    assert answer.code == 0
    assert answer.out.startswith(f"Usage: {' '.join(['fasttrain', *command])}")
    assert answer.err == ""


@pytest.mark.parametrize("command", [one for one in COMMANDS if one not in GROUPS], ids=" ".join)
def test_the_help_of_every_command_names_debug(call, command: list[str]) -> None:
    assert "Add --debug for a traceback." in call(*command, "--help").out


def test_the_list_of_commands_here_is_whole() -> None:
    known = {" ".join(command) for command in COMMANDS if command}

    def names(group, before: str = "") -> set[str]:
        found = set()
        for name, command in getattr(group, "commands", {}).items():
            command = command.loaded() if hasattr(command, "loaded") else command
            found |= {f"{before}{name}", *names(command, f"{before}{name} ")}
        return found

    assert names(tree()) == known


def test_the_list_says_of_each_command_how_its_own_help_begins(call) -> None:
    for name, (_, about) in commands.COMMANDS.items():
        text = " ".join(call(name, "--help").out.split())
        assert f" {about} " in text[: text.index("Options:")], name
    assert re.search(r"\n  train +Train a recipe in a new run folder\.\n", call("--help").out)


def test_help_that_is_not_asked_for_is_not_given(call) -> None:
    """The value of --help is set from outside, so that it needs no conversion."""
    assert call("recipes", "list").out.startswith(f"{next(iter(bundled_recipes()))} ")
    assert call("recipes", "show", "demo").out == bundled_recipes()["demo"].read_text()
    assert call("recipes", "show").sentence.startswith("missing argument")


def test_help_names_the_exit_codes_and_all_options_of_train(call) -> None:
    assert "7 diverged" in " ".join(call("--help").out.split())
    text = call("train", "--help").out
    for option in ("--recipe", "--data", "--set", "--run", "--fold", "--device", "--dry-run", "--json"):
        assert option in text


def test_version(call) -> None:
    assert re.fullmatch(r"fasttrain \d+\.\d+\.\d+\n", call("--version").out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "no such command 'trian'; did you mean 'train'? `fasttrain --help` shows what there is"),
        (["recipes", "shw"], "no such command 'shw'; did you mean 'show'? `fasttrain recipes --help`"),
        (["train", "--recpie", "demo"], "no such option: --recpie (Possible options: --device, --recipe, --resume)"),
        (["--nothing"], "no such option: --nothing"),
        (["train"], "missing option '--recipe'"),
        (["evaluate"], "missing argument 'RUN'"),
        (["train", "-r", "demo", "--fold", "x"], "--fold x: should be a number from 0, or all"),
        (["train", "-r", "demo", "--fold", "-1"], "--fold -1: should be a number from 0, or all"),
        (["train", "-r", "demo", "extra"], "unexpected extra argument"),
        (["evaluate", "run", "--part", "tset"], "invalid value for '--part'"),
        (["train", "-r", "hipocampus"], "there is no recipe 'hipocampus'; did you mean hippocampus or hippocampus-fast?"),
        (["train", "-r", "no.yaml"], "recipe file no.yaml does not exist"),
        (["train", "-r", "demo", "-s", "training.epochs=x"], "--set training.epochs: should be a valid integer"),
        (["train", "-r", "demo", "-s", "trainig.epochs=1"], "--set trainig: no such key; did you mean training?"),
        (["train", "-r", "demo", "-s", "a"], "--set a: should be key.path=value"),
        (["train", "-r", "demo", "-s", "a=["], "not valid YAML"),
        (["train", "-r", "demo", "--fold", "3"], "--fold 3: the recipe's data.split.kind is last; folds need kfold"),
        (["train", "-r", "hippocampus", "--fold", "5"], "data.split.fold: 5 is not one of the folds 0 to 4"),
        (["train", "-r", "demo", "--device", "gpu"], "--device gpu: should be auto, cpu, cuda or cuda:N"),
        (["resume"], "there is no run under ./runs"),
        (["resume", "nowhere"], "nowhere holds no run (it has no recipe.yaml); `fasttrain train` begins one"),
        (["recipes", "show", "dem"], "there is no recipe 'dem'; did you mean demo?"),
        (["recipes", "copy", "dem", "x.yaml"], "there is no recipe 'dem'"),
        (["recipes", "validate", "dem"], "there is no recipe 'dem'"),
    ],
)  # fmt: skip
def test_usage_faults_are_one_sentence_and_exit_2(call, arguments: list[str], said: str) -> None:
    answer = call(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.sentence
    assert os.listdir() == []


def test_all_faults_of_a_recipe_are_listed(call) -> None:
    answer = call("train", "-r", "demo", "-s", "training.epochs=0", "-s", "training.seed=-1", "-s", "output.keep=x")
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 3


def test_a_group_alone_shows_its_help(call) -> None:
    answer = call("recipes")
    assert answer.code == 2
    assert "copy" in answer.out + answer.err


def test_a_run_folder_that_holds_a_run_names_resume(call, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.yaml").write_text("name: x\n")
    answer = call("train", "-r", "demo", "--run", "old")
    assert answer.code == 2
    assert "old already holds a run; go on with it by `fasttrain resume old`" in answer.sentence


def test_a_run_folder_that_cannot_be_is_exit_2_or_6(call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert call("train", "-r", "demo", "--run", "file").code == 2
    assert "not empty" in call("train", "-r", "demo", "--run", ".").sentence
    assert call("train", "-r", "demo", "--run", "a" * 300).code == 6


def test_a_data_folder_that_is_missing_names_where_and_what(call) -> None:
    answer = call("train", "-r", "hippocampus", "--device", "cpu")
    assert answer.code == 3
    assert "data/hippocampus" in answer.sentence
    assert "`fasttrain data fetch hippocampus`" in answer.sentence
    assert "--data" in answer.sentence
    assert call("train", "-r", "spleen", "--device", "cpu", "--data", "elsewhere", "--dry-run").code == 3
    assert os.listdir() == []


def test_no_gpu_is_exit_4(call, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for device in ("cuda", "cuda:7"):
        answer = call("train", "-r", "demo", "--device", device)
        assert answer.code == 4
        assert answer.sentence.startswith(f"--device {device}: ")
        assert os.listdir() == []


def test_a_dry_run_shows_the_plan_and_its_json_parses(call, tmp_path: Path, phantoms: Path) -> None:
    given = ["train", "-r", "demo", "--data", phantoms, "--device", "cpu", "--dry-run", "-s", "data.source.cases=6",
             "-s", "data.split.validation=2", "-s", "acceleration.amp=off", "-s", "acceleration.channels_last=off"]  # fmt: skip
    answer = call(*given)
    assert answer.code == 0, answer.err
    assert "4 training, 2 validation" in answer.out
    document = json.loads(call(*given, "--json").out)
    assert document["recipe"] == "demo"
    assert len(document["cases"]["training"]) == 4
    assert not (tmp_path / "runs").exists()
    assert f"network  {document['outline']}" in answer.out
    assert document["parameters"] > 100_000
    assert "measuring" not in answer.err


def test_a_dry_run_that_measures_says_so_first(call, phantoms: Path) -> None:
    small = ["data.source.cases=6", "data.split.validation=2", "patch.size=[16,16,16]", "network.features=[4,8,8,8]"]
    sets = [part for text in small for part in ("-s", text)]
    answer = call("train", "-r", "demo", "--data", phantoms, "--device", "cpu", "--dry-run", *sets)
    assert answer.code == 0, answer.err
    assert "measuring a training step in 4 ways on " in answer.err
    assert "16×16×16, 1 channel, 3 classes with background" in answer.out
    assert "1 pass a step" in answer.out


def test_a_run_that_is_not_one_is_refused_by_those_that_use_it(call, tmp_path: Path) -> None:
    for arguments in (["evaluate", "nowhere"], ["predict", "nowhere", "in", "out"]):
        answer = call(*arguments)
        assert answer.code == 2
        assert "nowhere holds no run" in answer.sentence
    assert os.listdir() == []


def finished(base: Path, name: str, status: str = "done") -> Path:
    run = base / "runs" / name
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(resolve("demo").as_yaml())
    (run / "summary.json").write_text(json.dumps({"status": status, "exit_code": 0}))
    return run


def test_resume_of_finished_runs_has_nothing_to_do(call, tmp_path: Path) -> None:
    finished(tmp_path, "one")
    answer = call("resume")
    assert answer.code == 0
    assert answer.err == "nothing to do: no run under ./runs is unfinished; the newest is runs/one, and done\n"
    assert json.loads(call("resume", "--json").out) == {"status": "done", "run": "runs/one"}
    named = call("resume", "runs/one", "--json")
    assert (named.code, json.loads(named.out)["status"]) == (0, "done")
    assert "nothing to do: runs/one is finished" in named.err


def test_resume_of_a_run_whose_recipe_was_broken_names_the_line(call, tmp_path: Path) -> None:
    run = finished(tmp_path, "one", "stopped")
    text = (run / "recipe.yaml").read_text().replace("epochs: 10", "epochs: x")
    (run / "recipe.yaml").write_text(text)
    answer = call("resume")
    assert answer.code == 2
    assert re.match(r"runs/one/recipe.yaml:\d+: training.epochs: ", answer.sentence)


def test_recipes_list(call) -> None:
    lines = call("recipes", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(bundled_recipes())
    document = json.loads(call("recipes", "list", "--json").out)
    assert list(document) == sorted(bundled_recipes())
    assert all(text.endswith((".", "compare.", "need no download.")) or text for text in document.values())


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_recipes_show_gives_the_file_or_all_values(call, tmp_path: Path, name: str) -> None:
    assert call("recipes", "show", name).out == bundled_recipes()[name].read_text(encoding="utf-8")
    (tmp_path / "all.yaml").write_text(call("recipes", "show", name, "--resolved").out)
    assert resolve("all.yaml").recipe == resolve(name).recipe
    changed = call("recipes", "show", name, "-s", "training.epochs=3").out
    assert re.search(r"epochs: 3 +# --set\n", changed)


def test_recipes_copy_never_overwrites(call, tmp_path: Path) -> None:
    answer = call("recipes", "copy", "demo", "mine.yaml")
    assert (answer.code, answer.out) == (0, "mine.yaml\n")
    assert (tmp_path / "mine.yaml").read_bytes() == bundled_recipes()["demo"].read_bytes()
    assert call("recipes", "validate", "mine.yaml").code == 0
    (tmp_path / "mine.yaml").write_text("precious")
    answer = call("recipes", "copy", "demo", "mine.yaml")
    assert answer.code == 2
    assert "mine.yaml exists already; choose another name" in answer.sentence
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    (tmp_path / "folder").mkdir()
    assert call("recipes", "copy", "demo", "folder").out == "folder/demo.yaml\n"
    answer = call("recipes", "copy", "demo", "nowhere/x.yaml")
    assert answer.code == 6
    assert "nowhere/x.yaml cannot be made: its folder nowhere does not exist" in answer.sentence


def test_a_file_that_is_no_text_is_a_sentence(call, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    for arguments in (["show", "bad.yaml"], ["copy", "bad.yaml", "new.yaml"], ["validate", "bad.yaml"]):
        answer = call("recipes", *arguments)
        assert answer.code == 2
        assert answer.sentence == "recipe file bad.yaml is not UTF-8 text"
    assert os.listdir() == ["bad.yaml"]


def test_recipes_validate_tells_all_faults_of_all_files(call, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("extends: demo\ntraining: {epochs: x, seed: x}\n")
    (tmp_path / "two.yaml").write_text("extends: demo\npatch: {size: [36, 32, 32]}\n")
    answer = call("recipes", "validate", "one.yaml", "demo", "two.yaml")
    assert answer.code == 2
    lines = answer.err.splitlines()
    assert lines[0] == "demo: sound"
    assert [line.split(":")[1].strip() for line in lines[1:]] == ["one.yaml", "one.yaml", "two.yaml"]
    assert "36 is not a multiple of 8; use 32 or 40" in lines[-1]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("fasttrain.cli.recipe_commands.bundled_recipes", fails)


def test_a_bug_is_one_sentence_and_its_traceback_comes_with_debug(call, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ZeroDivisionError("of zero"))
    answer = call("recipes", "list")
    assert answer.code == EXIT_BUG == 1
    assert "a bug of fasttrain's own: ZeroDivisionError: of zero" in answer.sentence
    answer = call("recipes", "list", "--debug")
    assert answer.code == EXIT_BUG
    assert "Traceback (most recent call last)" in answer.err


def test_known_errors_keep_their_exit_code_with_debug(call, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, DataError(["one is missing", "two is missing"]))
    answer = call("recipes", "list")
    assert (answer.code, answer.err) == (3, "fasttrain: one is missing\nfasttrain: two is missing\n")
    answer = call("--debug", "recipes", "list")
    assert answer.code == 3
    assert "Traceback" in answer.err
    raising(monkeypatch, StorageError("no disk"))
    assert call("recipes", "list").code == 6


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), EXIT_INTERRUPTED, None),
        (OSError(28, "No space left on device"), 6, "the output cannot be written: No space left on device"),
        (OSError(28, "No space left on device", "/x/y"), 6, "/x/y cannot be written: No space left on device"),
        (MemoryError(), 5, None),
        (RecursionError("deep"), 1, None),
    ],
)
def test_other_endings(call, monkeypatch, error: BaseException, code: int, said: str | None) -> None:
    monkeypatch.setattr(main, "_drop_output", lambda: None)  # it would take pytest's own stdout
    raising(monkeypatch, error)
    answer = call("recipes", "list")
    assert answer.code == code
    if said is not None:
        assert answer.sentence == said


def shell(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONUNBUFFERED")}
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; ft() {{ "{sys.executable}" -m fasttrain "$@"; }}; {command}'],
        capture_output=True,
        text=True,
        timeout=60,
        env={**found, **environ},
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_met_in_silence(unbuffered: str) -> None:
    for command in ("ft recipes list | true", "ft recipes show demo --resolved | head -1", "ft --help | true"):
        done = shell(f"sleep 0; {command}", PYTHONUNBUFFERED=unbuffered)
        assert done.stderr == "", command
    # Sure to come too late: the reader is gone before Python has begun
    late = shell("(sleep 2; ft recipes keys) | true", PYTHONUNBUFFERED=unbuffered)
    assert (late.returncode, late.stderr) == (141, "")


def test_an_output_that_is_full_is_a_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    done = shell("ft recipes list > /dev/full")
    assert done.stderr == "fasttrain: the output cannot be written: No space left on device\n"
    assert done.returncode == 6


def test_streams_that_are_closed_or_know_ascii_alone() -> None:
    assert shell("ft recipes list >&-").returncode == 0
    assert shell("ft recipes list 2>&- | head -3").returncode == 0
    done = shell("ft recipes show hippocampus", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xd7" in done.stdout


PROOF = """
import sys
from fasttrain.cli.main import run
try:
    run(sys.argv[1:])
except SystemExit as ended:
    heavy = {"torch", "monai", "numpy", "nibabel", "scipy", "matplotlib"} & set(sys.modules)
    if "--help" in sys.argv or "list" in sys.argv:
        heavy |= {"pydantic", "ruamel.yaml", "multiprocessing.pool"} & set(sys.modules)
    assert not heavy, heavy
    raise
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["recipes", "list"], ["train", "--help"], ["tune", "--help"]], ids=" ".join
)
def test_what_needs_no_torch_is_quick_and_loads_none(arguments: list[str]) -> None:
    seconds: list[float] = []
    # Those of the processor, which other work on this machine does not lengthen; the best of three
    while len(seconds) < 3 or (min(seconds) >= 0.4 and len(seconds) < 10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", PROOF, *arguments], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
    assert min(seconds) < 0.4


@pytest.mark.parametrize(
    "arguments",
    [["train", "-r", "hipocampus"], ["train", "-r", "demo", "--device", "gpu"], ["resume"], ["resume", "x"]],
)
def test_usage_faults_are_found_before_torch_is_loaded(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROOF, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "AssertionError" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_the_first_signal_asks_for_a_stop_and_handlers_come_back(number: signal.Signals, code: int) -> None:
    former = signal.getsignal(number)
    with stop_on_signals() as stop:
        stop.begun = True
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert stop.exit_code == code
        assert stop.reason == ("Ctrl-C" if number == signal.SIGINT else number.name)
    assert signal.getsignal(number) is former


def test_the_second_signal_ends_the_process_at_once() -> None:
    program = """
import os, signal, time
from fasttrain.cli.signals import stop_on_signals
with stop_on_signals() as stop:
    stop.begun = True
    os.kill(os.getpid(), signal.SIGTERM)
    print("asked", stop.exit_code, flush=True)
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("asked 143\n", 130)


def test_a_signal_before_anything_was_begun_ends_at_once_with_a_line() -> None:
    program = """
import os, signal
from fasttrain.cli.signals import stop_on_signals
with stop_on_signals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 143)
    assert done.stderr == "fasttrain: stopped before anything was begun\n"


def test_a_copy_still_finds_the_recipe_that_it_extends(call, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    call("recipes", "copy", "demo", str(tmp_path / "mine/base.yaml"))
    (tmp_path / "mine/child.yaml").write_text("# A child.\nextends: base.yaml  # beside it\nname: child\n")
    (tmp_path / "other").mkdir()
    answer = call("recipes", "copy", tmp_path / "mine/child.yaml", tmp_path / "other")
    assert answer.code == 0, answer.err
    copied = tmp_path / "other/child.yaml"
    assert copied.read_text() == "# A child.\nextends: ../mine/base.yaml  # beside it\nname: child\n"
    assert call("recipes", "validate", copied).code == 0
    answer = call("recipes", "copy", "demo", tmp_path / "nowhere/demo.yaml")
    assert (answer.code, answer.err) == (
        6,
        f"fasttrain: {tmp_path}/nowhere/demo.yaml cannot be made: its folder {tmp_path}/nowhere does not exist\n",
    )


def test_the_keys_of_recipes_are_listed(call) -> None:
    answer = call("recipes", "keys", "data.source")
    assert answer.code == 0
    assert "data.source[folders].label_suffix" in answer.out
    keys = json.loads(call("recipes", "keys", "--json").out)
    assert keys["training.batch_size"] == {"takes": "whole number ≥ 1", "default": "needed"}


def test_all_folds_from_the_command_line(call, tiny_values: dict, phantoms: Path) -> None:
    small = {
        **tiny_values,
        "data.split": {"kind": "kfold", "folds": 2},
        "training.epochs": 1,
        "training.iterations_per_epoch": 1,
    }
    sets = [part for key, value in small.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    answer = call(
        "train",
        "--recipe",
        "demo",
        "--data",
        phantoms,
        "--fold",
        "all",
        "--run",
        "all",
        "--device",
        "cpu",
        "--json",
        *sets,
    )
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert [fold["run"] for fold in document["folds"]] == ["fold_0", "fold_1"]
    assert "over 6 cases, each by the network that never saw it" in answer.err
    answer = call("resume", "all")
    assert answer.code == 0
    assert "nothing to do" in answer.err
    assert "should be a number from 0, or all" in call("train", "--recipe", "demo", "--fold", "one").sentence


def test_a_failure_is_a_document_too_where_one_was_asked_for(call, tmp_path: Path) -> None:
    answer = call("train", "--recipe", "hippocampus", "--data", tmp_path / "nowhere", "--device", "cpu", "--json")
    document = json.loads(answer.out)
    assert answer.code == 3
    assert (document["status"], document["exit_code"]) == ("failed", 3)
    assert f"fasttrain: {document['faults'][0]}" in answer.err
    assert call("train", "--recipe", "hippocampus", "--data", tmp_path / "nowhere", "--device", "cpu").out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["resume", "x" * 300],
        ["evaluate", "x" * 300],
        ["train", "--recipe", "hippocampus", "--data", "x" * 300],
        ["train", "--recipe", "x" * 300 + ".yaml"],
    ],
)
def test_a_name_that_no_disk_takes_is_a_sentence(call, arguments: list[str]) -> None:
    answer = call(*arguments)
    assert answer.code in (2, 3, 6)
    assert "bug" not in answer.sentence


def test_a_failed_newest_run_is_not_called_done(call, tmp_path: Path) -> None:
    run = tmp_path / "runs/one"
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text("name: x\n")
    (run / "summary.json").write_text(json.dumps({"status": "failed", "steps": 0}))
    answer = call("resume")
    assert answer.code == 2
    assert "failed before its first step: give its command again" in answer.err
