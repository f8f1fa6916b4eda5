"""Owns the tree of commands: their names, one line about each, and where each lies, which is loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

_EPILOG = "Add --debug for a traceback."
COMMANDS = {
    "train": ("run_commands:train_command", "Train a recipe in a new run folder."),
    "resume": ("resume_command:resume_command", "Go on with a run where it ended."),
    "tune-batch": (
        "tune_commands:tune_batch_command",
        "Measure batch sizes on this machine and write down the best; nothing is trained.",
    ),
    "tune": (
        "tune_commands:tune_command",
        "Measure batch size, cache, loader and sliding window on this machine, then train with what is fastest.",
    ),
    "search": (
        "search_commands:search_app",
        "Search hyper-parameters: many trials of a recipe, hopeless ones ended early, on one card or many machines.",
    ),
    "profile": (
        "profile_command:profile_command",
        "Say where a training step's time goes, what holds the run back, and what would gain most.",
    ),
    "ablate": (
        "ablate_command:ablate_command",
        "Measure what each acceleration gives on this machine: off alone, and on alone from a plain loop of PyTorch's.",
    ),
    "check": (
        "check_command:check_command",
        "Read every image and label in full and list every fault of every case; nothing is trained.",
    ),
    "doctor": (
        "doctor_command:doctor_command",
        "Look at the machine: torch, driver, GPU, cuDNN, compiler, CPUs, memory, disks, and what outlives the pod.",
    ),
    "drill": ("drill_command:drill_command", "Prove on this machine that the recipe survives being killed."),
    "evaluate": ("evaluate_command:evaluate_command", "Score a trained run on whole volumes, case by case."),
    "predict": (
        "trained_commands:predict_command",
        "Write a label map for every volume, on its own grid and with the recipe's label values.",
    ),
    "export": (
        "export_command:export_command",
        "Write a run's network as a MONAI bundle, TorchScript, ONNX or torch.export, each checked on a real case.",
    ),
    "monitor": (
        "monitor_command:monitor_command",
        "Watch a run from another terminal: how far, how good, how fast, and what is left.",
    ),
    "report": (
        "report_command:report_command",
        "Write a run's report: one HTML file with its curves, plan, cases, machine and cost, that needs nothing else to be read.",
    ),
    "runs": ("runs_commands:runs_app", "List runs with their key figures; compare two."),
    "recipes": ("recipe_commands:recipes_app", "List, show, copy, validate and suggest recipes."),
    "data": ("data_commands:data_app", "Fetch public data sets; show and clear what is stored."),
}
"""Name → the function or group in a module of this package, and what the list of commands says: how its own help begins."""


class Later(TyperCommand):
    """A command that is loaded when it is called or asked for its help: other commands need not pay for what it imports."""

    def __init__(self, name: str, place: str, help: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)
        self._place = place

    def loaded(self) -> Any:
        """The command itself."""
        module, _, attribute = self._place.partition(":")
        found = getattr(import_module(f"fasttrain.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            group = get_group(found)
            group.help = self.help
            return group
        alone = _app()
        alone.command(self.name, epilog=_EPILOG)(found)
        return get_command(alone)

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """The context of the command itself, which is what its group calls."""
        command = self.loaded()
        return command.make_context(*arguments, **named, default_map=_no_help(command))


def tree() -> TyperGroup:
    """The command line as a whole."""
    app = _app(
        name="fasttrain",
        help="Trains 3D and 2D medical-image networks as fast as the card allows, and says what holds a run back.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 done, 2 usage or recipe, 3 data, 4 machine, 5 out of memory, 6 disk or checkpoint, 7 diverged, "
        "130 Ctrl-C, 137 a rank was lost, 143 told to stop, 1 a bug. Add --debug to any command for a traceback.",
    )
    app.callback()(_root)
    group = get_group(app)
    for name, (place, help) in COMMANDS.items():
        group.add_command(Later(name, place, help))
    group.context_settings["default_map"] = _no_help(group)
    return group


def _no_help(command: Any) -> dict[str, Any]:
    """Says of a command, and of those below it, that --help is False where it is not given: typer has None, and loads pydantic
    to make False of it, which takes as long as all else.
    """
    return {"help": False} | {name: _no_help(below) for name, below in getattr(command, "commands", {}).items()}


def _app(**settings: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def _version(shown: bool) -> None:
    if shown:
        from fasttrain import __version__

        print(f"fasttrain {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass
