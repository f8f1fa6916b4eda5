"""Owns `recipes list | show | keys | copy | validate | suggest`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fasttrain.cli.figures import one_line
from fasttrain.cli.printing import print_json, print_table, tell
from fasttrain.cli.signals import say_stopped, stop_on_signals
from fasttrain.cli.views import open_view
from fasttrain.errors import EXIT_DONE, RecipeError, StorageError
from fasttrain.recipe import bundled_recipes, find_recipe, resolve
from fasttrain.recipe.bundled import SUFFIXES
from fasttrain.telemetry.events import Message, Progress

_EXTENDS = re.compile(r"^extends:[ \t]+(?P<name>[^#\n]*[^#\s])", re.MULTILINE)

_EPILOG = "Add --debug for a traceback."
recipes_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@recipes_app.command("list", epilog=_EPILOG)
def list_command(json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """List the bundled recipes."""
    about = {name: _first_comment(path) for name, path in bundled_recipes().items()}
    if json:
        print_json(about)
    else:
        print_table(list(about.items()))


@recipes_app.command("show", epilog=_EPILOG)
def show_command(
    recipe: Annotated[str, typer.Argument(metavar="NAME|FILE")],
    resolved: Annotated[
        bool, typer.Option("--resolved", help="With every default written out and where each value came from.")
    ] = False,
    assignments: Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY.PATH=VALUE")] = None,
) -> None:
    """Print a recipe."""
    if resolved or assignments:
        print(resolve(recipe, assignments or []).as_yaml(), end="")
    else:
        print(_text_of(find_recipe(recipe)), end="")


@recipes_app.command("keys", epilog=_EPILOG)
def keys_command(
    section: Annotated[str, typer.Argument(help="Only this section, such as data.source.", metavar="SECTION")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List every key that a recipe may have, what it takes and its default."""
    from fasttrain.recipe.reference import sections

    found = sections(section)
    if json:
        print_json({key.path: {"takes": key.takes, "default": key.default} for one in found for key in one.keys})
        return
    for number, one in enumerate(found):
        print("\n" * bool(number) + (one.path or "recipe"))
        print(f"  {one.about}")
        if one.keys:
            print_table([(key.path, key.default, key.takes) for key in one.keys], indent="  ")


@recipes_app.command("copy", epilog=_EPILOG)
def copy_command(
    recipe: Annotated[str, typer.Argument(metavar="NAME|FILE")],
    target: Annotated[Path, typer.Argument(help="New file, or an existing folder to put it in.")],
) -> None:
    """Copy a recipe, comments and all, to change it."""
    source = find_recipe(recipe)
    if target.is_dir():
        target = target / source.name
    text = _with_parent_found(_text_of(source), source, target)
    _write_or_refuse(target, text)
    print(target)


@recipes_app.command("validate", epilog=_EPILOG)
def validate_command(
    recipes: Annotated[list[str], typer.Argument(metavar="NAME|FILE…")],
    assignments: Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY.PATH=VALUE")] = None,
) -> None:
    """Check recipes and list every fault of each."""
    faults: list[str] = []
    for recipe in recipes:
        try:
            resolve(recipe, assignments or [])
            print(f"{recipe}: sound", file=sys.stderr)
        except RecipeError as error:
            faults.extend(error.faults)
    if faults:
        raise RecipeError(faults)


@recipes_app.command("suggest", epilog=_EPILOG)
def suggest_command(
    data: Annotated[Path, typer.Option("--data", help="Folder of images and labels; every case is read.")],
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            "--gpu-gib", help="Memory of the GPU to plan for, 0 for a CPU; else this machine's.", min=0, max=1024
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the recipe; else the folder's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New file; else NAME.yaml here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Look at a data set and write a commented recipe that trains on it, by nnU-Net's rules."""
    name = _checked_name(data.absolute().resolve().name or "suggested" if name is None else name)
    target = _checked_target(Path(f"{name}.yaml") if out is None else out, name)
    if gpu_gib is not None and gpu_gib != gpu_gib:
        raise RecipeError("--gpu-gib nan: should be a number of GiB, or 0 for a CPU")
    view = open_view(sys.stderr)
    with stop_on_signals() as stop:
        from fasttrain.engine.stop import Stopped
        from fasttrain.engine.suggest import suggest

        def progress(done: int, total: int) -> None:
            view.on_event(Progress("reading cases", done, total))
            stop.check()

        try:
            stop.begun = True
            suggestion = suggest(data, name, target, gpu_gib, progress)
            for sentence in suggestion.warnings():
                view.on_event(Message(sentence, "warning"))
        except Stopped:
            return say_stopped(stop, "no recipe was written")
        finally:
            view.close()
    _write_or_refuse(target, suggestion.text)
    if json:
        print_json({"recipe": str(target), "name": name, "data": str(data), **suggestion.record()})
        return EXIT_DONE
    for title, text in suggestion.rows():
        tell(f"{title:<8} {one_line(text)}")
    print(target)
    return EXIT_DONE


def _checked_name(name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from fasttrain.recipe.spec import FolderName

    try:
        return TypeAdapter(FolderName).validate_python(name)
    except ValidationError as error:
        text = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise RecipeError(f"--name {name}: {text}") from error


def _checked_target(out: Path, name: str) -> Path:
    """Looked at before the cases are read, which can take minutes."""
    target = out / f"{name}.yaml" if out.is_dir() else out
    if target.suffix not in SUFFIXES:
        raise RecipeError(f"--out {target}: a recipe file ends in {' or '.join(SUFFIXES)}")
    if target.exists() or target.is_symlink():
        raise RecipeError(f"{target} exists already; choose another file with --out or another --name")
    if not target.parent.is_dir():
        raise StorageError(f"{target} cannot be made: its folder {target.parent} does not exist")
    return target


def _with_parent_found(text: str, source: Path, target: Path) -> str:
    """The text with `extends: FILE` as seen from the copy: a file beside the original is not beside that."""
    match = _EXTENDS.search(text)
    parent = source.parent / match["name"].strip("'\"") if match else None
    if match is None or parent is None or not parent.is_file() or target.parent.resolve() == source.parent.resolve():
        return text
    seen = os.path.relpath(parent.resolve(), target.parent.resolve())
    return f"{text[: match.start('name')]}{seen}{text[match.end('name') :]}"


def _write_or_refuse(target: Path, text: str) -> None:
    try:
        _write_new(target, text)
    except FileExistsError as error:
        raise RecipeError(f"{target} exists already; choose another name") from error
    except FileNotFoundError as error:
        raise StorageError(f"{target} cannot be made: its folder {target.parent} does not exist") from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error


def _write_new(target: Path, text: str) -> None:
    stream = open(target, "x", encoding="utf-8", newline="")  # noqa: SIM115 - only what was made here may be removed
    try:
        with stream:
            stream.write(text)
    except OSError:
        # Half a recipe would stand in the way of the next try
        target.unlink(missing_ok=True)
        raise


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe file {path} is not UTF-8 text") from error
    except OSError as error:
        raise RecipeError(f"recipe file {path} cannot be read: {error.strerror}") from error


def _first_comment(path: Path) -> str:
    """The first sentence of the comment at the top of a recipe."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# ").rstrip())
    text = " ".join(words)
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]
